"""The endpoints that pass a request on to an engine: the one table of their paths and rules.

An endpoint that is routed counts the prompt and may have it prefilled in a prefill cluster. The
others go to one engine of the PD cluster as they are. This file knows no HTTP server and no engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from deploy.gateway.errors import ErrorShape
from deploy.gateway.proxy.sse import ENDS_WITH_DONE, StreamRules

Kind = Literal[
    "completion",
    "chat",
    "responses",
    "messages",
    "count_tokens",
    "embeddings",
    "rerank",
    "score",
    "tokenize",
    "detokenize",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One POST endpoint: `path` here and at an engine, and `aliases` that mean the same here.

    `operation` is OpenTelemetry's name of it (`gen_ai.operation.name`).
    """

    path: str
    summary: str
    operation: str
    aliases: tuple[str, ...] = ()
    is_routed: bool = False
    """Whether its prompt may be prefilled in a prefill cluster."""
    errors: ErrorShape = "openai"
    stream: StreamRules = ENDS_WITH_DONE

    @property
    def paths(self) -> tuple[str, ...]:
        """Every path of it at the gateway."""
        return (self.path, *self.aliases)


_RESPONSES_STREAM: Final = StreamRules(
    errors="responses",
    # An engine sends these before it computes anything, so they are no first token.
    before_first=frozenset(
        {
            b"response.created",
            b"response.queued",
            b"response.in_progress",
            b"response.output_item.added",
            b"response.content_part.added",
            b"response.reasoning_part.added",
        }
    ),
    last=frozenset({b"response.completed", b"response.incomplete", b"response.failed", b"error"}),
    usage=b"response.",
)
_MESSAGES_STREAM: Final = StreamRules(
    errors="anthropic",
    before_first=frozenset({b"message_start", b"content_block_start", b"ping"}),
    last=frozenset({b"message_stop", b"error"}),
    usage=b"message_delta",
)

ENDPOINTS: Final[dict[Kind, Endpoint]] = {
    "completion": Endpoint(
        path="/v1/completions",
        summary="OpenAI's completions",
        operation="text_completion",
        is_routed=True,
    ),
    "chat": Endpoint(
        path="/v1/chat/completions",
        summary="OpenAI's chat completions",
        operation="chat",
        is_routed=True,
    ),
    "responses": Endpoint(
        path="/v1/responses",
        summary="OpenAI's responses",
        operation="chat",
        is_routed=True,
        stream=_RESPONSES_STREAM,
    ),
    "messages": Endpoint(
        path="/v1/messages",
        summary="Anthropic's messages",
        operation="chat",
        is_routed=True,
        errors="anthropic",
        stream=_MESSAGES_STREAM,
    ),
    "count_tokens": Endpoint(
        path="/v1/messages/count_tokens",
        summary="Anthropic's count of a prompt's tokens",
        operation="count_tokens",
        errors="anthropic",
    ),
    "embeddings": Endpoint(
        path="/v1/embeddings", summary="OpenAI's embeddings", operation="embeddings"
    ),
    "rerank": Endpoint(
        path="/v1/rerank",
        aliases=("/rerank", "/v2/rerank"),
        summary="Documents in the order of their relevance",
        operation="rerank",
    ),
    "score": Endpoint(
        path="/v1/score",
        aliases=("/score",),
        summary="The similarity of texts",
        operation="score",
    ),
    "tokenize": Endpoint(
        path="/tokenize", summary="The tokens of a text or chat", operation="tokenize"
    ),
    "detokenize": Endpoint(
        path="/detokenize", summary="The text of tokens", operation="detokenize"
    ),
}

KINDS: Final[dict[str, Kind]] = {
    path: kind for kind, endpoint in ENDPOINTS.items() for path in endpoint.paths
}
"""The endpoint at each path of the gateway."""


def errors_at(path: str) -> ErrorShape:
    """The shape in which errors are told at a path of the gateway."""
    # Below a path, too: an unknown path under Anthropic's is asked for by a client of theirs.
    messages = ENDPOINTS["messages"].path
    return "anthropic" if path == messages or path.startswith(messages + "/") else "openai"
