"""Hit shares of prefix caches, from the counters of node agents."""

from __future__ import annotations

from kvmanager.agent.messages import CacheStatus


def hit_share(cache: CacheStatus) -> float | None:
    """Hit tokens of all tiers by tokens looked up; None before the first look-up."""
    if not cache.query_tokens:
        return None
    return min(1.0, sum(cache.hit_tokens.values()) / cache.query_tokens)
