"""Which versions of vLLM the connector was written for, and how an installed one differs.

`vllm_0_32.json` and its like say what the connector uses of a version; `python -m
kvmanager.vllm_connector.versions` writes them. `check` compares when an engine starts.
"""
