"""vLLM engines as a cluster front runs them: processes, health, requests, prefills."""
