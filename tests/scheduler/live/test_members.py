"""When instances join and leave, from reports alone."""

from msgspec import structs
from report_cases import cluster, instance

from scheduler.live.members import Members
from scheduler.reports import ClusterReport


def report(*names: str, sick: str = "") -> ClusterReport:
    return cluster("far", *(instance(name, "prefill", healthy=name != sick) for name in names))


def test_those_of_the_first_report_did_not_join() -> None:
    members = Members()
    assert members.heard(report("a", "b", sick="b")) == frozenset()
    assert members.heard(report("a", "b")) == frozenset()
    assert members.num_changes == 0


def test_one_joins_when_it_is_healthy_and_leaves_when_it_is_named_no_more() -> None:
    members = Members()
    members.heard(report("a"))
    assert members.heard(report("a", "b", sick="b")) == frozenset()
    assert members.num_changes == 0
    assert members.heard(report("a", "b")) == frozenset()
    assert members.num_changes == 1
    assert members.heard(report("a", "b", sick="b")) == frozenset()
    assert members.heard(report("b")) == {"a"}
    assert members.num_changes == 2


def test_a_front_that_is_silent_loses_nobody() -> None:
    members = Members()
    members.heard(report("a"))
    assert members.heard(None) == frozenset()
    assert members.heard(structs.replace(report(), heard=False)) == frozenset()
    assert members.heard(report("a")) == frozenset()
    assert members.num_changes == 0


def test_a_thousand_that_came_and_went_leave_nothing() -> None:
    members = Members()
    members.heard(report("a"))
    for number in range(1000):
        members.heard(report("a", f"x{number}"))
        assert members.heard(report("a")) == {f"x{number}"}
    assert members.num_changes == 2000
    assert members._known == {"far": {"a"}}
