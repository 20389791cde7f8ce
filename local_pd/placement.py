"""Which instance of a local PD cluster decodes, serves whole, or prefills for another.

Pure: a snapshot in, a choice with its reason out. It does not know engines, agents or time, and
keeps no state. Rules:

- Decode with a landing: role decode or both, engine and node agent healthy, fewest requests first.
  If another instance is to prefill, one whose node has such an instance comes first among equals:
  inside a node the KVCache need not be sent. The order is returned, not one name: the memory of a
  node is known only to its agent, so the shell asks nodes in this order, each once.
- Layouts: whoever decodes lays KVCache out as those do that may prefill for it, and whoever
  prefills as the landing does, as far as these layouts are known. Engines whose arguments change
  one after the other differ for a while.
- Affinity: a node that has part of the prompt cached comes before others, as long as its instance
  has at most `slack` requests more than the least loaded one. A long queue costs more than the
  cache saves, and a popular prefix would draw every request to one node.
- Serve whole: the engine alone has to be healthy. A prefill instance is taken only when there is
  no other, because a decode on it would slow the prefills it is there for. One that drains is taken
  when there is nothing else at all: it serves still, and a client must not be turned away for it.
- An engine without an encoder gets no prompt with media.
- An instance that encodes media is given nothing else: its engine may lack the language model.
- Prefill for another: role prefill, with room for one more job; of those `front_placement`
  chooses, by what is cached there against the uncached tokens under way, and the landing's own node
  among equals.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from scheduler.reports import Role, decodes, same_layout, same_model
from scheduler.routing.front_placement import DEFAULT_ROOM, Room, TokenLoad, place_prefill

DEFAULT_AFFINITY_SLACK: Final = 4


class PdInstance(msgspec.Struct, frozen=True):
    """One instance now. Every request makes one of each instance, so it is a struct.

    `serves`: the engine is healthy; `transfers`: its node agent is as well. `num_requests` counts
    all requests of the engine, `num_prefills` the prefills that this front has given to it, and
    `prefill_tokens` their uncached tokens. `layout` has its KVCache layout in words. The
    fingerprint is "" while it is not known.
    """

    name: str
    node: str
    role: Role
    model: str = ""
    serves: bool = True
    transfers: bool = True
    draining: bool = False
    num_requests: int = 0
    num_prefills: int = 0
    prefill_tokens: int = 0
    room: Room = DEFAULT_ROOM
    layout_fingerprint: str = ""
    layout: str = ""
    text_only: bool = False


@dataclass(frozen=True, slots=True)
class Affinity:
    """Preferred nodes, best first, and how many more requests than others they may have."""

    nodes: tuple[str, ...] = ()
    slack: int = DEFAULT_AFFINITY_SLACK

    def rank(self, view: PdInstance, least_requests: int) -> int:
        """The rank of an instance; lower is better. All that are not preferred have the same."""
        is_preferred = view.node in self.nodes and view.num_requests - least_requests <= self.slack
        return self.nodes.index(view.node) if is_preferred else len(self.nodes)


NO_AFFINITY: Final = Affinity()


@dataclass(frozen=True, slots=True)
class InstanceChoice:
    """The chosen instance, or None; `reason` explains both. If it was chosen to prefill, it has to
    compute `uncached_tokens`. `is_full`: there are instances that could, and all have their most.
    """

    name: str | None
    reason: str
    uncached_tokens: int = 0
    is_full: bool = False


@dataclass(frozen=True, slots=True)
class PrefillWish:
    """A prompt to prefill. `cached_tokens` says, by instance or node name, how much of it is cached
    there. `tried` has the instances on which it has failed, `node` is where its KVCache lands, and
    `layout_fingerprint` is that of the landing ("" fits every instance). `has_media`: it has images
    or other media.
    """

    num_tokens: int
    model: str = ""
    cached_tokens: Mapping[str, int] = field(default_factory=dict)
    tried: Collection[str] = ()
    node: str = ""
    layout_fingerprint: str = ""
    has_media: bool = False


@dataclass(frozen=True, slots=True)
class Candidates:
    """Instances to ask, in this order. `reason` explains the order, or why there are none."""

    names: tuple[str, ...]
    reason: str


def decode_order(
    views: Sequence[PdInstance],
    model: str,
    affinity: Affinity = NO_AFFINITY,
    *,
    hands_off: bool = False,
    layouts: Collection[str] = (),
    has_media: bool = False,
) -> Candidates:
    """Instances that may decode, best first. `hands_off`: another instance is to prefill. `layouts`
    are the fingerprints of the KVCache that can be sent here from elsewhere, if they are known.
    `has_media`: the prompt has images or other media.
    """
    views = _reading(views, has_media=has_media)
    prefilling = _prefilling(views, model) if hands_off else []
    if hands_off:
        layouts = {view.layout_fingerprint for view in prefilling}
    usable = [
        view
        for view in _available(views, model)
        if decodes(view.role) and view.transfers and _fits(view, layouts)
    ]
    if not usable:
        return Candidates((), _explain(views, model, "decode", layouts, "what is prefilled"))
    least = min(view.num_requests for view in usable)
    nodes = {view.node for view in prefilling if _has_room(view)}
    usable.sort(
        key=lambda view: (
            affinity.rank(view, least),
            view.num_requests,
            view.node not in nodes,
            view.name,
        )
    )
    order = "least loaded first"
    if usable[0].node in nodes:
        order = f"{order}, at {usable[0].node} with a prefill instance beside it"
    if affinity.nodes:
        order = f"{_affinity_said(usable[0], least, affinity)}, then {order}"
    return Candidates(tuple(view.name for view in usable), f"{len(usable)} usable, {order}")


def choose_direct(
    views: Sequence[PdInstance],
    model: str,
    affinity: Affinity = NO_AFFINITY,
    *,
    has_media: bool = False,
) -> InstanceChoice:
    """One instance that serves a request from its first to its last token."""
    views = _reading(views, has_media=has_media)
    able = [v for v in _of_model(views, model) if v.serves and v.role != "encode"]
    usable = [view for view in able if not view.draining] or able
    if not usable:
        return InstanceChoice(None, _explain(views, model, "serve"))
    decoding = [view for view in usable if decodes(view.role)] or usable
    least = min(view.num_requests for view in decoding)
    best = min(
        decoding, key=lambda view: (affinity.rank(view, least), view.num_requests, view.name)
    )
    if affinity.nodes:
        said = _affinity_said(best, least, affinity)
        return InstanceChoice(best.name, f"{best.num_requests} requests, {said}")
    return InstanceChoice(best.name, f"{best.num_requests} requests, fewest of {len(usable)}")


def choose_prefill(views: Sequence[PdInstance], wish: PrefillWish) -> InstanceChoice:
    """One instance that prefills for another."""
    views = _reading(views, has_media=wish.has_media)
    layouts = (wish.layout_fingerprint,)
    usable = [
        view
        for view in _prefilling(views, wish.model)
        if view.name not in wish.tried and _fits(view, layouts)
    ]
    if not usable:
        why = _explain(views, wish.model, "prefill", layouts, "the landing")
        return InstanceChoice(None, why)
    # `place_prefill` takes the first of equals.
    with_room = sorted(filter(_has_room, usable), key=lambda view: view.node != wish.node)
    if not with_room:
        bounds = ", ".join(f"{view.name} {view.num_prefills}" for view in usable)
        return InstanceChoice(None, f"prefill instances are full (jobs: {bounds})", is_full=True)
    loads = [
        TokenLoad(view.name, view.node, view.prefill_tokens, num_jobs=view.num_requests)
        for view in with_room
    ]
    placement = place_prefill(loads, wish.num_tokens, wish.cached_tokens)
    is_beside = any(v.name == placement.instance and v.node == wish.node for v in with_room)
    said = f"{placement.reason}; on the landing's node" if is_beside else placement.reason
    return InstanceChoice(placement.instance, said, placement.uncached_tokens)


def _reading(views: Sequence[PdInstance], *, has_media: bool) -> Sequence[PdInstance]:
    """The instances whose engines take the prompt; all of them for text."""
    return [view for view in views if not view.text_only] if has_media else views


def _prefilling(views: Sequence[PdInstance], model: str) -> list[PdInstance]:
    return [v for v in _available(views, model) if v.role == "prefill" and v.transfers]


def _fits(view: PdInstance, layouts: Collection[str]) -> bool:
    """Whether it can exchange KVCache with one of these layouts; none: they are not known."""
    return not layouts or any(same_layout(view.layout_fingerprint, other) for other in layouts)


def _has_room(view: PdInstance) -> bool:
    return view.room.has_place(view.num_prefills, view.prefill_tokens)


def _affinity_said(best: PdInstance, least_requests: int, affinity: Affinity) -> str:
    if affinity.rank(best, least_requests) < len(affinity.nodes):
        return f"part of the prompt is cached at {best.node}"
    return (
        f"fewest; where the prompt is cached there are over {affinity.slack} more, or no instance"
    )


def _available(views: Sequence[PdInstance], model: str) -> list[PdInstance]:
    return [view for view in _of_model(views, model) if not view.draining]


def _of_model(views: Sequence[PdInstance], model: str) -> list[PdInstance]:
    return [view for view in views if same_model(view.model, model)]


def _explain(
    views: Sequence[PdInstance],
    model: str,
    purpose: str,
    layouts: Collection[str] = (),
    laid_out: str = "",
) -> str:
    """Why no instance can do this; `laid_out` names what has the `layouts`."""

    def state(view: PdInstance) -> str:
        trouble = _state(view, model)
        if not trouble and not _fits(view, layouts):
            return f"lays KVCache out otherwise than {laid_out}: {view.layout}"
        return trouble or "is of another role or was tried"

    states = ", ".join(f"{view.name} ({view.role}) {state(view)}" for view in views)
    return f"no instance can {purpose}: {states or 'none configured'}"


def _state(view: PdInstance, model: str) -> str:
    """What keeps it from any work; "": nothing."""
    if not same_model(view.model, model):
        return f"serves {view.model}, not {model}"
    if not view.serves:
        return "engine is not healthy"
    if not view.transfers:
        return "node agent is not healthy"
    return "is draining" if view.draining else ""
