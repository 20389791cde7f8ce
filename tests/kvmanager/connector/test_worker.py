"""The connector's worker half: which outboxes it fills, and what it tells the agent about them."""

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from page_views import page_view
from recording_client import RecordingClient
from simple_layouts import paged

from kvmanager.agent.engines.protocol import PROTOCOL_VERSION, Welcome
from kvmanager.arena import Arena
from kvmanager.layout import KVGroup, KVKind, KVLayout
from kvmanager.load_times import LoadTimes
from kvmanager.vllm_connector import worker as module
from kvmanager.vllm_connector.metadata import (
    EndedSend,
    FirstStep,
    LoadStep,
    PrfaasMetadata,
    SendStep,
    TransferRef,
)
from kvmanager.vllm_connector.pages import CpuPageCopier
from kvmanager.vllm_connector.worker import WorkerSide

PAGE = 96
LAYOUT = KVLayout(
    "m",
    "files:0",
    "digest",
    1,
    (KVGroup(KVKind.FULL, 16, (paged("full", PAGE),)),),
)
TID = bytes(range(16))
NUM_TOKENS = 32
"""Two pages, which two steps of 16 tokens compute."""
GRACE_S = 15.0


class Engine:
    """One worker with two pages of known bytes, connected to an agent."""

    def __init__(self, arena: Arena) -> None:
        self.client = RecordingClient(arena)
        self.arena = arena
        client: Any = self.client
        rows = torch.full((4, PAGE), 7, dtype=torch.uint8)
        views = {"full": page_view(LAYOUT.groups[0].layers[0].parts[0], rows)}
        self.side = WorkerSide(LAYOUT, client, views)
        self.side.start()
        self.connect(last_attempt=0)

    def connect(self, last_attempt: int, version: int = PROTOCOL_VERSION) -> None:
        arena = self.arena
        welcome = Welcome(
            arena.epoch,
            str(arena.path),
            arena.nbytes,
            arena.block_bytes,
            last_attempt=last_attempt,
            grace_s=GRACE_S,
            version=version,
        )
        self.client.arena = arena
        self.side.on_connected(welcome, arena)

    def disconnect(self) -> None:
        self.client.arena = None
        self.side.on_disconnected()

    def step(
        self,
        attempt: int,
        computed_tokens: int,
        ended: EndedSend | None = None,
        *,
        calls_hooks: bool = True,
    ) -> None:
        """One engine step that computes up to `computed_tokens` of the transfer's prompt. vLLM
        calls no hooks of layers that it replays from a CUDA graph.
        """
        ref = TransferRef(TID, NUM_TOKENS, self.arena.epoch, ((0, 1),), attempt)
        meta = PrfaasMetadata(ended=[ended] if ended is not None else [])
        if computed_tokens:
            num_blocks = computed_tokens // 16
            meta.sends.append(SendStep(ref, ([1, 2][:num_blocks],), computed_tokens))
        self.side.start_step(meta)
        if calls_hooks:
            self.side.save_kv_layer(meta, "full")
        self.side.wait_for_save(meta)

    def written(self) -> bool:
        return any(self.arena.memory[: 2 * PAGE])


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(Arena.create(tmp_path, 4, 4096, prefault=False))
    yield engine
    engine.side.close()
    arena = vars(engine).pop("arena", None)
    if arena is not None:
        arena.close()


def test_pages_are_announced_as_steps_fill_them(engine: Engine) -> None:
    engine.step(5, 16)
    engine.step(5, 32)
    assert engine.client.take() == [
        ("attach", TID, 5),
        ("ready", TID, 5, [(0, PAGE)]),
        ("ready", TID, 5, [(PAGE, PAGE)]),
        ("prefill_end", TID, 5),
    ]
    assert bytes(engine.arena.memory[: 2 * PAGE]) == bytes([7]) * 2 * PAGE


def test_a_layer_is_sent_by_its_hook_also_before_the_step_is_started(engine: Engine) -> None:
    """vLLM starts loads behind the forward pass, unless the step waits for them."""
    ref = TransferRef(TID, NUM_TOKENS, engine.arena.epoch, ((0, 1),), 5)
    meta = PrfaasMetadata(sends=[SendStep(ref, ([1],), 16)])
    engine.side.save_kv_layer(meta, "full")
    assert engine.client.take() == [("attach", TID, 5), ("ready", TID, 5, [(0, PAGE)])]
    engine.side.start_step(meta)
    engine.side.wait_for_save(meta)
    assert engine.client.take() == []


def test_layers_whose_hook_was_not_called_are_sent_after_the_step(engine: Engine) -> None:
    engine.step(5, 16, calls_hooks=False)
    engine.step(5, 32, calls_hooks=False)
    assert engine.client.take() == [
        ("attach", TID, 5),
        ("ready", TID, 5, [(0, PAGE)]),
        ("ready", TID, 5, [(PAGE, PAGE)]),
        ("prefill_end", TID, 5),
    ]


def test_what_a_failed_forward_pass_left_is_not_sent(engine: Engine) -> None:
    """vLLM calls `wait_for_save` in a `finally`: the pages may hold anything then."""
    engine.step(5, 16)
    engine.client.take()
    ref = TransferRef(TID, NUM_TOKENS, engine.arena.epoch, ((0, 1),), 5)
    meta = PrfaasMetadata(sends=[SendStep(ref, ([1, 2],), 32)])

    def forward() -> None:
        try:
            raise RuntimeError("out of memory")
        finally:
            engine.side.wait_for_save(meta)

    with pytest.raises(RuntimeError, match="out of memory"):
        forward()
    assert engine.client.take() == [
        ("abort", TID, 5, "the engine's step failed: RuntimeError"),
    ]
    assert not any(engine.arena.memory[PAGE : 2 * PAGE])


def test_an_outbox_from_before_the_connection_is_not_begun(engine: Engine) -> None:
    """Its end may have come while nobody could be told: the memory may be another transfer's."""
    engine.disconnect()
    engine.connect(last_attempt=5)
    engine.step(5, 16)
    engine.step(5, 32)
    assert not engine.written()
    (abort, end) = engine.client.take()
    assert abort[:3] == ("abort", TID, 5)
    assert "before" in abort[3]
    assert end[0] == "prefill_end"
    engine.step(6, 16)
    assert ("attach", TID, 6) in engine.client.said
    assert engine.written()


def test_between_two_connections_no_outbox_is_begun(engine: Engine) -> None:
    engine.disconnect()
    engine.client.arena = engine.arena  # the new connection stands, and has not been told yet
    engine.step(7, 16)
    assert not engine.written()
    assert [said[0] for said in engine.client.take()] == ["abort"]


def test_the_arena_of_an_agent_that_is_gone_is_not_kept(engine: Engine) -> None:
    """Its memory would not be free for the next agent, which may then not start."""
    engine.step(5, 16)
    arena, engine.client.arena = weakref.ref(engine.arena), None
    engine.side.on_disconnected()
    engine.arena.close()
    del engine.arena
    engine.side.on_agent_gone()
    gc.collect()
    assert arena() is None


def test_an_outbox_that_was_begun_is_left_alone_after_a_reconnect(engine: Engine) -> None:
    engine.step(5, 16)
    engine.disconnect()
    engine.connect(last_attempt=0)
    engine.arena.memory[: 2 * PAGE] = bytes(2 * PAGE)
    engine.step(5, 32)
    assert not engine.written()


def test_a_failed_outbox_is_not_written_any_more_and_is_released(engine: Engine) -> None:
    engine.step(5, 16)
    engine.side.on_failed(TID, "link lost", 5)
    assert engine.client.take()[-1] == ("release", TID, 5)
    engine.step(5, 32)
    assert all(said[0] != "ready" for said in engine.client.take())


def test_the_failure_of_an_earlier_attempt_does_not_stop_the_present_one(engine: Engine) -> None:
    engine.step(6, 16)
    engine.side.on_failed(TID, "its lease ended", 5)
    assert engine.client.take()[-1] == ("release", TID, 5)
    engine.step(6, 32)
    assert ("ready", TID, 6, [(PAGE, PAGE)]) in engine.client.take()


def test_the_end_of_an_earlier_attempt_does_not_end_the_present_one(engine: Engine) -> None:
    """The request of the first attempt is aborted late, when the second one runs here as well."""
    engine.step(6, 16)
    engine.client.take()
    engine.step(6, 32, ended=EndedSend(TID, 5, "prefill ended early"))
    assert engine.client.take() == [
        ("abort", TID, 5, "prefill ended early"),
        ("ready", TID, 6, [(PAGE, PAGE)]),
        ("prefill_end", TID, 6),
    ]


def test_an_outbox_that_failed_before_its_first_step_is_not_begun(engine: Engine) -> None:
    engine.side.on_failed(TID, "cancelled", 5)
    engine.step(5, 16)
    assert not engine.written()


def test_however_many_outboxes_failed_none_of_them_is_begun(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_LOST", 3)
    for attempt in (5, 3, 9, 7, 8):
        engine.side.on_failed(TID, "cancelled", attempt)
    for attempt in (3, 5, 7, 8, 9):
        engine.step(attempt, 16)
        assert not engine.written(), attempt
    engine.step(6, 16)
    assert engine.written(), "it did not fail, and is younger than those which were forgotten"


class BrokenCopier:
    """A GPU that takes every copy and ends or fails it later."""

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.tables: list[list[int]] = []

    def store(self, reads: Any, blocks: Any, copies: Any) -> None:
        self.tables.append(blocks.ids.tolist())
        for copy in copies():
            list(copy.slabs)
            self.done.append(copy.done)

    def drain(self) -> None: ...
    def close(self) -> None: ...


def test_a_copy_that_fails_late_ends_the_transfer_instead_of_announcing_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    copier = BrokenCopier()
    monkeypatch.setattr(engine.side._access, "copier", copier)
    engine.step(5, 16)
    (done,) = copier.done
    done(RuntimeError("the GPU is lost"))
    engine.side.close()  # its threads have done what they were given
    assert engine.client.take() == [
        ("attach", TID, 5),
        ("abort", TID, 5, "RuntimeError: the GPU is lost"),
    ]
    engine.step(5, 16)
    assert len(copier.done) == 1


def test_a_prefill_is_over_when_its_last_copy_is(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    copier = BrokenCopier()
    monkeypatch.setattr(engine.side._access, "copier", copier)
    engine.step(5, 32)
    (attach,) = engine.client.take()
    assert attach[0] == "attach"
    pages, end = copier.done
    pages(None)
    end(None)
    assert [said[0] for said in engine.client.take()] == ["ready", "prefill_end"]


def test_a_request_that_breaks_fails_alone_among_many(engine: Engine) -> None:
    tids = [bytes([number]) * 16 for number in range(4)]
    outside = ((9, 1),)  # not in the arena of four blocks
    runs = [((0, 1),), outside, ((1, 1),), ((2, 1),)]
    meta = PrfaasMetadata()
    for number, tid in enumerate(tids):
        ref = TransferRef(tid, NUM_TOKENS, engine.arena.epoch, runs[number], 5)
        blocks = [1, 2] if number != 2 else [1, 99]  # the engine has four blocks
        meta.sends.append(SendStep(ref, (blocks,), NUM_TOKENS))
    engine.side.start_step(meta)
    engine.side.save_kv_layer(meta, "full")
    engine.side.wait_for_save(meta)
    engine.side.close()  # its threads have done what they were given
    said = engine.client.take()
    assert [what[1] for what in said if what[0] == "ready"] == [tids[0], tids[3]]
    assert {what[1] for what in said if what[0] == "abort"} == {tids[1], tids[2]}
    assert sum(what[0] == "abort" for what in said) == 2
    assert [what[1] for what in said if what[0] == "prefill_end"] == tids
    stats = engine.side.take_stats()
    assert stats is not None
    assert (stats.data["failed_sends"], stats.data["sent_bytes"]) == (2, 4 * PAGE)


def test_pages_of_all_requests_of_a_step_are_one_copy(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    copier = BrokenCopier()
    monkeypatch.setattr(engine.side._access, "copier", copier)
    meta = PrfaasMetadata()
    for number in range(3):
        ref = TransferRef(bytes([number]) * 16, 16, engine.arena.epoch, ((number, 1),), 5)
        meta.sends.append(SendStep(ref, ([1 + number],), 16))
    engine.side.start_step(meta)
    engine.side.save_kv_layer(meta, "full")
    engine.side.save_kv_layer(meta, "full")
    assert copier.tables == [[1, 2, 3]]
    assert len(copier.done) == 3
    engine.side.wait_for_save(meta)
    assert copier.tables == [[1, 2, 3], [], [], []], "the ends of three prefills"


def test_an_outbox_that_failed_while_its_pages_crossed_is_not_written_nor_announced(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A late announcement would attach this worker to memory that it has released."""

    class SlowCopier(BrokenCopier):
        def __init__(self) -> None:
            super().__init__()
            self.wanted: list[Any] = []

        def store(self, reads: Any, blocks: Any, copies: Any) -> None:
            self.wanted.append(copies)

    copier = SlowCopier()
    monkeypatch.setattr(engine.side._access, "copier", copier)
    engine.step(5, 16)
    engine.side.on_failed(TID, "its lease ended", 5)
    assert engine.client.take() == [("attach", TID, 5), ("release", TID, 5)]
    (wanted,) = copier.wanted
    assert list(wanted()) == []
    engine.step(6, 16)
    assert len(list(copier.wanted[-1]())) == 1, "the next attempt is its own"


def test_what_a_step_sends_is_not_kept(engine: Engine) -> None:
    engine.step(5, 32)
    assert engine.side._step is None


@pytest.mark.parametrize(("age_s", "fails"), [(0.0, False), (GRACE_S + 1, True)])
def test_a_load_that_ends_too_late_is_not_trusted(
    engine: Engine, age_s: float, fails: bool
) -> None:
    """The scheduler's connection may be lost meanwhile, and the memory be another transfer's."""
    ref = TransferRef(TID, NUM_TOKENS, engine.arena.epoch, ((0, 1),))
    kept_s = time.monotonic() - age_s
    load = LoadStep("r1", ref, ([1, 2],))
    engine.side.begin_step(PrfaasMetadata(loads=[load], kept_s={"r1": kept_s}), 0.0)
    engine.side.close()  # its threads have done what they were given
    results = engine.side.transfer_results()
    assert results.finished_recving == {"r1"}
    assert bool(results.failed_recving) is fails


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_load_may_take_long_while_the_scheduler_is_connected(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, is_kept: bool
) -> None:
    """The steps meanwhile say so; without them it has the grace time, as after a loss."""
    now_s = time.monotonic()
    copying, copied = threading.Event(), threading.Event()

    def load(slabs: Any, mark: Any) -> None:
        copying.set()
        assert copied.wait(10)
        for slab in slabs:
            assert slab.nbytes

    monkeypatch.setattr(engine.side._access.copier, "load", load)
    ref = TransferRef(TID, NUM_TOKENS, engine.arena.epoch, ((0, 1),))
    meta = PrfaasMetadata(loads=[LoadStep("r1", ref, ([1, 2],))], kept_s={"r1": now_s})
    engine.side.begin_step(meta, now_s)
    assert copying.wait(10)
    later_s = now_s + 10 * GRACE_S
    monkeypatch.setattr(module.time, "monotonic", lambda: later_s)
    if is_kept:
        engine.side.begin_step(PrfaasMetadata(kept_s={"r1": later_s - 1}), later_s)
    copied.set()
    engine.side.close()
    assert bool(engine.side.transfer_results().failed_recving) is not is_kept


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_workers_of_every_device_map_the_arena_before_they_need_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Else each page costs a fault when the first copy into it is made."""
    monkeypatch.setattr(module, "copier_for", lambda *_: CpuPageCopier())
    made = Arena.create(tmp_path, 64, 65536, prefault=False)
    arena = Arena.attach(made.path, made.nbytes, made.block_bytes, epoch=made.epoch)
    client: Any = RecordingClient(arena)
    rows = torch.zeros((4, PAGE), dtype=torch.uint8, device=device)
    views = {"full": page_view(LAYOUT.groups[0].layers[0].parts[0], rows)}
    side = WorkerSide(LAYOUT, client, views)
    side.on_connected(Welcome(arena.epoch, str(arena.path), arena.nbytes, 65536), arena)
    for mapping in (one for one in threading.enumerate() if one.name == "prfaas-map"):
        mapping.join()
    maps = Path("/proc/self/smaps").read_text().split(str(made.path))[1:]
    assert max(int(one.partition("Rss:")[2].split()[0]) for one in maps) == made.nbytes >> 10
    side.close()
    arena.close()
    made.close()


def test_a_first_step_is_told_with_what_came_before_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = FirstStep("r1", TID, engine.arena.epoch, arrived_s=10.0)
    engine.side._load_spans.loaded("r1", 12.0, 12.5)
    monkeypatch.setattr(module.time, "monotonic", lambda: 12.75)
    engine.connect(last_attempt=0)
    engine.side.wait_for_save(PrfaasMetadata(first_steps=[first]))
    assert engine.client.take() == [("loaded", TID, LoadTimes(2.0, 0.5, 0.25))]
    engine.side.wait_for_save(PrfaasMetadata(first_steps=[first]))
    assert engine.client.take() == [], "it was told, or its load has failed"


def test_an_agent_that_does_not_know_the_message_is_not_sent_it(engine: Engine) -> None:
    first = FirstStep("r1", TID, engine.arena.epoch, arrived_s=10.0)
    engine.side._load_spans.loaded("r1", 12.0, 12.5)
    engine.connect(last_attempt=0, version=3)
    engine.side.wait_for_save(PrfaasMetadata(first_steps=[first]))
    assert engine.client.take() == []


def test_the_time_of_a_prefill_begins_with_its_first_step(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.side.begin_step(PrfaasMetadata(), 100.0)
    engine.step(5, 16)
    engine.side.begin_step(PrfaasMetadata(), 101.0)
    monkeypatch.setattr(module.time, "monotonic", lambda: 101.5)
    engine.step(5, 32)
    assert engine.client.prefill_s == [1.5]


def test_a_step_that_computes_nothing_waits_for_the_end_of_a_load(engine: Engine) -> None:
    ref = TransferRef(TID, NUM_TOKENS, engine.arena.epoch, ((0, 1),))
    load = LoadStep("r1", ref, ([1, 2],))
    meta = PrfaasMetadata(loads=[load], kept_s={"r1": time.monotonic()})
    assert not engine.side.transfer_results(600.0).finished_recving, "nothing is under way"
    engine.side.begin_step(meta, time.monotonic())
    engine.side.start_step(meta)
    results = engine.side.transfer_results(600.0)
    assert (results.finished_recving, results.failed_recving) == ({"r1"}, set())
    assert not engine.side.transfer_results(600.0).finished_recving
