"""Where a front starts a prefill: `instance_choice` with work counted in uncached tokens.

A front knows how many tokens it gave to each instance, and no prefill rates. Tokens can stand for
time here: the choice only compares loads and lengths within one cluster, whose instances are alike,
so the time per token cancels out. The score keeps its meaning:

    match weight x hit share - uncached tokens ahead / tokens of the prompt

Pure. It knows no queue, no health and no bounds: the caller names only instances with room.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from scheduler.routing.instance_choice import InstanceView, choose_instance

DEFAULT_PASS_TOKENS: Final = 8192
"""vLLM's max_num_batched_tokens for a server, unless it is told another number."""

_SAID: Final = {
    "cached_tokens": "cached_tokens",
    "wait_s": "tokens_ahead",
    "holder_cached_tokens": "holder_cached_tokens",
    "holder_wait_s": "holder_tokens_ahead",
    "instances": "instances",
}
"""Names for a choice's numbers in a reason. What the choice calls seconds are tokens here."""


class Room(NamedTuple):
    """How many prefills an instance is given at a time: at most `max_jobs`, and a further one only
    while the others do not fill a forward pass of its engine, which has `pass_tokens`.

    An engine computes prompts in the order in which it got them. One that is given early waits
    there, behind prompts whose end nobody knows, while another instance might take it sooner.
    """

    max_jobs: int = 4
    pass_tokens: int = DEFAULT_PASS_TOKENS

    def has_place(self, num_jobs: int, uncached_tokens: int) -> bool:
        """Whether one more is given to an instance that has these."""
        return not num_jobs or (num_jobs < self.max_jobs and uncached_tokens < self.pass_tokens)


DEFAULT_ROOM: Final = Room()


@dataclass(frozen=True, slots=True)
class TokenLoad:
    """An instance with room for one more prefill, and what it has: `uncached_tokens`, `num_jobs`.

    `node` is another name by which its cached prefixes may be known.
    """

    name: str
    node: str = ""
    uncached_tokens: int = 0
    num_jobs: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """The chosen instance, how much of the prompt it has to compute, and why it was chosen."""

    instance: str
    uncached_tokens: int
    reason: str


def place_prefill(
    candidates: Sequence[TokenLoad], num_tokens: int, cached_tokens: Mapping[str, int]
) -> Placement:
    """Choose one of `candidates` for a prompt of `num_tokens`. ValueError if there are none.

    `cached_tokens` is by instance or node name. Of candidates that are alike in everything the
    first one is taken, so that a caller can let them take turns by the order it gives.
    """
    views = [
        InstanceView(
            name=item.name,
            node=item.node,
            running_s=item.uncached_tokens,
            num_requests=item.num_jobs,
        )
        for item in candidates
    ]
    choice = choose_instance(views, num_tokens, num_tokens, cached_tokens)
    if choice.instance is None:
        raise ValueError("no candidates; place a prefill only where an instance has room")
    # `choose_instance` breaks ties by name, which would give every idle moment to one instance.
    likes = {item.name: _likeness(item, num_tokens, cached_tokens) for item in candidates}
    name = next(item.name for item in candidates if likes[item.name] == likes[choice.instance])
    said = (
        f"{word}={choice.numbers[key]:.0f}" for key, word in _SAID.items() if key in choice.numbers
    )
    return Placement(name, num_tokens - choice.cached_tokens, "; ".join((choice.reason, *said)))


def _likeness(
    item: TokenLoad, num_tokens: int, cached_tokens: Mapping[str, int]
) -> tuple[int, int, int]:
    hits = cached_tokens.get(item.name, 0), cached_tokens.get(item.node, 0)
    return item.uncached_tokens, item.num_jobs, min(num_tokens, max(0, *hits))
