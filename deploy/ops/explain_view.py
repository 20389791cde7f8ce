"""The output of `prfaas explain` for a record. It knows records, not where they come from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from deploy.gateway.serving.records import Outcome, RequestRecord
from deploy.ops.media_words import media_facts
from deploy.table_style import new_table, say
from kvmanager.config_files.units import format_age, format_bytes, format_rate
from scheduler.routing.decision import HAND_OFF, ONE_ENGINE, Number, Reason
from scheduler.routing.instance_choice import ChoiceReason
from scheduler.routing.spill import PdReason
from transport.plain import printable

_ROWS: Final = (
    ("read", "", "read_s"),
    ("fetch media", "", "media_s"),
    ("turn into tokens", "", "render_s"),
    ("look up cached", "", "look_up_s"),
    ("move cache", "move_s", "move_s"),
    ("reserve", "", "reserve_s"),
    ("encode media", "encode_s", "encode_s"),
    ("queue", "queue_s", "queue_s"),
    ("open outbox", "", "open_s"),
    ("engine's queue", "", "engine_queue_s"),
    ("prefill", "prefill_s", "prefill_s"),
    ("transfer tail", "tail_s", "transfer_tail_s"),
    ("order and news", "", "news_s"),
    ("decode slot", "slot_s", "load_wait_s"),
    ("load", "", "load_s"),
    ("first step", "step_s", "first_step_s"),
    ("relay", "", "relay_s"),
    ("overhead", "overhead_s", ""),
    ("contention", "contention_s", ""),
    ("other", "", "other_s"),
)
"""The rows of the table of parts: title, name in a prediction, name in `TtftParts`."""

PART_TITLES: Final = {
    **{part.removesuffix("_s"): title for title, _, part in _ROWS if part},
    "load_and_first_step": "load, first step",
    "load_and_decode": "load, all steps",
    "decode": "all further steps",
}
"""Words for the parts of `TtftParts.known`."""

_SIDES: Final = ("local", "remote")

_WHOLE: Final = "one engine must serve it whole: "

REASONS: Final[dict[Reason, str]] = {
    Reason.ABOVE_THRESHOLD: (
        "more tokens are uncached than the threshold, and the PD cluster is not predicted to be "
        "clearly sooner"
    ),
    Reason.BELOW_THRESHOLD: (
        "no more tokens are uncached than the threshold, and no prefill cluster is predicted to be "
        "clearly sooner"
    ),
    Reason.REMOTE_SOONER: (
        "the threshold keeps it local, but the prefill cluster is predicted to be clearly sooner"
    ),
    Reason.LOCAL_SOONER: (
        "the threshold sends it away, but the PD cluster is predicted to be clearly sooner"
    ),
    Reason.SEVERAL_PROMPTS: _WHOLE + "it has several prompts",
    Reason.SEVERAL_CHOICES: _WHOLE + "its `n` is for the engine to judge",
    Reason.PROMPT_LOGPROBS: _WHOLE + "it asks for log probabilities of the prompt",
    Reason.ECHO: _WHOLE + "it asks for the prompt back",
    Reason.BEAM_SEARCH: _WHOLE + "it asks for beam search",
    Reason.MULTIMODAL: _WHOLE + "only that engine can read its media",
    Reason.PROMPT_EMBEDS: _WHOLE + "its prompt is embeddings",
    Reason.NOTHING_TO_HAND_OVER: _WHOLE + "its prompt has no KVCache to hand over",
    Reason.UNUSUAL_BODY: _WHOLE + "its body has what the gateway does not know",
    Reason.FORWARDED: _WHOLE + "its endpoint generates no text",
    Reason.RENDER_REFUSED: "the engine would not take it, and will say why itself",
    Reason.RENDER_UNAVAILABLE: "no engine turned it into tokens in time",
    Reason.NO_PREFILL_CLUSTER: "there is no prefill cluster",
    Reason.PREFILL_UNHEALTHY: "the prefill cluster has no healthy instance, or does not report",
    Reason.KVCACHE_UNUSABLE: (
        "whoever would prefill it has other weights or another KVCache layout than whoever would "
        "decode it; `prfaas status` says which"
    ),
    Reason.PREFILL_QUEUE_FULL: "the prefill cluster's queue is full",
    Reason.NO_LANDING_ROOM: "the PD cluster has no room for its KVCache to land",
    Reason.LINK_BUSY: "its KVCache would land too late: the link is slow or much waits for it",
    Reason.LINK_CONGESTED: (
        "the link is not clear now, which raises the current threshold above its uncached tokens"
    ),
    Reason.LINK_DOWN: "the link from the prefill cluster is down",
    Reason.LINK_STALE: "no agent has reported lately about the link from the prefill cluster",
    Reason.ADAPTER_DIFFERS: (
        "the engines that would prefill have other weights of the adapter, or do not say which"
    ),
    Reason.RESERVE_FAILED: "the PD cluster did not reserve a landing",
    Reason.PREFILL_FAILED: "the prefill elsewhere failed",
    Reason.DECODE_FAILED: "the engine that was to decode failed",
}

OUTCOMES: Final[dict[Outcome, str]] = {
    "open": "being served",
    "ok": "answered",
    "client_gone": "the client went away",
    "engine_error": "the engine answered with an error",
    "engine_lost": "the engine broke off its answer",
    "refused": "refused: over a limit, or too much load",
    "failed": "failed in the gateway",
}

TARGETS: Final = {
    ONE_ENGINE: "one engine of the PD cluster prefills and decodes",
    HAND_OFF: "a prefill instance of the PD cluster, for one of its decode instances",
}
"""Words for the targets that are no prefill cluster."""

SPILLS: Final[dict[str, str]] = {
    PdReason.HOME_UNABLE: "no engine of its home could serve it",
    PdReason.HOME_REFUSES: "its home would have refused it, for its load",
    PdReason.HOME_FULL: "it would have waited for a decode slot at home",
    PdReason.SOONER: "it was predicted to be sooner there",
}
"""Why a request left its home, in words."""

HAND_OFFS: Final = {
    "transport": "hand_off=transport: sent from node agent to node agent",
    "arena": "hand_off=arena: written into the memory that both engines of the node share",
    "nixl": "hand_off=nixl: read by vLLM's NixlConnector from the other engine",
}
"""Words for `RequestRecord.hand_off`."""

_PLACEMENTS: Final = {
    ChoiceReason.CACHED: "it has most of the prompt cached",
    ChoiceReason.LEAST_LOADED: "it has the least to do, and none has the prompt cached",
    ChoiceReason.HOLDER_BUSY: "another one has more cached, and too much to do",
    ChoiceReason.NO_INSTANCE: "no instance could be had",
}


def print_records(console: Console, records: Sequence[RequestRecord], now_s: float) -> None:
    """Print all records of one id, newest first. `now_s` is wall-clock time."""
    if len(records) > 1:
        say(console, f"{len(records)} requests had this id, the newest first")
    for record in records:
        _print_record(console, record, now_s)


def went_as_routed(record: RequestRecord) -> bool:
    """Whether the first try took the predicted route and succeeded."""
    first = record.first_route, record.first_target, record.first_reason, record.first_cluster
    latest = record.route, record.target, record.reason, record.cluster
    return first == latest and not record.num_retries


def ttft_error(record: RequestRecord) -> float | None:
    """Predicted / measured TTFT - 1; None if the two cannot be compared."""
    if record.predicted_ttft_s is None or not record.ttft_s:
        return None
    # An answer in one piece shows no first token, and a retry took a route that was not predicted.
    if not (record.is_stream and record.status == 200 and went_as_routed(record)):
        return None
    return record.predicted_ttft_s / record.ttft_s - 1


def _print_record(console: Console, record: RequestRecord, now_s: float) -> None:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for title, text in _facts(record, now_s):
        grid.add_row(title, Text(printable(text, lines=True)))
    console.print(grid)
    if record.predictions or record.ttft_s is not None:
        console.print(_parts_table(record))
    for note in _notes(record):
        say(console, note)


def _facts(record: RequestRecord, now_s: float) -> Iterator[tuple[str, str]]:
    model, tenant = record.model or "the only model", record.tenant
    if record.adapter:
        model = f"{record.adapter}, an adapter of {model}"
    # The record has the gateway's clock, which may be ahead of this host's.
    age = format_age(max(0.0, now_s - record.started_s))
    yield "request", f"{record.request_id}: {record.endpoint} for {model}, {age} ago"
    if tenant:
        yield "tenant", tenant
    yield "outcome", _outcome(record)
    yield from _route(record)
    if record.home:
        yield "home", f"PD cluster {record.home}"
    if record.spill:
        words = SPILLS.get(record.spill, record.spill)
        yield "decoded in", f"PD cluster {record.cluster}: {words}"
    yield "prompt", _prompt(record)
    if cached := _cached(record):
        yield "cached", cached
    yield from media_facts(record)
    if record.cache_move:
        yield "cache move", record.cache_move
    numbers = record.numbers
    if "threshold_tokens" in numbers:
        yield "current threshold", f"{_tokens(numbers['threshold_tokens'])} uncached"
    if "link_bytes_per_s" in numbers:
        yield "link", _link(numbers)
    if "landing_room_bytes" in numbers:
        yield "landing", _landing(numbers)
    if record.transfer_bytes:
        yield "sent", _sent(record)
    if record.hand_off:
        yield "handed over", HAND_OFFS.get(record.hand_off, record.hand_off)
    yield from _places(record)


def _outcome(record: RequestRecord) -> str:
    status = f" (HTTP {record.status})" if record.status else ""
    retries = f", at try {record.num_retries + 1}" if record.num_retries else ""
    told = ": ".join(text for text in (record.error_code, record.error) if text)
    error = f": {told}" if told else ""
    return f"{OUTCOMES[record.outcome]}{status}{retries}{error}"


def _route(record: RequestRecord) -> Iterator[tuple[str, str]]:
    if not record.route:
        yield "route", "none was taken"
        if record.reason:
            yield "reason", reason_words(record.reason)
        return
    is_first = went_as_routed(record) or not record.first_reason
    if not is_first:
        first = f"{target_words(record.first_target)} ({record.first_reason})"
        yield "first", f"{first}: {reason_words(record.first_reason)}"
    yield "route" if is_first else "then", f"{target_words(record.target)} ({record.reason})"
    yield "reason", reason_words(record.reason)
    if record.prefill_error:
        yield "prefill", f"failed: {record.prefill_error}"


def _prompt(record: RequestRecord) -> str:
    numbers = record.numbers
    if record.num_prompt_tokens is None:
        likely = numbers.get("prompt_tokens_about")
        about = "" if likely is None else f": about {_tokens(likely)}"
        return f"not counted{about}"
    text = _tokens(record.num_prompt_tokens)
    if "uncached_tokens" in numbers:
        text += f", {numbers['uncached_tokens']:,} of them uncached where it is computed"
    if "local_uncached_tokens" in numbers:
        text += f", {numbers['local_uncached_tokens']:,} at the PD cluster"
    return text


def _cached(record: RequestRecord) -> str:
    if record.local_cached_tokens is None:
        return ""
    at = {"PD cluster": record.local_cached_tokens, **record.prefill_cached_tokens}
    if record.landing_cached_tokens is not None:
        at["landing"] = record.landing_cached_tokens
    return ", ".join(f"{where} {num:,}" for where, num in at.items())


def _landing(numbers: Mapping[str, Number]) -> str:
    wanted, room = (round(numbers[name]) for name in ("landing_bytes", "landing_room_bytes"))
    return f"{format_bytes(wanted)} of KVCache, room for {format_bytes(room)}"


def _link(numbers: Mapping[str, Number]) -> str:
    rate = numbers["link_bytes_per_s"]
    backlog = round(numbers.get("link_backlog_bytes", 0))
    shown = format_rate(rate) + "/s" if rate else "carries nothing"
    return f"{shown}, {format_bytes(backlog)} waiting" if backlog else shown


def _sent(record: RequestRecord) -> str:
    assert record.transfer_bytes is not None
    text = format_bytes(record.transfer_bytes)
    if record.transfer_s:
        text += f" in {_seconds(record.transfer_s)} s"
    if record.sent_share_at_prefill_end is not None:
        text += f", {record.sent_share_at_prefill_end:.0%} of it before the prefill ended"
    if record.saved_bytes:
        text += f"; {format_bytes(record.saved_bytes)} were there already"
    return text


def _places(record: RequestRecord) -> Iterator[tuple[str, str]]:
    if record.prefill_instance:
        attempts = record.num_prefill_attempts
        nth = f", at try {attempts}" if attempts > 1 else ""
        why = f": {placement_words(record.placement)}" if record.placement else ""
        yield "prefilled by", record.prefill_instance + nth + why
    if record.decode_instance:
        is_apart = record.route == "prefill_cluster" or record.target == HAND_OFF
        why = f": {record.decode_reason}" if record.decode_reason else ""
        yield "decoded by" if is_apart else "served by", record.decode_instance + why


def _parts_table(record: RequestRecord) -> Table:
    """The parts of the time to first token, predicted and measured, in the order in which they
    pass.
    """
    taken = "remote" if record.first_route == "prefill_cluster" else "local"
    headings = [f"{side}\n(taken)" if side == taken else f"{side}\n" for side in _SIDES]
    table = new_table("", numbers=(*headings, "measured\n", "error\n"))
    table.title = "time to first token, s"
    # A prediction for one route says nothing about the times of another.
    compared = record.predictions.get(taken, {}) if went_as_routed(record) else {}
    for title, predicted, part in _ROWS:
        measured = getattr(record.parts, part) if part else None
        sides = [_side(record, side).get(predicted) for side in _SIDES]
        if measured is not None or any(value is not None for value in sides):
            # What is predicted of the wait for a prefill engine includes its own queue.
            taken_s = measured
            if measured is not None and predicted == "queue_s":
                taken_s = measured + (record.parts.engine_queue_s or 0.0)
            error = _error(compared.get(predicted), taken_s)
            table.add_row(title, *map(_seconds, (*sides, measured)), error)
    if (rest := _rest(record)) is not None:
        table.add_row(rest[0], "", "", _seconds(rest[1]), "")
    table.add_section()
    totals = [sum(parts.values()) if (parts := _side(record, side)) else None for side in _SIDES]
    first_s = record.ttft_s if record.is_stream else None
    error_share = ttft_error(record)
    error = "" if error_share is None else f"{error_share:+.0%}"
    table.add_row("first token", *map(_seconds, (*totals, first_s)), error, style="bold")
    return table


def _rest(record: RequestRecord) -> tuple[str, float] | None:
    """The name and seconds of the part of the TTFT that no other part explains."""
    parts = record.parts
    first_s, decode_s = parts.load_and_first_step_s, parts.load_and_decode_s
    if parts.decode_s is not None:
        return PART_TITLES["decode"], parts.decode_s
    # Without a prefill of its own in the record, one engine did both within this time.
    word = "engine" if parts.prefill_s is None else "load"
    if first_s is not None:
        return f"{word}, first step", first_s
    return None if decode_s is None else (f"{word}, all steps", decode_s)


def _side(record: RequestRecord, side: str) -> Mapping[str, float]:
    return record.predictions.get(side, {})


def _notes(record: RequestRecord) -> Iterator[str]:
    if not record.predictions and record.route:
        yield "nothing was predicted: the prompt was not counted, or one engine had to serve it"
    elif record.predictions and not went_as_routed(record):
        yield "the predictions are of the route first taken"
    if record.ttft_s is not None and not record.is_stream:
        yield (
            f"not streamed: the whole answer was there after {_seconds(record.ttft_s)} s, "
            "so its first token was not seen"
        )
    if not record.is_settled:
        yield "it is not over yet; numbers may change"


def _error(predicted_s: float | None, measured_s: float | None) -> str:
    if predicted_s is None or not measured_s:
        return ""
    return f"{predicted_s / measured_s - 1:+.0%}"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _tokens(num: Number) -> str:
    return f"{num:,} token" if num == 1 else f"{num:,} tokens"


def reason_words(reason: str) -> str:
    """A route's reason in words. A reason of another version stays as it is."""
    return REASONS[Reason(reason)] if reason in set(Reason) else reason


def target_words(target: str) -> str:
    """Where the prompt is computed, in words."""
    return TARGETS.get(target, f"prefill cluster {target}")


def placement_words(placement: str) -> str:
    """Why an instance was chosen. A front writes it as "reason; name=number; ..."."""
    reason, separator, numbers = placement.partition("; ")
    words = _PLACEMENTS[ChoiceReason(reason)] if reason in set(ChoiceReason) else reason
    return f"{words} ({numbers.replace('; ', ', ')})" if separator else words
