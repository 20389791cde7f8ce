"""The connector's scheduler half: when a request waits, loads, sends, and when it goes alone."""

from types import SimpleNamespace
from typing import Any

import pytest
from simple_layouts import paged, state

from kvmanager.agent.engines.protocol import CacheFound, CacheSlots, Welcome
from kvmanager.hashing import token_digest
from kvmanager.layout import KVGroup, KVKind, KVLayout
from kvmanager.pool.placement import StatePlacement
from kvmanager.vllm_connector import landings
from kvmanager.vllm_connector.cache.keys import LOSSY_SALT
from kvmanager.vllm_connector.cache.scheduler import PrefixCacheOptions
from kvmanager.vllm_connector.idle_wait import idle_wait_s
from kvmanager.vllm_connector.metadata import FirstStep, PartPages, PrfaasMetadata
from kvmanager.vllm_connector.scheduler import SchedulerSide
from kvmanager.vllm_connector.weights import Adapters

LAYOUT = KVLayout(
    "m",
    "files:0",
    "digest",
    1,
    (
        KVGroup(KVKind.FULL, 16, (paged("full", 100),)),
        KVGroup(KVKind.WINDOW, 16, (paged("window", 100),), window_tokens=32),
        KVGroup(KVKind.RECURRENT, 1, (state("state", 100),)),
    ),
)
TRANSFER = bytes(range(16))
BLOCK_TABLES = ([10, 11, 12, 13, 14], [20, 21, 22, 23, 24], [30, 31, 32, 33, 34])


class RecordingClient:
    """Stands for the agent's client: answers `connected`, remembers what was said."""

    def __init__(self, connected: bool = True) -> None:
        self.connected = connected
        self.said: list[tuple[str, bytes]] = []

    def start(self, events: object) -> None: ...
    def close(self) -> None: ...

    def watch(self, transfer_id: bytes) -> bool:
        self.said.append(("watch", transfer_id))
        return self.connected

    def release(self, transfer_id: bytes) -> bool:
        self.said.append(("release", transfer_id))
        return self.connected


class CachingClient(RecordingClient):
    """An agent that has the first `num_blocks` blocks of every prompt, and no memory to give."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.num_blocks = num_blocks
        self.handles: list[int] = []
        self.side: SchedulerSide | None = None

    def cache_find(self, handle: int, keys: list[bytes]) -> bool:
        self.handles.append(handle)
        return True

    def cache_free(self, handle: int) -> bool:
        self.handles.remove(handle)
        return True

    def cache_reserve(self, handle: int, *arguments: Any, **named: Any) -> bool:
        assert self.side is not None
        self.side.on_cache_slots(CacheSlots(handle, []))
        return True

    def answer(self) -> None:
        assert self.side is not None
        n = self.num_blocks
        slots = [(block, 0, [(block, 1)]) for block in range(n)]
        slots += [(block, 1, [(10 + block, 1)]) for block in range(max(0, n - 2), n)]
        slots += [(n - 1, 2, [(20, 1)])]
        self.side.on_cache_found(CacheFound(self.handles[-1], n, n, slots))


def scheduler_side(
    client: RecordingClient,
    landing_timeout_s: float = 60,
    adapters: Adapters | None = None,
    **roles: bool,
) -> SchedulerSide:
    spec = SimpleNamespace(block_size=16)
    config: Any = SimpleNamespace(
        transfer_groups=[SimpleNamespace(kv_cache_spec=spec)] * 3,
        transfer_group_ids=(0, 1, 2),
        select_transfer_block_ids=tuple,
    )
    any_client: Any = client
    side = SchedulerSide(
        LAYOUT,
        config,
        any_client,
        mamba_cache_mode="align",
        landing_timeout_s=landing_timeout_s,
        produces=roles.get("produces", True),
        consumes=roles.get("consumes", True),
        cache=PrefixCacheOptions(b"n" * 32)
        if isinstance(client, CachingClient)
        else PrefixCacheOptions(),
        adapters=adapters,
    )
    side.start()
    if isinstance(client, CachingClient):
        client.side = side
        arena: Any = None
        side.on_connected(Welcome("e1", "/arena", 1 << 20, 4096, StatePlacement()), arena)
    return side


def request(role: str, num_prompt_tokens: int, **changes: Any) -> Any:
    """A request of that many prompt tokens whose transfer holds all of them (producer) or all
    but the last (consumer)."""
    tokens = list(range(num_prompt_tokens))
    held = tokens if role == "producer" else tokens[:-1]
    params = {
        "role": role,
        "transfer_id": TRANSFER.hex(),
        "num_tokens": len(held),
        "arena_epoch": "e1",
        "runs": [[0, 4]],
        "layout_fingerprint": LAYOUT.fingerprint().hex(),
        "window_step": 16,
    }
    if role == "consumer":
        params["token_digest"] = token_digest(held).hex()
    else:
        params["attempt"] = 1
    return SimpleNamespace(
        request_id="r1",
        prompt_token_ids=tokens,
        all_token_ids=tokens,
        prompt_embeds=None,
        pooling_params=None,
        resumable=False,
        skip_reading_prefix_cache=False,
        cache_salt=None,
        lora_request=None,
        mm_features=[],
        status=SimpleNamespace(name="FINISHED_ABORTED"),
        kv_transfer_params={"prfaas": params | changes},
    )


def step(side: SchedulerSide, scheduled: dict[str, tuple[int, int]], *new: str) -> PrfaasMetadata:
    """One engine step; `scheduled` maps a request to (tokens computed before, tokens now). Those in
    `new` are computed for the first time.
    """
    known = [name for name in scheduled if name not in new]
    output: Any = SimpleNamespace(
        total_num_scheduled_tokens=sum(now for _, now in scheduled.values()),
        num_scheduled_tokens={name: now for name, (_, now) in scheduled.items()},
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=scheduled[name][0]) for name in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=known, num_computed_tokens=[scheduled[name][0] for name in known]
        ),
        kv_connector_block_state=SimpleNamespace(
            get_block_ids=lambda name: BLOCK_TABLES, boundary_state_offloads={}
        ),
        preempted_req_ids=None,
    )
    return side.build_connector_meta(output)


def finish_load(side: SchedulerSide) -> None:
    output: Any = SimpleNamespace(finished_recving={"r1"})
    side.update_connector_output(output)


ALLOCATED: Any = SimpleNamespace(get_block_ids=lambda: BLOCK_TABLES)


def test_a_waiting_engine_rests_nine_tenths_of_the_time_within_bounds() -> None:
    assert idle_wait_s(0.001) == pytest.approx(0.009)
    assert idle_wait_s(0.0001) == 0.004
    assert idle_wait_s(1.0) == 0.025, "a new request may have to wait this long"


def test_a_consumer_waits_loads_and_gives_the_landing_back() -> None:
    client = RecordingClient()
    side = scheduler_side(client)
    consumer = request("consumer", 71)
    side.on_new_request(consumer)
    assert client.said == [("watch", TRANSFER)]
    assert side.get_num_new_matched_tokens(consumer, 0) == (None, False)
    side.on_landed(TRANSFER)
    assert side.get_num_new_matched_tokens(consumer, 0) == (70, True)
    side.update_state_after_alloc(consumer, ALLOCATED, 70)
    (load,) = step(side, {}).loads
    assert load.blocks == ([10, 11, 12, 13, 14], [22, 23, 24], [34])
    assert ("release", TRANSFER) not in client.said
    finish_load(side)
    assert client.said[-1] == ("release", TRANSFER)
    assert side.get_num_new_matched_tokens(consumer, 0) == (0, False)


def test_pages_of_the_engines_own_prefix_cache_are_not_written() -> None:
    side = scheduler_side(RecordingClient())
    consumer = request("consumer", 71)
    side.on_new_request(consumer)
    side.on_landed(TRANSFER)
    assert side.get_num_new_matched_tokens(consumer, 48) == (22, True)
    side.update_state_after_alloc(consumer, ALLOCATED, 22)
    (load,) = step(side, {}).loads
    assert load.blocks == ([13, 14], [23, 24], [34])


def test_a_landing_the_engine_does_not_need_goes_back_at_once() -> None:
    client = RecordingClient()
    side = scheduler_side(client)
    consumer = request("consumer", 65)
    side.on_new_request(consumer)
    side.on_landed(TRANSFER)
    assert side.get_num_new_matched_tokens(consumer, 64) == (0, False)
    assert client.said[-1] == ("release", TRANSFER)


@pytest.mark.parametrize(
    "changes",
    [
        {"token_digest": "00" * 32},
        {"num_tokens": 69},
        {"layout_fingerprint": "11" * 32},
        # Half of a page would come, which vLLM would keep as a whole one.
        {"window_step": 0},
        {"window_step": 8},
    ],
)
def test_a_landing_of_something_else_is_never_loaded(changes: dict[str, Any]) -> None:
    client = RecordingClient()
    side = scheduler_side(client)
    consumer = request("consumer", 71, **changes)
    side.on_new_request(consumer)
    side.on_landed(TRANSFER)
    assert side.get_num_new_matched_tokens(consumer, 0) == (0, False)
    assert client.said == [("watch", TRANSFER), ("release", TRANSFER)]


POET = "files:poet"


class OneAdapter(Adapters):
    """An engine that has loaded the adapter "poet", and can identify no other one."""

    def identity(self, lora_request: Any) -> str | None:
        if not lora_request:
            return ""
        return POET if lora_request.lora_name == "poet" else None


def tuned(role: str, name: str, told: str) -> Any:
    """A request with a LoRA adapter, or with none for "". The other engine's has the identity
    `told`.
    """
    made = request(role, 70 if role == "producer" else 71, adapter=told)
    made.lora_request = SimpleNamespace(lora_name=name) if name else None
    return made


@pytest.mark.parametrize(
    ("adapter", "told", "failure"),
    [
        ("poet", POET, ""),
        ("", "", ""),
        ("poet", "files:other", "of the adapter files:other, here it is the adapter files:poet"),
        ("poet", "", "of the base model, here it is the adapter files:poet"),
        ("", POET, "of the adapter files:poet, here it is the base model"),
        ("stranger", POET, "the adapter stranger cannot be identified"),
    ],
)
def test_kvcache_moves_between_engines_with_the_same_adapter(
    adapter: str, told: str, failure: str
) -> None:
    client = RecordingClient()
    side = scheduler_side(client, adapters=OneAdapter())
    consumer = tuned("consumer", adapter, told)
    side.on_new_request(consumer)
    side.on_landed(TRANSFER)
    waits = (0, False) if failure else (70, True)
    assert side.get_num_new_matched_tokens(consumer, 0) == waits
    assert (("release", TRANSFER) in client.said) == bool(failure), "a refused landing goes back"

    producing = scheduler_side(RecordingClient(), adapters=OneAdapter())
    producing.on_new_request(tuned("producer", adapter, told))
    meta = step(producing, {"r1": (0, 70)})
    assert len(meta.sends) == (not failure)
    assert [ended.failure for ended in meta.ended if failure not in ended.failure] == []
    assert len(meta.ended) == bool(failure)


def test_what_lands_with_less_precision_is_shared_with_no_other_request() -> None:
    client = CachingClient(4)
    side = scheduler_side(client)
    consumer = request("consumer", 71, is_lossy=True)
    consumer.cache_salt, consumer.block_hashes = "tenant", ["of exact bytes"]
    consumer.update_block_hashes = lambda: consumer.block_hashes.append(consumer.cache_salt)
    side.on_new_request(consumer)
    side.on_landed(TRANSFER)
    assert side.get_num_new_matched_tokens(consumer, 0) == (70, True)
    side.update_state_after_alloc(consumer, ALLOCATED, 70)
    finish_load(side)
    assert consumer.block_hashes == [f"tenant{LOSSY_SALT}"], "vLLM's own cache keeps it apart"
    meta = step(side, {"r1": (70, 26)})
    assert meta.stores == [], "nothing of it goes to the node's cache"


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        {"prfaas": {"role": "consumer"}},
        {"prfaas": 7},
        {"prfaas": {"role": "thief", "transfer_id": "zz"}},
    ],
)
def test_parameters_that_are_none_or_nonsense_mean_an_ordinary_request(params: Any) -> None:
    client = RecordingClient()
    side = scheduler_side(client)
    ordinary = request("consumer", 10)
    ordinary.kv_transfer_params = params
    side.on_new_request(ordinary)
    assert side.get_num_new_matched_tokens(ordinary, 0) == (0, False)
    assert step(side, {"r1": (0, 10)}).sends == []
    assert client.said == []


@pytest.mark.parametrize("event", ["failed", "disconnected", "no agent", "timeout"])
def test_without_a_landing_the_engine_computes_the_prompt(event: str) -> None:
    client = RecordingClient(connected=event != "no agent")
    side = scheduler_side(client, landing_timeout_s=0 if event == "timeout" else 60)
    consumer = request("consumer", 71)
    side.on_new_request(consumer)
    if event == "failed":
        side.on_failed(TRANSFER, "cancelled", 0)
    elif event == "disconnected":
        side.on_landed(TRANSFER)
        side.on_disconnected()
    assert side.get_num_new_matched_tokens(consumer, 0) == (0, False)
    assert (("release", TRANSFER) in client.said) == (event == "timeout")


def test_a_client_that_leaves_while_its_landing_loads_gives_it_back_after_the_load() -> None:
    client = RecordingClient()
    side = scheduler_side(client)
    consumer = request("consumer", 71)
    side.on_new_request(consumer)
    side.on_landed(TRANSFER)
    side.get_num_new_matched_tokens(consumer, 0)
    side.update_state_after_alloc(consumer, ALLOCATED, 70)
    side.request_finished(consumer, aborted=True)
    assert ("release", TRANSFER) not in client.said
    finish_load(side)
    assert client.said[-1] == ("release", TRANSFER)
    finish_load(side)
    assert client.said.count(("release", TRANSFER)) == 1


def test_a_client_that_leaves_while_waiting_gives_the_landing_back() -> None:
    client = RecordingClient()
    side = scheduler_side(client)
    consumer = request("consumer", 71)
    side.on_new_request(consumer)
    side.request_finished(consumer, aborted=True)
    assert client.said[-1] == ("release", TRANSFER)


def test_a_producer_sends_with_every_chunk_until_its_last() -> None:
    side = scheduler_side(RecordingClient())
    producer = request("producer", 70)
    side.on_new_request(producer)
    assert side.get_num_new_matched_tokens(producer, 0) == (0, False)
    (first,) = step(side, {"r1": (0, 32)}).sends
    assert (first.computed_tokens, first.is_last) == (32, False)
    assert first.blocks == ([10, 11, 12, 13, 14], [22, 23, 24], [31])
    (last,) = step(side, {"r1": (32, 38)}).sends
    assert last.is_last
    assert last.blocks[2] == [34]
    side.request_finished(producer, aborted=False)
    (ended,) = step(side, {}).ended
    assert ended.failure == ""


def test_a_producer_that_is_aborted_says_so_with_the_next_step() -> None:
    side = scheduler_side(RecordingClient())
    producer = request("producer", 70)
    side.on_new_request(producer)
    step(side, {"r1": (0, 32)})
    side.request_finished(producer, aborted=True)
    (ended,) = step(side, {}).ended
    assert "ABORTED" in ended.failure
    assert step(side, {"r1": (32, 38)}).sends == []


def test_a_role_the_engine_was_not_started_for_is_refused() -> None:
    side = scheduler_side(RecordingClient(), produces=False)
    producer = request("producer", 70)
    side.on_new_request(producer)
    meta = step(side, {"r1": (0, 70)})
    assert meta.sends == []
    assert "kv_role" in meta.ended[0].failure


CACHED = {"cached_tokens": 32, "cached_runs": [[[90, 1]], [[92, 2], [97, 1]]]}


@pytest.mark.parametrize(
    ("local_tokens", "cached", "landed"),
    [(0, [0, 1], [12, 13, 14]), (16, [1], [12, 13, 14]), (48, [], [13, 14])],
)
def test_what_a_landing_leaves_out_is_loaded_from_the_prefix_cache(
    local_tokens: int, cached: list[int], landed: list[int]
) -> None:
    side = scheduler_side(RecordingClient())
    consumer = request("consumer", 71, **CACHED)
    side.on_new_request(consumer)
    side.on_landed(TRANSFER)
    num_new = 70 - local_tokens
    assert side.get_num_new_matched_tokens(consumer, local_tokens) == (num_new, True)
    side.update_state_after_alloc(consumer, ALLOCATED, num_new)
    (load,) = step(side, {}).loads
    assert load.ref is not None
    assert load.ref.cached_tokens == 32
    assert load.blocks[0] == landed
    parts = load.cached.parts if load.cached is not None else ()
    runs = (((90, 1),), ((92, 2), (97, 1)))
    assert parts == tuple(PartPages(i, 0, runs[i], ([10 + i],)) for i in cached)


@pytest.mark.parametrize(
    "changes",
    [
        {"cached_tokens": 32, "cached_runs": [[[90, 1]]]},
        {"cached_tokens": 0, "cached_runs": [[[90, 1]]]},
        {"cached_tokens": 24, "cached_runs": []},
    ],
)
def test_a_landing_whose_cached_part_is_not_whole_is_never_loaded(changes: dict[str, Any]) -> None:
    client = RecordingClient()
    side = scheduler_side(client)
    consumer = request("consumer", 71, **changes)
    side.on_new_request(consumer)
    side.on_landed(TRANSFER)
    assert side.get_num_new_matched_tokens(consumer, 0) == (0, False)
    assert client.said == [("watch", TRANSFER), ("release", TRANSFER)]


def test_a_producer_leaves_out_what_the_receiver_has() -> None:
    side = scheduler_side(RecordingClient())
    producer = request("producer", 70, cached_tokens=32)
    side.on_new_request(producer)
    (send,) = step(side, {"r1": (0, 70)}).sends
    assert send.ref.cached_tokens == 32
    assert send.blocks == ([12, 13, 14], [22, 23, 24], [34])


def test_a_plain_request_loads_what_the_agent_has_of_it() -> None:
    client = CachingClient(4)
    side = scheduler_side(client)
    plain = request("consumer", 71)
    plain.kv_transfer_params = None
    side.on_new_request(plain)
    assert side.get_num_new_matched_tokens(plain, 0) == (None, False)
    client.answer()
    assert side.get_num_new_matched_tokens(plain, 0) == (64, True)
    side.update_state_after_alloc(plain, ALLOCATED, 64)
    (load,) = step(side, {}).loads
    assert load.ref is None
    assert load.cached is not None
    assert [(part.index, part.part, part.blocks) for part in load.cached.parts] == [
        (0, 0, ([10],)),
        (1, 0, ([11],)),
        (2, 0, ([12],)),
        (3, 0, ([13],)),
        (2, 1, ([22],)),
        (3, 1, ([23],)),
        (3, 2, ([33],)),
    ]
    assert client.handles
    finish_load(side)
    assert client.handles == []


@pytest.mark.parametrize("cached", [{}, {"cached_tokens": 32, "cached_runs": [[[5, 1]]] * 2}])
def test_after_a_reset_nothing_that_landed_or_was_cached_is_loaded(cached: dict[str, Any]) -> None:
    client = CachingClient(4)
    side = scheduler_side(client)
    side.reset_cache()
    consumer = request("consumer", 71, **cached)
    side.on_new_request(consumer)
    assert client.said[-1] == ("release", TRANSFER)
    assert side.get_num_new_matched_tokens(consumer, 0) == (0, False)
    assert client.handles == []


def test_after_a_reset_nothing_is_sent_under_the_weights_of_the_start() -> None:
    side = scheduler_side(RecordingClient())
    side.reset_cache()
    side.on_new_request(request("producer", 70))
    meta = step(side, {"r1": (0, 70)})
    assert meta.sends == []
    assert "weights may have changed" in meta.ended[0].failure


def test_a_landing_that_is_lost_before_its_load_leaves_the_cache_to_be_asked() -> None:
    client = CachingClient(4)
    side = scheduler_side(client)
    consumer = request("consumer", 71)
    side.on_new_request(consumer)
    side.on_landed(TRANSFER)
    assert side.get_num_new_matched_tokens(consumer, 0) == (70, True)
    side.on_failed(TRANSFER, "the agent went", 0)
    side.update_state_after_alloc(consumer, ALLOCATED, 70)
    (load,) = step(side, {}).loads
    assert (load.ref, load.cached) == (None, None)
    finish_load(side)
    assert side.get_num_new_matched_tokens(consumer, 0) == (None, False)
    client.answer()
    assert side.get_num_new_matched_tokens(consumer, 0) == (64, True)


def test_what_another_connector_loads_is_neither_looked_up_nor_cached() -> None:
    client = CachingClient(4)
    side = scheduler_side(client)
    taken = request("consumer", 65)
    taken.kv_transfer_params = {"do_remote_prefill": True, "remote_block_ids": [[1]]}
    side.on_new_request(taken)
    assert client.handles == []
    assert side.get_num_new_matched_tokens(taken, 0) == (0, False)
    side.update_state_after_alloc(taken, ALLOCATED, 0)
    finish_load(side)
    assert step(side, {"r1": (64, 1)}).stores == []
    side.request_finished(taken, aborted=False)


def test_a_producer_uses_the_prefix_cache_too() -> None:
    client = CachingClient(4)
    side = scheduler_side(client)
    producer = request("producer", 70)
    side.on_new_request(producer)
    client.answer()
    assert side.get_num_new_matched_tokens(producer, 0) == (64, True)
    side.update_state_after_alloc(producer, ALLOCATED, 64)
    finish_load(side)
    (send,) = step(side, {"r1": (64, 6)}).sends
    assert send.is_last
    assert send.blocks[0] == BLOCK_TABLES[0]


def test_a_prefix_that_is_lost_before_its_load_counts_as_a_failed_load() -> None:
    client = CachingClient(4)
    side = scheduler_side(client)
    plain = request("producer", 70)
    side.on_new_request(plain)
    client.answer()
    side.get_num_new_matched_tokens(plain, 0)
    side.on_disconnected()
    side.update_state_after_alloc(plain, ALLOCATED, 64)
    (load,) = step(side, {}).loads
    assert load.ref is None
    assert load.cached is None


def test_when_a_landing_fails_the_prefix_cache_is_asked() -> None:
    client = CachingClient(4)
    side = scheduler_side(client)
    consumer = request("consumer", 71)
    side.on_new_request(consumer)
    side.on_failed(TRANSFER, "cancelled", 0)
    assert side.get_num_new_matched_tokens(consumer, 0) == (None, False)
    client.answer()
    assert side.get_num_new_matched_tokens(consumer, 0) == (64, True)
    side.update_state_after_alloc(consumer, ALLOCATED, 64)
    (load,) = step(side, {}).loads
    assert load.ref is None
    assert load.cached is not None


def test_an_idle_engine_takes_an_answer_in_the_pass_in_which_it_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = CachingClient(4)
    side = scheduler_side(client)
    plain = request("producer", 70)
    side.on_new_request(plain)
    step(side, {})
    waits: list[float] = []

    def answer_meanwhile(timeout_s: float) -> bool:
        waits.append(timeout_s)
        client.answer()
        return True

    monkeypatch.setattr(side._agent_said, "wait", answer_meanwhile)
    assert side.get_num_new_matched_tokens(plain, 0) == (64, True)
    assert len(waits) == 1
    # Differences of times on the clock round.
    assert 0 < waits[0] <= 0.025 + 1e-9


@pytest.mark.parametrize(
    ("role", "changes", "named"),
    [
        ("producer", {"draft": "00" * 32}, "room for the KVCache of another drafter"),
        (
            "consumer",
            {"draft": "00" * 32, "cached_tokens": 64, "cached_runs": [[[1, 1]]]},
            "engines with another drafter filled the cached blocks",
        ),
    ],
)
def test_kvcache_of_another_drafter_is_refused(
    role: str, changes: dict[str, Any], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    side = scheduler_side(RecordingClient())
    side.on_new_request(request(role, 100 if role == "producer" else 101, **changes))
    assert named in caplog.text


def test_workers_are_told_of_the_first_step_behind_a_landing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    side = scheduler_side(RecordingClient())
    monkeypatch.setattr(landings.time, "monotonic", lambda: 12.5)
    consumer = request("consumer", 71)
    side.on_new_request(consumer)
    side.on_landed(TRANSFER)
    assert side.get_num_new_matched_tokens(consumer, 0) == (70, True)
    side.update_state_after_alloc(consumer, ALLOCATED, 70)
    loading = step(side, {})
    assert (loading.first_steps, loading.is_idle) == ([], True)
    finish_load(side)
    first = step(side, {"r1": (70, 1)}, "r1")
    assert first.first_steps == [FirstStep("r1", TRANSFER, "e1", 12.5)]
    assert not first.is_idle
    assert step(side, {"r1": (71, 1)}).first_steps == []


def test_a_request_without_a_landing_has_no_such_step() -> None:
    side = scheduler_side(RecordingClient())
    side.on_new_request(request("producer", 71))
    assert step(side, {"r1": (0, 71)}, "r1").first_steps == []


def test_only_a_request_that_is_alone_waits_for_the_agent_in_its_first_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    side = scheduler_side(RecordingClient())
    waits: list[float] = []

    def land_meanwhile(timeout_s: float) -> bool:
        waits.append(timeout_s)
        side.on_landed(TRANSFER)
        return True

    monkeypatch.setattr(side._agent_said, "wait", land_meanwhile)
    consumer, other = request("consumer", 71), request("producer", 71)
    other.request_id, other.kv_transfer_params = "r2", None
    side.on_new_request(other)
    side.on_new_request(consumer)
    side._engine_is_idle = False  # the other request is computed
    assert side.get_num_new_matched_tokens(consumer, 0) == (None, False)
    for over in (other, consumer):
        side.request_finished(over, aborted=True)
    side.on_new_request(consumer)
    assert side.get_num_new_matched_tokens(consumer, 0) == (70, True)
    assert len(waits) == 1
