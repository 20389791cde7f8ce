"""Processes that put embeddings into a real agent's arena and find them there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TypeVar

from agent_process import AgentProcess
from eventually import wait_until

from kvmanager.agent.engines.embedding_client import EmbeddingClient
from kvmanager.agent.engines.protocol import EncoderHello
from kvmanager.agent.messages import EmbeddingStatus
from kvmanager.vllm_connector.encode.sides import EmbeddingFinder, EmbeddingSaver

Side = TypeVar("Side", EmbeddingSaver, EmbeddingFinder)
ENCODER = "files:1 bfloat16"
DATA = bytes(range(256)) * 1000
"""Several blocks, the last one in part."""


def encoder_client(agent: AgentProcess, role: Literal["scheduler", "worker"]) -> EmbeddingClient:
    """A process of instance encode-0, which is not connected yet."""
    hello = EncoderHello("encode-0", role, os.getpid(), encoder=ENCODER)
    return EmbeddingClient(agent.socket, hello)


@contextmanager
def saving(agent: AgentProcess) -> Iterator[EmbeddingSaver]:
    """Puts embeddings, in place of an engine's worker."""
    connecting = encoder_client(agent, "worker")
    with _connected(EmbeddingSaver(connecting, ENCODER, timeout_s=20.0), connecting) as made:
        yield made


@contextmanager
def finding(agent: AgentProcess) -> Iterator[EmbeddingFinder]:
    """Finds embeddings, in place of an engine's scheduler."""
    connecting = encoder_client(agent, "scheduler")
    with _connected(EmbeddingFinder(connecting, ENCODER, timeout_s=20.0), connecting) as made:
        yield made


def put(saver: EmbeddingSaver, image: str, data: bytes = DATA) -> bool:
    """Whether this call has put it."""
    return saver.save(image, len(data), lambda: memoryview(data))


def found(finder: EmbeddingFinder, image: str, column_bytes: int = 8) -> bytes | None:
    """The embedding of this image, or None."""
    wait_until(lambda: finder.are_known("r", {image: column_bytes}), what=f"the answer for {image}")
    data = finder.data(image)
    finder.drop("r", [image])
    return data


def embeddings_of(agent: AgentProcess) -> EmbeddingStatus:
    """What the agent says of its embeddings."""
    embeddings = agent.status().embeddings
    assert embeddings is not None
    return embeddings


@contextmanager
def _connected(side: Side, connecting: EmbeddingClient) -> Iterator[Side]:
    side.start()
    wait_until(lambda: connecting.arena is not None, what="the agent has welcomed it")
    try:
        yield side
    finally:
        side.close()
