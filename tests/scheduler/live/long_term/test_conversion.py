"""One conversion: its way, every way out of it, and that a role never loses its last instance."""

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scheduler.live.long_term.conversion import (
    MAX_DRAIN_S,
    ConversionConfig,
    ConversionOutcome,
    ConversionPhase,
    ConversionWish,
    Converter,
    Drain,
    Ended,
    PdRole,
    RoleChange,
    RoleStatus,
    RoleView,
    SetRole,
    applied,
)
from scheduler.reports import CONVERTIBLE, Role

CONFIG = ConversionConfig(drain_limit_s=100, relabel_limit_s=10, dwell_s=50)
TO_DECODE = ConversionWish("near", "prefill", "decode")
VIEWS = (
    RoleView("p0", "prefill", 4, num_requests=3),
    RoleView("p1", "prefill", 6, num_requests=1, num_tokens=900),
    RoleView("p2", "prefill", 0, num_requests=1, num_tokens=1000),
    RoleView("d0", "decode"),
    RoleView("b0", "both"),
)


def draining() -> Converter:
    converter = Converter(CONFIG)
    assert converter.start(TO_DECODE, VIEWS, 0).effects == (Drain("p1"),)
    return converter


def relabelling() -> Converter:
    converter = draining()
    assert converter.drained("p1", 20) == (SetRole("p1", RoleChange("decode", 7)),)
    return converter


def kinds(effects: tuple[object, ...]) -> list[str]:
    return [type(effect).__name__ for effect in effects]


def test_a_conversion_drains_relabels_and_dwells() -> None:
    converter = relabelling()
    effects = converter.relabelled("p1", 7, 21)
    assert kinds(effects) == ["Resume", "Ended"]
    assert effects[-1] == Ended("p1", TO_DECODE, ConversionOutcome.CONVERTED, "now decode, epoch 7")
    assert converter.current is not None
    assert converter.current.phase is ConversionPhase.DWELLING
    assert converter.tick(70) == ()
    assert converter.start(TO_DECODE, VIEWS, 70).reason == "p1 is dwelling"
    assert converter.tick(71) == ()
    assert converter.current is None


def test_the_least_loaded_usable_instance_of_the_role_is_taken() -> None:
    views = [replace(view, is_usable=view.name != "p1") for view in VIEWS]
    start = Converter().start(TO_DECODE, views, 0)
    assert start.effects == (Drain("p2"),)
    assert start.reason == "p2 has the fewest requests (1) of 2"


def test_one_instance_may_be_asked_for() -> None:
    start = Converter().start(TO_DECODE, VIEWS, 0, only="p0")
    assert (start.effects, start.reason) == ((Drain("p0"),), "p0 was asked for")
    for other in ("d0", "b0", "x"):
        start = Converter().start(TO_DECODE, VIEWS, 0, only=other)
        assert start.effects == ()
        assert start.reason == f"{other} is no usable prefill instance of near"


def test_the_last_usable_instance_of_a_role_stays() -> None:
    start = Converter().start(ConversionWish("near", "decode", "prefill"), VIEWS, 0)
    assert start.effects == ()
    assert start.reason == (
        "near has 1 usable decode instances; one must stay, and b0 has the role both, which is "
        "never converted"
    )
    start = Converter().start(ConversionWish("near", "decode", "prefill"), VIEWS[:-1], 0)
    assert start.reason == "near has 1 usable decode instances; one must stay"


ALL_STAGES: tuple[PdRole, ...] = ("encode", "prefill", "decode")


def test_an_instance_changes_only_to_roles_of_its_engine() -> None:
    to_encode = ConversionWish("near", "prefill", "encode")
    start = Converter().start(to_encode, VIEWS, 0)
    assert start.effects == ()
    assert start.reason == "p0, p1, p2 cannot be given the role encode"
    views = (*VIEWS, replace(VIEWS[0], name="p3", num_requests=9, roles=ALL_STAGES))
    start = Converter().start(to_encode, views, 0)
    assert start.effects == (Drain("p3"),)
    assert start.reason == "p3 has the fewest requests (9) of 4"
    assert not Converter().start(to_encode, views, 0, only="p1").effects


def test_the_last_instance_that_encodes_may_do_other_work() -> None:
    """Those that prefill encode what they find nobody to encode."""
    wish = ConversionWish("near", "encode", "decode")
    alone = RoleView("e0", "encode", 3, roles=ALL_STAGES)
    converter = Converter(CONFIG)
    assert converter.start(wish, (*VIEWS, alone), 0).effects == (Drain("e0"),)
    assert converter.drained("e0", 1) == (SetRole("e0", RoleChange("decode", 4)),)
    fixed = replace(alone, roles=("encode",))
    start = Converter().start(wish, (*VIEWS, fixed), 0)
    assert (start.effects, start.reason) == ((), "e0 cannot be given the role decode")
    start = Converter().start(wish, VIEWS[:-1], 0)
    assert (start.effects, start.reason) == ((), "near has 0 usable encode instances")
    only = RoleView("p0", "prefill", roles=ALL_STAGES)
    start = Converter().start(ConversionWish("near", "prefill", "encode"), (only,), 0)
    assert start.reason == "near has 1 usable prefill instances; one must stay"


def test_there_are_never_two_at_once() -> None:
    converter = draining()
    second = converter.start(TO_DECODE, VIEWS, 1)
    assert second.effects == ()
    assert second.reason == "p1 is draining"


def test_a_drain_that_takes_too_long_is_given_up() -> None:
    converter = draining()
    assert converter.tick(99) == ()
    effects = converter.tick(100)
    assert kinds(effects) == ["Resume", "Ended"]
    assert effects[-1] == Ended(
        "p1", TO_DECODE, ConversionOutcome.TOO_SLOW, "draining for 100 s; at most 100 s"
    )
    assert converter.current is None


def test_an_instance_that_dies_while_it_drains_is_given_back() -> None:
    converter = draining()
    assert kinds(converter.failed("p1", "engine is gone")) == ["Resume", "Ended"]
    assert converter.current is None
    assert converter.start(TO_DECODE, VIEWS, 1).effects


@pytest.mark.parametrize("how", ["failed", "too slow"])
def test_an_unknown_relabelling_is_undone_with_a_later_epoch(how: str) -> None:
    converter = relabelling()
    effects = converter.failed("p1", "no answer") if how == "failed" else converter.tick(30)
    assert kinds(effects) == ["SetRole", "Resume", "Ended"]
    assert effects[0] == SetRole("p1", RoleChange("prefill", 8))
    assert converter.current is None


def test_events_about_others_or_from_before_do_nothing() -> None:
    converter = draining()
    assert converter.drained("p2", 1) == ()
    assert converter.failed("p2", "gone") == ()
    assert converter.relabelled("p1", 7, 1) == ()
    converter = relabelling()
    assert converter.drained("p1", 21) == ()
    assert converter.relabelled("p1", 6, 21) == ()
    converter.relabelled("p1", 7, 22)
    assert converter.failed("p1", "gone") == ()
    assert Converter().tick(1) == ()


def test_an_instance_takes_only_newer_orders() -> None:
    status = RoleStatus("prefill", 4)
    changed = applied(status, RoleChange("decode", 5))
    assert changed == RoleStatus("decode", 5)
    assert changed.ready
    assert applied(changed, RoleChange("decode", 5)) == changed
    assert applied(changed, RoleChange("prefill", 5)) is None
    assert applied(changed, RoleChange("prefill", 4)) is None


def test_limits_are_checked() -> None:
    with pytest.raises(ValueError, match="drain_limit_s 0"):
        ConversionConfig(drain_limit_s=0)
    with pytest.raises(ValueError, match="drain_limit_s 901 must be above 0 and at most 900"):
        ConversionConfig(drain_limit_s=901)
    with pytest.raises(ValueError, match="relabel_limit_s 0 must be above 0"):
        ConversionConfig(relabel_limit_s=0)
    with pytest.raises(ValueError, match="dwell_s -1 not below"):
        ConversionConfig(dwell_s=-1)


def test_limits_that_may_be() -> None:
    ConversionConfig(drain_limit_s=0.5, relabel_limit_s=0.5, dwell_s=0)
    ConversionConfig(drain_limit_s=MAX_DRAIN_S, relabel_limit_s=MAX_DRAIN_S + 1, dwell_s=0.5)


def test_a_cluster_converts_once_in_four_minutes_where_nothing_else_is_said() -> None:
    converter = Converter()
    converter.start(TO_DECODE, VIEWS, 0)
    converter.drained("p1", 0)
    converter.relabelled("p1", 7, 0)
    converter.tick(239.9)
    assert converter.start(TO_DECODE, VIEWS, 239.9).reason == "p1 is dwelling"
    converter.tick(240)
    assert converter.start(TO_DECODE, VIEWS, 240).effects


def test_without_a_dwell_the_next_conversion_may_begin_at_once() -> None:
    converter = Converter(ConversionConfig(dwell_s=0))
    converter.start(TO_DECODE, VIEWS, 0)
    converter.drained("p1", 1)
    converter.relabelled("p1", 7, 2)
    assert converter.tick(2) == ()
    assert converter.start(TO_DECODE, VIEWS, 2).effects


def roles_of(name: str) -> tuple[Role, ...]:
    return ALL_STAGES if name in ("i0", "i3", "i5") else CONVERTIBLE


class Cluster(RuleBasedStateMachine):
    """Six instances that follow the effects; events come in any order, also lost and late.

    An order does not outlive the next wish: its request has timed out long before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.converter = Converter(CONFIG)
        self.now_s = 0.0
        self.instances = {
            f"i{n}": RoleStatus("prefill" if n < 3 else "decode", n) for n in range(5)
        } | {"i5": RoleStatus("encode", 5)}
        self.drained: set[str] = set()
        self.orders: list[SetRole] = []

    def perform(self, effects: tuple[object, ...]) -> None:
        for effect in effects:
            if isinstance(effect, Drain):
                self.drained.add(effect.instance)
            elif isinstance(effect, SetRole):
                self.orders.append(effect)
            elif not isinstance(effect, Ended):
                self.drained.discard(effect.instance)  # type: ignore[attr-defined]

    @rule(roles=st.permutations(ALL_STAGES))
    def wish(self, roles: list[PdRole]) -> None:
        if self.converter.current is None:
            self.orders.clear()
        views = [
            RoleView(name, s.role, s.epoch, roles=roles_of(name))
            for name, s in self.instances.items()
        ]
        wish = ConversionWish("near", *roles[:2])
        self.perform(self.converter.start(wish, views, self.now_s).effects)

    @rule(name=st.sampled_from(["i0", "i1", "i2", "i3", "i4", "i5"]), event=st.integers(0, 1))
    def event(self, name: str, event: int) -> None:
        if event:
            self.perform(self.converter.drained(name, self.now_s))
        else:
            self.perform(self.converter.failed(name, "died"))

    @precondition(lambda self: self.orders)
    @rule(first=st.booleans(), is_lost=st.booleans(), is_told=st.booleans())
    def order_arrives(self, first: bool, is_lost: bool, is_told: bool) -> None:
        order = self.orders.pop(0 if first else -1)
        if is_lost:
            return
        status = applied(self.instances[order.instance], order.change)
        if status is not None:
            self.instances[order.instance] = status
            if is_told:
                told = self.converter.relabelled(order.instance, order.change.epoch, self.now_s)
                self.perform(told)

    @rule(spent_s=st.floats(0, 120))
    def time_passes(self, spent_s: float) -> None:
        self.now_s += spent_s
        self.perform(self.converter.tick(self.now_s))

    @invariant()
    def at_most_one_is_drained_and_it_is_the_current(self) -> None:
        current = self.converter.current
        active = current is not None and current.phase is not ConversionPhase.DWELLING
        assert self.drained == ({current.instance} if active and current else set())

    @invariant()
    def every_role_keeps_an_instance_that_serves(self) -> None:
        serving = {s.role for name, s in self.instances.items() if name not in self.drained}
        assert serving >= {"prefill", "decode"}

    @invariant()
    def an_instance_has_only_roles_of_its_engine(self) -> None:
        assert all(s.role in roles_of(name) for name, s in self.instances.items())


Cluster.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestCluster = Cluster.TestCase
