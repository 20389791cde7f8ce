"""Embeddings in a real agent's arena: put by one process, found by another."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_process import AgentProcess, wait_until
from embedding_ends import ENCODER, embeddings_of, encoder_client, finding, found, saving

from kvmanager.agent.embeddings.control import MAX_EMBEDDINGS
from kvmanager.agent.embeddings.messages import HasEmbeddings, HasEmbeddingsReply
from kvmanager.agent.engines.protocol import EmbeddingRoom
from kvmanager.agent.messages import EncoderStatus
from kvmanager.embedding_keys import embedding_key
from kvmanager.hashing import join_keys
from kvmanager.vllm_connector.encode.sides import EmbeddingFinder, EmbeddingSaver
from transport.rpc import RpcError

DATA = bytes(range(256)) * 1000
"""Several blocks, the last one in part."""


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    with AgentProcess(tmp_path, embedding_gib=4 / 1024) as running:
        yield running


@pytest.fixture
def saver(agent: AgentProcess) -> Iterator[EmbeddingSaver]:
    with saving(agent) as made:
        yield made


@pytest.fixture
def finder(agent: AgentProcess) -> Iterator[EmbeddingFinder]:
    with finding(agent) as made:
        yield made


def test_what_one_process_saves_another_finds(
    agent: AgentProcess, saver: EmbeddingSaver, finder: EmbeddingFinder
) -> None:
    assert found(finder, "cat") is None
    assert saver.save("cat", memoryview(DATA))
    assert not saver.save("cat", memoryview(DATA))  # the agent has it
    assert found(finder, "cat") == DATA
    assert found(finder, "dog") is None
    assert found(finder, "cat", column_bytes=len(DATA) - 1) is None  # not of this prompt's shape
    # The same image of another encoder is another embedding.
    assert embedding_key(ENCODER, "cat") != embedding_key("files:2 bfloat16", "cat")
    numbers = embeddings_of(agent)
    assert (numbers.num_embeddings, numbers.num_queries, numbers.num_hits) == (1, 4, 2)
    assert len(DATA) <= numbers.held_bytes <= numbers.cap_bytes == 4 << 20


def test_an_agent_says_what_it_has_and_whose_encoders_are_connected(
    agent: AgentProcess, saver: EmbeddingSaver, finder: EmbeddingFinder
) -> None:
    keys = [embedding_key(ENCODER, name) for name in ("cat", "dog")]

    def has(joined: bytes) -> list[int]:
        return agent.call("HasEmbeddings", HasEmbeddings(joined), HasEmbeddingsReply).nbytes

    assert has(join_keys(keys)) == [0, 0]
    assert saver.save("dog", memoryview(DATA))
    assert has(join_keys(keys)) == [0, len(DATA)]
    assert has(b"") == []
    for wrong in (keys[0][:-1], join_keys(keys[:1] * (MAX_EMBEDDINGS + 1))):
        with pytest.raises(RpcError, match="keys") as caught:
            has(wrong)
        assert caught.value.code == "INVALID"
    told = agent.status()
    assert told.encoders == [EncoderStatus("encode-0", 2, ENCODER)]
    assert (told.encoder_of("encode-0"), told.encoder_of("encode-1")) == (ENCODER, "")
    numbers = embeddings_of(agent)
    assert (numbers.num_queries, numbers.num_hits) == (0, 0)  # no engine has looked
    saver.close()
    wait_until(lambda: agent.status().encoders == [EncoderStatus("encode-0", 1, ENCODER)])


def test_old_embeddings_make_room_for_new_ones(
    agent: AgentProcess, saver: EmbeddingSaver, finder: EmbeddingFinder
) -> None:
    large = memoryview(bytes(1 << 20))
    assert all(saver.save(f"image {number}", large) for number in range(6))
    assert found(finder, "image 0") is None
    assert found(finder, "image 5") == large
    assert not saver.save("too large", memoryview(bytes(5 << 20)))
    assert embeddings_of(agent).held_bytes <= 4 << 20


def test_without_its_agent_a_finder_says_that_there_is_nothing(
    agent: AgentProcess, saver: EmbeddingSaver, finder: EmbeddingFinder
) -> None:
    assert saver.save("cat", memoryview(DATA))
    wait_until(lambda: finder.are_known("r", {"cat": 8}))
    agent.end()
    assert finder.data("cat") == DATA  # a step may have been scheduled without the encoder
    finder.drop("r", ["cat"])
    assert found(finder, "cat") is None
    assert not saver.save("dog", memoryview(DATA))


def test_an_agent_that_keeps_none_refuses_encoders(tmp_path: Path) -> None:
    with AgentProcess(tmp_path, embedding_gib=0) as agent:
        refused = encoder_client(agent, "worker")
        saver = EmbeddingSaver(refused, ENCODER, timeout_s=20.0)
        saver.start()
        wait_until(lambda: "this agent keeps no embeddings" in agent.log(), what="the refusal")
        assert not saver.save("cat", memoryview(DATA))
        assert agent.status().embeddings is None
        with pytest.raises(RpcError, match="this agent keeps no embeddings"):
            agent.call("HasEmbeddings", HasEmbeddings(b""), HasEmbeddingsReply)
        saver.close()


def test_a_saver_waits_for_no_silent_agent() -> None:
    class Silent:
        arena = None

        def put(self, key: bytes, nbytes: int) -> bool:
            return True

        def cancel(self, key: bytes) -> bool:
            cancelled.append(key)
            return True

    cancelled: list[bytes] = []
    saver = EmbeddingSaver(Silent(), ENCODER, timeout_s=0.01)  # type: ignore[arg-type]
    assert not saver.save("cat", memoryview(DATA))
    key = embedding_key(ENCODER, "cat")
    saver.on_embedding_room(EmbeddingRoom(key, [(0, 1)]))  # too late
    assert cancelled == [key]


def test_a_lost_connection_ends_a_wait() -> None:
    asked = threading.Event()

    class Lost:
        arena = None

        def put(self, key: bytes, nbytes: int) -> bool:
            asked.set()
            return True

        def find(self, handle: int, key: bytes) -> bool:
            return True

    saver = EmbeddingSaver(Lost(), ENCODER, timeout_s=60.0)  # type: ignore[arg-type]
    saving = threading.Thread(target=saver.save, args=("cat", memoryview(DATA)))
    saving.start()
    assert asked.wait(20.0)
    saver.on_disconnected()
    saving.join(20.0)
    assert not saving.is_alive()

    now_s = 0.0
    finder = EmbeddingFinder(Lost(), ENCODER, 1.0, lambda: now_s)  # type: ignore[arg-type]
    assert not finder.are_known("r", {"cat": 8})
    now_s = 1.0
    assert finder.are_known("r", {"cat": 8})
    assert not finder.are_known("r", {"cat": 8, "dog": 8})
    finder.on_disconnected()
    assert finder.are_known("r", {"cat": 8, "dog": 8})
    assert finder.data("dog") is None


def test_an_encoder_that_ends_leaves_its_image_to_others(
    agent: AgentProcess, saver: EmbeddingSaver, finder: EmbeddingFinder
) -> None:
    class Rooms:
        """What the agent gave to an encoder that never fills it."""

        def __init__(self) -> None:
            self.given: list[EmbeddingRoom] = []

        def on_embedding_room(self, room: EmbeddingRoom) -> None:
            self.given.append(room)

        def on_disconnected(self) -> None:
            pass

    ending, rooms = encoder_client(agent, "worker"), Rooms()
    ending.start(rooms)
    wait_until(lambda: ending.arena is not None, what="the encoder is connected")
    assert ending.put(embedding_key(ENCODER, "cat"), len(DATA))
    wait_until(lambda: bool(rooms.given), what="the encoder has room")
    assert rooms.given[0].runs
    held = embeddings_of(agent).held_bytes
    assert not saver.save("cat", memoryview(DATA))  # another encodes it
    assert found(finder, "cat") is None

    ending.close()
    wait_until(lambda: saver.save("cat", memoryview(DATA)), what="the image can be put")
    assert found(finder, "cat") == DATA
    wait_until(lambda: embeddings_of(agent).held_bytes == held, what="the memory is given back")
