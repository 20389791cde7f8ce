"""The inputs and outputs of the encode stage's queue.

Values only; queue.py and rule.py have the rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class EncodeReason(StrEnum):
    """What became of a medium, or why an instance that prefills has to encode it. Values are
    stable: they are metric labels and in records.
    """

    # The embedding is there for the engine that prefills.
    ENCODED = "encoded"
    SHARED = "shared"  # encoded once for this request and another one
    FOUND = "found"  # it was there already
    # The KVCache of its tokens is cached, so that nobody needs the embedding.
    CACHED = "cached"
    # The engine that prefills encodes it.
    NO_INSTANCE = "no_instance"
    QUEUE_FULL = "queue_full"
    WAIT_TOO_LONG = "wait_too_long"  # the prefill instance is predicted to encode it sooner
    TIMEOUT = "timeout"
    REFUSED = "refused"  # by the engine that encodes, because of what it is
    FAILED = "failed"  # on every instance that was tried
    UNNAMED = "unnamed"  # it has no name, or its bytes are elsewhere
    CLOSED = "closed"

    @property
    def is_there(self) -> bool:
        """Whether the embedding is where it can be loaded."""
        return self in (EncodeReason.ENCODED, EncodeReason.SHARED, EncodeReason.FOUND)

    @property
    def is_left(self) -> bool:
        """Whether the engine that prefills has to encode the medium."""
        return not self.is_there and self is not EncodeReason.CACHED


@dataclass(frozen=True, slots=True)
class EncodeConfig:
    """Objectives and bounds.

    An instance is given as many media at a time as one pass encodes within its objective
    (`pass_s`), and always one. `own_cost`: to encode apart may take so many times longer than on
    the instance that prefills, because other prompts cannot be prefilled there meanwhile.
    """

    ttft_s: float = 4.0
    """Objective for the time to first token, seconds. An instance that only encodes is given as
    many images at a time as it encodes in a quarter of that.
    """
    tpot_s: float = 0.2
    """Objective for the time between two tokens of an answer, seconds. An instance that decodes as
    well is given as many images at a time as it encodes within that, and at least one.
    """
    timeout_s: float = 10.0
    """Longest time that a request waits for its images to be encoded apart, seconds. Then the
    engine that prefills encodes them.
    """
    pull_s: float = 2.0
    """Longest wait for embeddings that another node has, seconds."""
    ttft_share: float = 0.25
    own_cost: float = 2.0
    max_waiting: int = 1024
    """Most media that may wait."""
    max_attempts: int = 2

    def __post_init__(self) -> None:
        seconds = self.ttft_s, self.tpot_s, self.timeout_s, self.pull_s
        shares = self.ttft_share, self.own_cost
        if min(*seconds, *shares) <= 0 or self.max_waiting < 0 or self.max_attempts < 1:
            raise ValueError(f"{self}: times, shares and attempts must be above 0")

    def pass_s(self, *, decodes: bool) -> float:
        """The longest pass on an instance."""
        return self.tpot_s if decodes else self.ttft_s * self.ttft_share


@dataclass(frozen=True, slots=True)
class Medium:
    """One medium: vLLM's identifier of it, and the tokens that it has in its prompt."""

    identifier: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class EncodeRequest:
    """Media of one request. `key` is unique. `nodes` are those where the prefill may run. `wait_s`
    is how long the prefill is predicted to wait anyway. Without `may_delay_decodes` no instance is
    asked that decodes as well.
    """

    key: str
    media: tuple[Medium, ...]
    model: str = ""
    nodes: frozenset[str] = frozenset()
    wait_s: float = 0.0
    may_delay_decodes: bool = True


@dataclass(frozen=True, slots=True)
class EncodeInstance:
    """An instance that encodes, as the queue sees it. `model` "" takes all media. `decodes`: it has
    requests to decode as well, whose tokens a pass delays. It gets `max_passes` at a time.
    """

    name: str
    model: str = ""
    node: str = ""
    healthy: bool = True
    decodes: bool = False
    max_passes: int = 1

    @property
    def kind(self) -> tuple[str, bool]:
        """What it has in common with instances whose times are alike."""
        return self.model, self.decodes


@dataclass(frozen=True, slots=True)
class StartPass:
    """Have these media encoded together on an instance. `number` names the pass."""

    number: int
    instance: str
    model: str
    media: tuple[Medium, ...]


@dataclass(frozen=True, slots=True)
class StopMedium:
    """Nobody waits any more for a medium of a pass. The queue still waits for `ended`."""

    number: int
    identifier: str


@dataclass(frozen=True, slots=True)
class MediumEnd:
    """What became of a medium of a request; `node` is where its embedding is, "" if nowhere."""

    identifier: str
    reason: EncodeReason
    node: str = ""


@dataclass(frozen=True, slots=True)
class EndRequest:
    """A request is over `seconds` after it came. Its media are in their order in the request."""

    key: str
    media: tuple[MediumEnd, ...]
    seconds: float


Effect = StartPass | StopMedium | EndRequest
