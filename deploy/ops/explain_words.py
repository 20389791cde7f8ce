"""Reasons of routing and outcomes of requests as sentences. Knows the words, not the records."""

from __future__ import annotations

from typing import Final

from deploy.gateway.serving.records import Outcome
from scheduler.routing.decision import HAND_OFF, ONE_ENGINE, Reason
from scheduler.routing.instance_choice import ChoiceReason

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
    Reason.SEVERAL_CHOICES: _WHOLE + "it asks for several choices",
    Reason.PROMPT_LOGPROBS: _WHOLE + "it asks for log probabilities of the prompt",
    Reason.ECHO: _WHOLE + "it asks for the prompt back",
    Reason.BEAM_SEARCH: _WHOLE + "it asks for beam search",
    Reason.MULTIMODAL: _WHOLE + "it has more than text",
    Reason.PROMPT_EMBEDS: _WHOLE + "its prompt is embeddings",
    Reason.NOTHING_TO_HAND_OVER: _WHOLE + "its prompt has no KVCache to hand over",
    Reason.UNUSUAL_BODY: _WHOLE + "its body has what the gateway does not know",
    Reason.RENDER_REFUSED: "the engine would not turn it into tokens, and is to say why itself",
    Reason.RENDER_UNAVAILABLE: "no engine turned it into tokens in time",
    Reason.NO_PREFILL_CLUSTER: "there is no prefill cluster",
    Reason.PREFILL_UNHEALTHY: "the prefill cluster has no healthy instance, or does not report",
    Reason.PREFILL_QUEUE_FULL: "the prefill cluster's queue is full",
    Reason.NO_LANDING_ROOM: "the PD cluster has no room for its KVCache to land",
    Reason.LINK_BUSY: "its KVCache would land too late: the link is slow or much waits for it",
    Reason.LINK_CONGESTED: (
        "the link is not clear now, which raises the threshold above its uncached tokens"
    ),
    Reason.LINK_DOWN: "the link from the prefill cluster is down",
    Reason.LINK_STALE: "nothing was heard lately of the link from the prefill cluster",
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
"""Of those that are no prefill cluster."""

_PLACEMENTS: Final = {
    ChoiceReason.CACHED: "it has most of the prompt cached",
    ChoiceReason.LEAST_LOADED: "it has the least to do, and none has the prompt cached",
    ChoiceReason.HOLDER_BUSY: "another one has more cached, and too much to do",
    ChoiceReason.NO_INSTANCE: "no instance could be had",
}


def reason_words(reason: str) -> str:
    """A route's reason; a word of another version stays what it is."""
    return REASONS[Reason(reason)] if reason in set(Reason) else reason


def target_words(target: str) -> str:
    """Where the prompt is computed."""
    return TARGETS.get(target, f"prefill cluster {target}")


def placement_words(placement: str) -> str:
    """Why an instance was chosen: "reason; name=number; ..." of a front."""
    reason, separator, numbers = placement.partition("; ")
    words = _PLACEMENTS[ChoiceReason(reason)] if reason in set(ChoiceReason) else reason
    return f"{words} ({numbers.replace('; ', ', ')})" if separator else words
