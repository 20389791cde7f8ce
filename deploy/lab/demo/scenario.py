"""The demo's requests: prompts long and short, plain and streamed, alone and at once.

Pure: it builds requests and sends none.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

Endpoint = Literal["/v1/completions", "/v1/chat/completions"]
Route = Literal["local", "direct", "prefill_cluster"]

CHUNK_TOKENS = 512
"""Tokens of one prefill chunk of the demo's engines."""

THRESHOLD_TOKENS = 1024
"""Prompts longer than this go to the prefill cluster."""

MAX_OUTPUT_TOKENS = 12
_WORDS = (
    *("bandwidth", "prefill", "decode", "cache", "layer", "window", "state", "token", "block"),
    *("link", "chunk", "tensor", "queue", "router", "region", "cluster", "latency", "stream"),
    *("gateway", "model", "hybrid", "linear", "attention", "recurrent"),
)


@dataclass(frozen=True, slots=True)
class DemoRequest:
    """One request. Requests with the same `wave` are sent at the same time."""

    name: str
    endpoint: Endpoint
    num_bytes: int
    seed: int
    stream: bool
    route: Route
    wave: int
    alone: bool = True
    prefix: str = ""
    salt: str = ""
    """Requests with different ones share no cached KVCache."""

    @property
    def prompt(self) -> str:
        """`num_bytes` of text: the prefix, then text drawn with the seed."""
        return self.prefix + text(self.num_bytes - len(self.prefix), self.seed)

    def redrawn(self, attempt: int) -> "DemoRequest":
        """The same request with another text after its prefix."""
        return replace(self, seed=self.seed + 100_000 * attempt)

    def body(self, model: str, *, with_logprobs: bool = False) -> dict[str, Any]:
        """The OpenAI request body. Greedy, so that two engines can be compared token by token."""
        body: dict[str, Any] = {
            "model": model,
            "temperature": 0,
            "max_tokens": MAX_OUTPUT_TOKENS,
            "return_token_ids": True,
        }
        if self.endpoint == "/v1/completions":
            body["prompt"] = self.prompt
        else:
            body["messages"] = [{"role": "user", "content": self.prompt}]
        if with_logprobs:
            chat = {"logprobs": True, "top_logprobs": 2}
            body |= chat if "messages" in body else {"logprobs": 2}
        if self.salt:
            body["cache_salt"] = self.salt
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body


def text(num_bytes: int, seed: int) -> str:
    """`num_bytes` of ASCII words. The demo's tokenizer makes one token of each byte."""
    words = random.Random(seed)
    out = ""
    while len(out) < num_bytes:
        out += words.choice(_WORDS) + " "
    return out[:num_bytes]


def demo_requests() -> Sequence[DemoRequest]:
    """The demo's requests in the order in which they are sent."""
    completion: Endpoint = "/v1/completions"
    chat: Endpoint = "/v1/chat/completions"
    far: Route = "prefill_cluster"
    story = text(3000, seed=5)
    # vLLM's workers spin for a second after each request. Short requests come after the long
    # ones, so that on a small machine a judged transfer shares it only with the engines it is
    # for. The first request over the link opens connections and touches memory, so its shares are
    # not judged.
    alone = [
        DemoRequest("long, new link", completion, 2600, 3, False, far, 0, alone=False),
        DemoRequest("long, stream", completion, 5000, 4, True, far, 1),
        DemoRequest("long chat, stream", chat, 4000, 5, True, far, 2, prefix=story),
        DemoRequest("shares 3,000", chat, 4900, 6, True, far, 3, prefix=story),
        DemoRequest("short", completion, 60, 1, False, "local", 4),
        DemoRequest("short chat, stream", chat, 200, 2, True, "local", 5),
    ]
    together = [
        DemoRequest(
            f"6 at once, {length}",
            completion,
            length,
            20 + index,
            index % 2 == 0,
            far if length > THRESHOLD_TOKENS else "local",
            6,
            alone=False,
        )
        for index, length in enumerate((40, 3000, 257, 1500, 5500, 2200))
    ]
    return alone + together
