"""What the demo asks of a region: prompts long and short, plain and streamed, alone and at once.

Pure: builds requests, sends none.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Endpoint = Literal["/v1/completions", "/v1/chat/completions"]
Route = Literal["local", "direct", "prefill_cluster"]

CHUNK_TOKENS = 512
"""Tokens of one prefill chunk of the demo's engines."""

THRESHOLD_TOKENS = 1024
"""Prompts longer than this go to the prefill cluster."""

MAX_OUTPUT_TOKENS = 16
_WORDS = (
    "bandwidth prefill decode cache layer window state token block link chunk tensor queue router "
    "region cluster latency stream gateway model hybrid linear attention recurrent"
).split()


@dataclass(frozen=True, slots=True)
class DemoRequest:
    """One request; those that share a `wave` are sent at the same time."""

    name: str
    endpoint: Endpoint
    prompt: str
    stream: bool
    route: Route
    wave: int
    alone: bool = True

    def body(self, model: str) -> dict[str, Any]:
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
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body


def text(num_bytes: int, seed: int) -> str:
    """`num_bytes` of ASCII words; the demo's tokenizer makes one token of each byte."""
    words = random.Random(seed)
    out = ""
    while len(out) < num_bytes:
        out += words.choice(_WORDS) + " "
    return out[:num_bytes]


def demo_requests() -> Sequence[DemoRequest]:
    """The demo's requests in the order they are sent."""
    completion: Endpoint = "/v1/completions"
    chat: Endpoint = "/v1/chat/completions"
    story = text(4000, seed=5)
    alone = [
        DemoRequest("short", completion, text(60, 1), False, "local", 0),
        DemoRequest("short chat, streamed", chat, text(200, 2), True, "local", 1),
        DemoRequest("long", completion, text(2600, 3), False, "prefill_cluster", 2),
        DemoRequest("long, streamed", completion, text(5000, 4), True, "prefill_cluster", 3),
        DemoRequest("long chat, streamed", chat, story, True, "prefill_cluster", 4),
        DemoRequest("its follow-up", chat, story + text(900, 6), True, "prefill_cluster", 5),
    ]
    together = [
        DemoRequest(
            f"one of six at once, {length}",
            completion,
            text(length, 20 + index),
            index % 2 == 0,
            "prefill_cluster" if length > THRESHOLD_TOKENS else "local",
            6,
            alone=False,
        )
        for index, length in enumerate((40, 3000, 257, 1500, 6000, 2200))
    ]
    return alone + together
