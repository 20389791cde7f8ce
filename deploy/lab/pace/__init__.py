"""Paced engines: real vLLM on the CPU whose passes take the time that another device would."""
