"""Embeddings in a real agent's arena: put by one process, found by another."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_process import AgentProcess
from embedding_ends import (
    DATA,
    ENCODER,
    embeddings_of,
    encoder_client,
    finding,
    found,
    put,
    saving,
)
from eventually import wait_until

from kvmanager.agent.embeddings.control import MAX_EMBEDDINGS
from kvmanager.agent.embeddings.messages import HasEmbeddings, HasEmbeddingsReply
from kvmanager.agent.engines.protocol import EmbeddingFound, EmbeddingRoom
from kvmanager.agent.messages import CacheFeed, EncoderStatus
from kvmanager.arena import Arena
from kvmanager.embedding_keys import embedding_key
from kvmanager.hashing import join_keys
from kvmanager.vllm_connector.encode import sides
from kvmanager.vllm_connector.encode.sides import EmbeddingFinder, EmbeddingSaver
from transport.rpc import RpcError


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
    assert put(saver, "cat")
    assert not put(saver, "cat")  # the agent has it
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
    assert put(saver, "dog")
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


def test_followers_hear_of_embeddings_that_come_and_go(tmp_path: Path) -> None:
    cat, dog = (embedding_key(ENCODER, name)[:8] for name in ("cat", "dog"))
    settings = {"embedding_gib": 1 / 1024, "cache_gib": 0}  # an agent without a prefix cache
    with AgentProcess(tmp_path, **settings) as agent, saving(agent) as saver:
        assert put(saver, "cat")
        first = agent.watch_cache()
        assert (first.is_snapshot, first.keys, first.embeddings) == (True, b"", cat)
        assert put(saver, "dog", bytes(1 << 20))  # in place of the cat
        seen, seq = CacheFeed("", 0, b"", b""), first.seq
        while not seen.embeddings:
            seen = agent.watch_cache(first.epoch, seq, timeout_s=20.0)
            seq = seen.seq
        assert (seen.is_snapshot, seen.embeddings) == (False, dog)
        assert agent.watch_cache().embeddings == dog


def test_old_embeddings_make_room_for_new_ones(
    agent: AgentProcess, saver: EmbeddingSaver, finder: EmbeddingFinder
) -> None:
    large = bytes(1 << 20)
    assert all(put(saver, f"image {number}", large) for number in range(6))
    assert found(finder, "image 0") is None
    assert found(finder, "image 5") == large
    assert not put(saver, "too large", bytes(5 << 20))
    assert embeddings_of(agent).held_bytes <= 4 << 20


def test_without_its_agent_a_finder_says_that_there_is_nothing(
    agent: AgentProcess, saver: EmbeddingSaver, finder: EmbeddingFinder
) -> None:
    assert put(saver, "cat")
    wait_until(lambda: finder.are_known("r", {"cat": 8}))
    agent.end()
    assert finder.data("cat") == DATA  # a step may have been scheduled without the encoder
    finder.drop("r", ["cat"])
    assert found(finder, "cat") is None
    assert not put(saver, "dog")


def test_an_agent_that_keeps_none_refuses_encoders(tmp_path: Path) -> None:
    with AgentProcess(tmp_path, embedding_gib=0) as agent:
        refused = encoder_client(agent, "worker")
        saver = EmbeddingSaver(refused, ENCODER, timeout_s=20.0)
        saver.start()
        wait_until(lambda: "this agent keeps no embeddings" in agent.log(), what="the refusal")
        assert not put(saver, "cat")
        assert agent.status().embeddings is None
        with pytest.raises(RpcError, match="this agent keeps no embeddings"):
            agent.call("HasEmbeddings", HasEmbeddings(b""), HasEmbeddingsReply)
        saver.close()


def test_a_saver_waits_for_a_silent_agent_once() -> None:
    class Silent:
        arena = None

        def put(self, key: bytes, nbytes: int) -> bool:
            asked.append(key)
            return True

        def cancel(self, key: bytes) -> bool:
            cancelled.append(key)
            return True

    asked: list[bytes] = []
    cancelled: list[bytes] = []
    saver = EmbeddingSaver(Silent(), ENCODER, timeout_s=0.01)  # type: ignore[arg-type]
    assert not put(saver, "cat")
    key = embedding_key(ENCODER, "cat")
    assert not put(saver, "dog")
    assert asked == [key]
    saver.on_embedding_room(EmbeddingRoom(key, [(0, 1)]))  # too late
    assert cancelled == [key]
    assert not put(saver, "dog")
    assert asked == [key, embedding_key(ENCODER, "dog")]


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
    saving = threading.Thread(target=saver.save, args=("cat", len(DATA), lambda: memoryview(DATA)))
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


class OneImage:
    """A client whose agent has one image in its arena, of `DATA`."""

    def __init__(self, arena: Arena) -> None:
        num_blocks = -(-len(DATA) // arena.block_bytes)
        self.arena, self.runs = arena, [(0, num_blocks)]
        self.is_connected = True
        self.freed: list[int] = []
        for view in arena.view(self.runs, len(DATA)).views(0, len(DATA)):
            view[:] = DATA[: view.nbytes]

    def find(self, handle: int, key: bytes) -> bool:
        return True

    def free(self, handle: int) -> bool:
        self.freed.append(handle)
        return self.is_connected

    def answers(self, finder: EmbeddingFinder, handle: int) -> None:
        finder.on_embedding_found(EmbeddingFound(handle, len(DATA), self.runs))


@pytest.fixture
def one_image(tmp_path: Path) -> Iterator[OneImage]:
    arena = Arena.create(tmp_path, num_blocks=1, block_bytes=1 << 20)
    yield OneImage(arena)
    arena.close()


def test_what_is_copied_while_the_connection_is_lost_is_not_used(one_image: OneImage) -> None:
    finder = EmbeddingFinder(one_image, ENCODER, timeout_s=60.0)  # type: ignore[arg-type]
    assert not finder.are_known("r", {"cat": 8})
    one_image.is_connected = False
    one_image.answers(finder, 0)
    assert finder.are_known("r", {"cat": 8})
    assert finder.data("cat") is None


def test_a_scheduler_keeps_no_more_embeddings_than_it_may(
    one_image: OneImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sides, "MAX_HELD_BYTES", 2 * len(DATA))
    finder = EmbeddingFinder(one_image, ENCODER, timeout_s=60.0)  # type: ignore[arg-type]
    images = {"cat": 8, "dog": 8, "owl": 8}
    assert not finder.are_known("r", images)
    for handle in range(3):
        one_image.answers(finder, handle)
    assert finder.are_known("r", images)
    assert [finder.data(image) is not None for image in images] == [True, True, False]
    assert one_image.freed == [0, 1, 2]
    finder.drop("r", ["cat"])
    assert not finder.are_known("s", {"emu": 8})
    one_image.answers(finder, 3)
    assert finder.data("emu") == DATA


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
    assert not put(saver, "cat")  # another encodes it
    assert found(finder, "cat") is None

    ending.close()
    wait_until(lambda: put(saver, "cat"), what="the image can be put")
    assert found(finder, "cat") == DATA
    wait_until(lambda: embeddings_of(agent).held_bytes == held, what="the memory is given back")
