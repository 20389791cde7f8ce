"""What a gateway is told: parsed once at the edge, frozen afterwards.

Unknown keys are errors. Does not know region files; the launcher turns those into this.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]

DEFAULT_MAX_BODY_BYTES = 32 << 20


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelConfig(_Frozen):
    """One served model. `root` is where its weights come from, shown by /v1/models."""

    name: Annotated[str, Field(min_length=1)]
    max_model_len: Annotated[int, Field(gt=0)] | None = None
    root: str | None = None


class TimeoutConfig(_Frozen):
    """Limits on every wait, in seconds.

    `engine_silence_s` bounds the time without a byte from an engine, the wait for the first one
    included, and the wait for a landing before it, so it must exceed the longest queueing plus
    prefill. `client_stall_s` bounds one write to a client that does not read. `result_grace_s` is
    how long a finished answer waits for the numbers of its transfer, and a failed landing for the
    prefill leg's reason.
    """

    connect_s: Seconds = 5.0
    body_s: Seconds = 60.0
    render_s: Seconds = 30.0
    cluster_s: Seconds = 10.0
    engine_silence_s: Seconds = 600.0
    client_stall_s: Seconds = 120.0
    result_grace_s: Seconds = 2.0
    drain_s: Seconds = 30.0


class DirectoryConfig(_Frozen):
    """Who follows what is cached where.

    "embedded": this gateway, asking every node agent. "grpc": a `prfaas directory` at `target`
    (host:port). "redis": a server at `url` that something else keeps filled; for several gateways.
    """

    kind: Literal["embedded", "grpc", "redis"] = "embedded"
    target: str = ""
    url: str = ""

    @model_validator(mode="after")
    def _check(self) -> DirectoryConfig:
        wanted = {"embedded": set(), "grpc": {"target"}, "redis": {"url"}}[self.kind]
        given = {name for name in ("target", "url") if getattr(self, name)}
        if missing := wanted - given:
            raise ValueError(f"a directory of kind {self.kind} needs {', '.join(missing)}")
        if unused := given - wanted:
            raise ValueError(f"a directory of kind {self.kind} has no {', '.join(unused)}")
        return self


class GatewayConfig(_Frozen):
    """Everything a gateway needs besides its clusters.

    Prompts with more than `threshold_tokens` uncached are offloaded. `api_keys` empty means no
    authentication; with `protect_admin` /metrics and /prfaas/* ask for the same keys.
    `max_buffered_bytes` bounds the bodies of all requests in flight together, `max_answer_bytes`
    one answer that is not streamed. `template_tokens` is how many tokens a chat template may add to
    what the body spells out: an estimate that saves rendering of prompts which are certainly short.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    models: Annotated[tuple[ModelConfig, ...], Field(min_length=1)]
    threshold_tokens: Annotated[int, Field(ge=0)] = 1024
    hand_off_tokens: Annotated[int, Field(ge=1)] = 256
    template_tokens: Annotated[int, Field(ge=0)] = 256
    api_keys: tuple[SecretStr, ...] = ()
    protect_admin: bool = False
    max_body_bytes: Annotated[int, Field(gt=0)] = DEFAULT_MAX_BODY_BYTES
    max_buffered_bytes: Annotated[int, Field(gt=0)] = 1 << 30
    max_answer_bytes: Annotated[int, Field(gt=0)] = 256 << 20
    max_in_flight: Annotated[int, Field(gt=0)] = 512
    retry_after_s: Annotated[int, Field(ge=1)] = 1
    num_records: Annotated[int, Field(gt=0)] = 1000
    report_interval_s: Seconds = 0.5
    report_stale_s: Seconds = 5.0
    directory: DirectoryConfig = DirectoryConfig()
    timeouts: TimeoutConfig = TimeoutConfig()

    @model_validator(mode="after")
    def _check(self) -> GatewayConfig:
        names = [model.name for model in self.models]
        if len(set(names)) != len(names):
            raise ValueError(f"models: two have the same name; names must differ: {names}")
        if self.max_buffered_bytes < self.max_body_bytes:
            raise ValueError("max_buffered_bytes must hold at least one body of max_body_bytes")
        if self.report_stale_s <= self.report_interval_s:
            raise ValueError("report_stale_s must be longer than report_interval_s")
        return self


def load_api_keys(path: Path) -> tuple[SecretStr, ...]:
    """Keys from a file, one a line; blank lines and lines starting with # are skipped.

    Raises `ValueError` when the file holds none: an empty file must not switch authentication off.
    """
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    keys = tuple(SecretStr(line) for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ValueError(f"{path}: no API key in it; write one key a line")
    return keys
