import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmanager.pool.shape import CacheShape, PartKind, PartShape
from scheduler.routing.prefix_demand import CachedPrefix, Demand, DemandTracker
from scheduler.routing.replication import (
    ByteBudget,
    HotPrefix,
    NodeLoad,
    NodeName,
    ReplicationPlan,
    ReplicationState,
    plan_replication,
)

SHAPE = CacheShape(64, (PartShape(PartKind.KV, 1000), PartShape(PartKind.STATE, 5000)))


def prefix(name: int, num_blocks: int = 3) -> CachedPrefix:
    return CachedPrefix("model", bytes(16), bytes([name]) * 16 * num_blocks)


class TestDemand:
    def test_a_steady_rate_is_found(self) -> None:
        tracker = DemandTracker(half_life_s=50)
        for tick in range(4000):
            tracker.observe(prefix(1), tick / 4)
        (demand,) = tracker.hottest(5, 1000.0)
        assert demand.per_s == pytest.approx(4, rel=0.02)
        assert tracker.hottest(5, 1050.0)[0].per_s == pytest.approx(2, rel=0.02)

    def test_a_long_time_does_not_wear_it_out(self) -> None:
        tracker = DemandTracker(half_life_s=1)
        tracker.observe(prefix(1), 0.0)
        tracker.observe(prefix(2), 100_000.0)
        first, second = tracker.hottest(2, 100_000.0)
        assert (first.prefix, first.per_s) == (prefix(2), pytest.approx(math.log(2)))
        assert (second.prefix, second.per_s) == (prefix(1), 0.0)

    def test_the_same_block_at_the_end_is_the_same_prefix(self) -> None:
        tracker = DemandTracker()
        tracker.observe(prefix(1), 0.0)
        tracker.observe(prefix(1), 0.0)
        assert len(tracker) == 1

    @given(st.lists(st.integers(0, 20), max_size=200), st.integers(1, 8))
    def test_counts_are_bounds_of_the_truth(self, names: list[int], capacity: int) -> None:
        tracker = DemandTracker(capacity, half_life_s=100.0)
        for name in names:
            tracker.observe(prefix(name), 0.0)
        assert len(tracker) <= capacity
        per_count = math.log(2) / 100.0
        demands = tracker.hottest(capacity, 0.0)
        for demand in demands:
            true_per_s = names.count(demand.prefix.keys[0]) * per_count
            assert demand.per_s <= true_per_s + 1e-9
        # The rule's promise: whoever is more frequent than a share of 1 / capacity is there.
        for name in set(names):
            if names.count(name) > len(names) / capacity:
                assert prefix(name) in [demand.prefix for demand in demands]

    @pytest.mark.parametrize("keys", [b"", b"short"])
    def test_keys_that_are_none_are_refused(self, keys: bytes) -> None:
        with pytest.raises(ValueError, match="bytes are no keys"):
            CachedPrefix("model", bytes(16), keys)

    def test_a_prefix_knows_its_blocks(self) -> None:
        one = CachedPrefix("model", bytes(16), bytes(16) + bytes([1]) * 16)
        assert one.block_keys == [bytes(16), bytes([1]) * 16]
        assert one.key == bytes([1]) * 16


class TestByteBudget:
    def test_it_fills_up_to_its_burst(self) -> None:
        budget = ByteBudget(10.0, 100.0)
        assert budget.available_bytes(0.0) == 100
        budget.spend(150)
        assert budget.available_bytes(1.0) == -40
        assert budget.available_bytes(7.0) == 20
        assert budget.available_bytes(1000.0) == 100

    def test_none_at_all_is_a_mistake(self) -> None:
        with pytest.raises(ValueError, match="budget"):
            ByteBudget(0, 1)


STATE = ReplicationState(budget_bytes=1 << 30)


def hot(
    name: int = 1, per_s: float = 0.25, holders: tuple[NodeName, ...] = (("pd", "a"),)
) -> HotPrefix:
    demand = Demand(prefix(name), per_s)
    return HotPrefix(demand, SHAPE, dict.fromkeys(holders, 3))


def nodes(**loads: float) -> list[NodeLoad]:
    return [NodeLoad(cluster="pd", node=node, load=load) for node, load in loads.items()]


def plan(
    *prefixes: HotPrefix,
    loads: list[NodeLoad] | None = None,
    state: ReplicationState = STATE,
) -> ReplicationPlan:
    return plan_replication(prefixes, loads or nodes(a=5, b=3, c=1), state)


class TestPlan:
    def test_a_hot_prefix_of_one_node_goes_to_the_least_loaded(self) -> None:
        (order,) = plan(hot()).replicate
        assert (order.cluster, order.source, order.destination) == ("pd", "a", "c")
        assert order.parts == ((0, 0), (1, 0), (2, 0), (2, 1))
        assert order.nbytes == 3 * 1000 + 5000
        assert order.reason == "0.25 requests/s, 1 of 2"

    def test_the_least_loaded_holder_sends(self) -> None:
        holders = (("pd", "a"), ("pd", "b"))
        (order,) = plan(hot(per_s=0.75, holders=holders)).replicate
        assert (order.source, order.destination) == ("b", "c")

    def test_more_demand_is_worth_more_copies_up_to_a_limit(self) -> None:
        holders = (("pd", "a"), ("pd", "c"))
        assert plan(hot(per_s=0.45, holders=holders)).notes == (
            "010101010101 in pd: 2 copies, 0 coming, 2 wanted",
        )
        assert plan(hot(per_s=0.55, holders=holders)).replicate[0].destination == "b"
        assert not plan(hot(per_s=99, holders=(*holders, ("pd", "b")))).replicate

    def test_a_cluster_of_one_node_has_nobody_to_share_with(self) -> None:
        assert plan(hot(), loads=nodes(a=1)).replicate == ()

    def test_who_holds_less_than_the_whole_is_no_holder(self) -> None:
        short = HotPrefix(hot().demand, SHAPE, {("pd", "a"): 2})
        assert plan(short).notes == ("010101010101 in pd: no node there has it",)

    def test_a_holder_in_another_cluster_does_not_count(self) -> None:
        assert plan(hot(holders=(("prefill", "a"),))).replicate == ()

    def test_cold_prefixes_stay_where_they_are(self) -> None:
        assert "fewer than 0.05" in plan(hot(per_s=0.045)).notes[0]
        assert plan().notes == ("nothing is in demand",)

    def test_sick_and_barred_nodes_get_nothing(self) -> None:
        sick = NodeLoad(cluster="pd", node="c", load=0, is_healthy=False)
        state = ReplicationState(budget_bytes=1 << 30, barred=[(prefix(1).key, ("pd", "b"))])
        result = plan(hot(), loads=[*nodes(a=1, b=1), sick], state=state)
        assert result.notes == ("010101010101 in pd: no healthy node to send it from or to",)

    def test_what_is_coming_already_is_not_sent_again(self) -> None:
        state = ReplicationState(budget_bytes=1 << 30, moving=[(prefix(1).key, ("pd", "c"))])
        assert "1 copies, 1 coming, 2 wanted" in plan(hot(), state=state).notes[0]

    def test_the_number_of_moves_is_limited(self) -> None:
        result = plan(hot(1), hot(2), hot(3))
        assert [order.prefix for order in result.replicate] == [prefix(1), prefix(2)]
        assert result.notes == ("030303030303 in pd: 2 moves run already",)
        # The first one counts as load of its destination.
        assert [order.destination for order in result.replicate] == ["c", "c"]
        close = plan(hot(1), hot(2), loads=nodes(a=5, b=1.5, c=1))
        assert [order.destination for order in close.replicate] == ["c", "b"]

    def test_the_budget_is_kept(self) -> None:
        state = ReplicationState(budget_bytes=9_000)
        result = plan(hot(1), hot(2), state=state)
        assert len(result.replicate) == 1
        assert result.notes == ("020202020202 in pd: 8000 bytes, 1000 may be sent",)

    def test_a_copy_without_demand_is_dropped_unless_it_is_the_last(self) -> None:
        state = ReplicationState(budget_bytes=0, replicas=[(prefix(1), ("pd", "b"))])
        both = (("pd", "a"), ("pd", "b"))
        (demoted,) = plan(hot(per_s=0.01, holders=both), state=state).demote
        assert (demoted.cluster, demoted.node, demoted.keep_blocks) == ("pd", "b", 0)
        assert demoted.reason == "0.01 requests/s, 1 other copies"
        assert plan(hot(per_s=0.015, holders=both), state=state).demote == ()
        assert plan(hot(per_s=0.01, holders=both[1:]), state=state).demote == ()

    def test_what_a_dropped_copy_shares_with_others_is_kept(self) -> None:
        holders = (("pd", "a"), ("pd", "b"))
        cold = CachedPrefix("model", bytes(16), bytes([7]) * 32 + bytes([8]) * 16)
        warm = CachedPrefix("model", bytes(16), bytes([7]) * 32 + bytes([9]) * 16)
        others = CachedPrefix("model", bytes([1]) * 16, bytes([7]) * 32 + bytes([6]) * 16)
        state = ReplicationState(budget_bytes=0, replicas=[(cold, ("pd", "b"))])
        prefixes = [
            HotPrefix(Demand(one, per_s), SHAPE, dict.fromkeys(holders, 3))
            for one, per_s in ((warm, 0.5), (cold, 0.0), (others, 0.5))
        ]
        assert plan(*prefixes, state=state).demote[0].keep_blocks == 2
