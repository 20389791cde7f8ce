"""Times a few prefills on one instance that has nothing else to do.

The prompts are drawn anew each time and have a cache salt of their own, so no cache knows them and
nobody's later prompt finds them. Their KVCache goes nowhere. This file does not know who asks, nor
what is learnt from the times.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from typing import Final

import msgspec

from kvmanager.token_ids import TokenIds
from prfaas.engines.client import EngineHttp
from prfaas.engines.errors import EngineError, UnknownInstance
from prfaas.engines.instance import Instance
from transport.rpc import RpcClient, RpcError

NUM_IDS: Final = 64
"""Prompts are made of the first so many token ids, which every vocabulary has."""
ANSWER_S: Final = 5.0
"""How much longer than a timing the answer of a front elsewhere may take, seconds."""


class TimingOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Time prompts of these `lengths` on an instance, one after the other, for `limit_s` at most.

    Lengths are in tokens. The time of the first prompt also contains what an engine does only once.
    """

    instance: str
    lengths: tuple[int, ...]
    limit_s: float


class TimedPrefills(msgspec.Struct, frozen=True):
    """Tokens and seconds of each prompt that was timed, and why the others were not ("": all
    were).
    """

    prefills: tuple[tuple[int, float], ...] = ()
    reason: str = ""


async def time_prefills(instance: Instance, order: TimingOrder) -> TimedPrefills:
    """Run `order` on its instance. Never raises: what cannot be timed has a reason."""
    found: list[tuple[int, float]] = []
    try:
        async with asyncio.timeout(order.limit_s):
            for num_tokens in order.lengths:
                # Asked each time: work that came meanwhile goes first, and would spoil the time.
                load = await instance.http.load()
                if load.num_running + load.num_waiting:
                    return TimedPrefills(tuple(found), f"{instance.name} is busy")
                found.append((num_tokens, await _timed(instance.http, instance, num_tokens)))
    except TimeoutError:
        return TimedPrefills(tuple(found), f"{instance.name} took longer than {order.limit_s:g} s")
    except EngineError as error:
        return TimedPrefills(tuple(found), f"{instance.name}: {error}")
    return TimedPrefills(tuple(found))


async def order_timing(client: RpcClient, front: str, order: TimingOrder) -> TimedPrefills:
    """Give an order to a front elsewhere. Raises UnknownInstance, and RpcError when the front
    cannot be reached or is too old for it.
    """
    try:
        return await client.call("Time", order, TimedPrefills, order.limit_s + ANSWER_S)
    except RpcError as error:
        if error.code == "NOT_FOUND":
            raise UnknownInstance(front, order.instance) from error
        raise


async def _timed(http: EngineHttp, instance: Instance, num_tokens: int) -> float:
    name = f"timing-{secrets.token_hex(8)}"
    draws = random.Random(name)
    token_ids = TokenIds.of([draws.randrange(NUM_IDS) for _ in range(num_tokens)])
    begun_s = time.monotonic()
    await http.prefill(name, token_ids, {}, model=instance.spec.served_name, cache_salt=name)
    return time.monotonic() - begun_s
