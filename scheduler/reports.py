"""What cluster fronts report: their load, their instances, and the prefill jobs that they hold.

They travel between fronts and gateway as msgpack; fields may be added with defaults.
"""

from collections.abc import Iterable
from itertools import combinations
from typing import Final, Literal

import msgspec

from kvmanager.agent.messages import CacheModel, EngineStatus
from scheduler.encoding.line import EncodeLine

Role = Literal["encode", "prefill", "decode", "both"]
"""What an instance may be asked to do. encode: it encodes images and other media for the instances
that prefill. both: it prefills and decodes.
"""

CONVERTIBLE: Final[tuple[Role, ...]] = ("prefill", "decode")
"""The roles that every instance can change between, unless its role is both."""


class JobReport(msgspec.Struct, frozen=True, kw_only=True):
    """A prefill job that a front holds. It has run on `instance` for `for_s`, or waited that long
    while `instance` is "".

    `uncached_tokens` is what the instance has to compute. For a waiting job it is what the instance
    with the longest cached prefix would have to compute. `priority` is the submitter's. `pd` is the
    PD cluster that decodes.
    """

    transfer_id: str
    num_tokens: int
    uncached_tokens: int
    for_s: float
    instance: str = ""
    priority: int = 0
    model: str = ""
    pd: str = ""


class InstanceReport(msgspec.Struct, frozen=True, kw_only=True):
    """One instance as its front sees it now; `reason` says why it is not healthy.

    `node` is the control address of its node agent, `node_name` the name that people use for it.
    `cache` is the model under which its prompts are cached there, None while there is no cache or
    it is not known yet. `role_epoch` numbers the orders that gave it its role; `role_ready` is
    False while the role changes. `decode_slots` is how many requests it decodes at a time.

    The engine's own numbers were read `looked_s` before this report: the requests in its batch
    (`num_running`), the requests that wait for room in it (`num_waiting`), and the share in use
    (`kv_usage`, None where nobody reads it) of its KV memory (`kv_total_bytes`, None where that is
    not known). `landing_cap_bytes` is the most that landings may take at its node.
    `landing_room_bytes` is the largest landing that the node had room for when it last said so,
    None if it never did.
    """

    name: str
    role: Role
    model: str
    healthy: bool
    draining: bool
    running: int
    max_concurrent: int
    reason: str = ""
    num_restarts: int = 0
    node: str = ""
    node_name: str = ""
    cache: CacheModel | None = None
    layout_fingerprint: str = ""
    """Instances with the same one can use each other's KVCache; "": not known yet."""
    compatible: bool = True
    """False where no instance that decodes this model can use what it computes."""
    role_epoch: int = 0
    role_ready: bool = True
    decode_slots: int = 0
    looked_s: float = 0.0
    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float | None = None
    kv_total_bytes: int | None = None
    landing_cap_bytes: int | None = None
    landing_room_bytes: int | None = None
    leaving: bool = False
    """Whether it is forgotten as soon as its work is done and its hot prefixes are elsewhere."""
    layout: str = ""
    """Its KVCache layout in words; "": not known yet."""
    weights: str = ""
    """The identity of its weights; "": not known yet, or its agent is of an older version."""
    adapters: dict[str, str] = {}
    """The identities of its LoRA adapters by name, as far as they are known."""
    text_only: bool = False
    """Whether its engine refuses prompts with images or other media."""
    encodes: bool = False
    """Whether it encodes media for others: because of its role, or beside it."""
    paced: bool = False
    """Whether its engine computes on the CPU in the time of another device."""
    roles: tuple[Role, ...] = ()
    """The roles that it can be given; none: its front is of an older version."""
    encoder: str = ""
    """What the keys of its embeddings of media are made of (`kvmanager.embedding_keys`); "": it
    saves and loads none, or it is not known yet.
    """


class EncodeInstanceReport(msgspec.Struct, frozen=True, kw_only=True):
    """An instance that encodes media for others.

    `running_media` media with `running_tokens` tokens in their prompts are with it. `busy_s` is how
    long its passes are predicted to take from now on, and `line` the time of a pass; None: too
    little is known. It gets `budget_tokens` at a time, but at least one medium. `decodes` says
    whether it decodes as well.
    """

    name: str
    model: str = ""
    node: str = ""
    healthy: bool = True
    decodes: bool = False
    running_media: int = 0
    running_tokens: int = 0
    budget_tokens: int = 0
    busy_s: float = 0.0
    line: EncodeLine | None = None


class EncodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """The encode stage of a cluster now. The media that run are with their instances.

    Media whose embeddings are there do not wait, and equal media wait once. `token_bytes` is the
    size of an embedding for each media token, None before the first one.
    """

    waiting_media: int = 0
    waiting_tokens: int = 0
    instances: tuple[EncodeInstanceReport, ...] = ()
    token_bytes: float | None = None


class ClusterReport(msgspec.Struct, frozen=True, kw_only=True):
    """The load of a front. `healthy` means that a job submitted now would find an instance.

    `jobs` are the prefills that wait or run. `queued_tokens` and `running_tokens` count their
    uncached tokens, which say more about waiting times than the number of jobs. `reason` says why
    the front as a whole is not healthy, where no instance has the reason. `heard` is False where
    the front could not be asked, so that the report says nothing about its instances. `version` is
    the release of a front that is a process of its own. `encode` is its encode stage, None where it
    has none.
    """

    name: str
    healthy: bool
    queue_depth: int
    running: int
    instances: tuple[InstanceReport, ...]
    max_queued: int = 0
    queued_tokens: int = 0
    running_tokens: int = 0
    jobs: tuple[JobReport, ...] = ()
    reason: str = ""
    heard: bool = True
    version: str = ""
    encode: EncodeReport | None = None


def serves(instance: InstanceReport, model: str) -> bool:
    """Whether prompts for `model` may be given to the instance: to prefill, to decode, or both."""
    # One that encodes may lack the language model.
    may_serve = instance.role != "encode" and instance.healthy and not instance.draining
    return may_serve and is_of_model(instance, model)


def takes_text_only(reports: Iterable[ClusterReport | None], model: str) -> bool:
    """Whether all instances that answer requests for `model` are known, and refuse media."""
    known = list(reports)
    found = [
        item
        for report in known
        for item in (report.instances if report is not None else ())
        if item.role != "encode" and is_of_model(item, model)
    ]
    # One that is not healthy may not have said yet what it takes.
    return None not in known and bool(found) and all(item.text_only for item in found)


def decodes(role: Role) -> bool:
    """Whether an instance of this role is there to decode."""
    return role in ("decode", "both")


def convertible_roles(instance: InstanceReport) -> tuple[Role, ...]:
    """The roles that the instance can be given, with its own."""
    if instance.role == "both":
        return ("both",)
    return instance.roles or CONVERTIBLE


def why_fixed(instance: InstanceReport, role: Role) -> str:
    """Why the instance cannot be given a role; "" if it can."""
    if role in convertible_roles(instance):
        return ""
    if instance.role == "both":
        return f"{instance.name} has the role both: it prefills and decodes at any time"
    if instance.role == "encode":
        return (
            f"{instance.name} only encodes: its engine has not loaded the language model. Give it "
            "`whole_model: true` in the region's file"
        )
    return (
        f"the engine of {instance.name} encodes for no other: its cluster was started without an "
        "instance that has the role encode or `encodes: true`"
    )


def is_of_model(instance: InstanceReport, model: str) -> bool:
    """Whether the instance has the model."""
    return same_model(instance.model, model)


def same_model(one: str, other: str) -> bool:
    """Whether two names stand for one model. An empty name on either side means that the cluster
    serves one model only.
    """
    return not one or not other or one == other


def same_layout(one: str, other: str) -> bool:
    """Whether KVCache of two layouts, given by their fingerprints, may be the same. It may where
    one is not known (""): the engines compare them again before anything is loaded.
    """
    return not one or not other or one == other


def engine_report(engine: EngineStatus) -> InstanceReport:
    """An engine as its node agent describes it, for a comparison with others."""
    return InstanceReport(
        name=engine.instance,
        role="both",
        model=engine.model,
        healthy=True,
        draining=False,
        running=0,
        max_concurrent=0,
        layout_fingerprint=engine.layout_fingerprint,
        layout=engine.layout,
        weights=engine.weights,
        adapters=engine.adapters,
    )


def unlike(one: InstanceReport, other: InstanceReport) -> str:
    """Why two instances of one model cannot use each other's KVCache, with both values; "" if they
    can, serve different models, or one has not said what it has. It is about the model without
    adapters: those are compared for each request.
    """
    if not is_of_model(one, other.model):
        return ""
    of = _of(one.model or other.model)
    if same_layout(one.layout_fingerprint, other.layout_fingerprint):
        return ""
    if one.weights != other.weights:
        return (
            f"the weights{of} are {one.weights} at {one.name}, but {other.weights} at {other.name}"
        )
    return (
        f"KVCache{of} is laid out as {one.layout} ({one.layout_fingerprint[:16]}) at {one.name}, "
        f"but as {other.layout} ({other.layout_fingerprint[:16]}) at {other.name}"
    )


def unlike_groups(instances: Iterable[InstanceReport]) -> list[str]:
    """Why instances of one model cannot use each other's KVCache, or that of an adapter: a sentence
    for each two groups that differ, with both values and the names of all instances of both groups.
    """
    # By groups: while the arguments of many engines change, a sentence for each pair of instances
    # would fill screens.
    groups: dict[tuple[str, str], list[InstanceReport]] = {}
    adapters: dict[tuple[str, str], dict[str, list[str]]] = {}
    for item in instances:
        if item.layout_fingerprint:
            groups.setdefault((item.model, item.layout_fingerprint), []).append(item)
        for name, identity in item.adapters.items():
            names = adapters.setdefault((item.model, name), {})
            names.setdefault(identity, []).append(item.name)
    named = [
        msgspec.structs.replace(group[0], name=", ".join(sorted(item.name for item in group)))
        for _, group in sorted(groups.items())
    ]
    found = [unlike(one, other) for one, other in combinations(named, 2)]
    sentences = [f"{sentence}; they share no KVCache" for sentence in found if sentence]
    return sentences + [
        f"the adapter {name}{_of(model)} is {one} at {', '.join(sorted(first))}, "
        f"but {other} at {', '.join(sorted(second))}; they share no KVCache of it"
        for (model, name), known in sorted(adapters.items())
        for (one, first), (other, second) in combinations(sorted(known.items()), 2)
    ]


def _of(model: str) -> str:
    return f" of {model}" if model else ""
