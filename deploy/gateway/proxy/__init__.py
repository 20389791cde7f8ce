"""Bytes between engines and clients: opening an answer, relaying a stream, telling a whole one."""
