"""The hybrid prefix pool: cached KVCache of many prompts in one arena, shared and evictable."""
