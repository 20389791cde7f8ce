"""What the connector counts. vLLM is not needed to read it."""

from typing import Final

COUNTERS: Final = {
    "sent_bytes": "KVCache bytes handed to the node agent.",
    "loaded_bytes": "KVCache bytes loaded from landings.",
    "loads": "Landings loaded into the engine.",
    "failed_sends": "Transfers that this engine gave up as producer.",
    "failed_loads": "Landings that could not be loaded; their prompts were recomputed.",
    "cache_loaded_bytes": "KVCache bytes loaded from the agent's prefix cache.",
    "cache_loaded_blocks": "Blocks of which parts were loaded from the agent's prefix cache.",
    "cache_loads": "Prefixes loaded from the agent's prefix cache.",
    "cache_failed_loads": "Cached prefixes that could not be loaded; they were recomputed.",
    "cache_stored_bytes": "KVCache bytes copied into the agent's prefix cache.",
    "cache_stored_blocks": "Blocks of which parts were copied into the agent's prefix cache.",
    "cache_failed_stores": "Times that copying into the agent's prefix cache was given up.",
    "staging_waits": "Times that a step waited for staging memory of copies out of the GPU.",
    "staging_wait_seconds": "Seconds for which steps waited for staging memory.",
}
"""The meaning of each counter, by its name without `vllm:prfaas_`."""
