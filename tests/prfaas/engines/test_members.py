"""What a changed list of instances means, and who cannot work with whom."""

import pytest
from msgspec import structs
from report_cases import instance

from prfaas.engines.instance import InstanceSpec
from prfaas.engines.members import Join, member_changes
from scheduler.reports import InstanceReport, unlike


def spec(name: str, **changes: object) -> InstanceSpec:
    return InstanceSpec.model_validate({"name": name, "url": "http://e", "agent": "a:1"} | changes)


def report(name: str, **changes: object) -> InstanceReport:
    values = {"layout_fingerprint": "ab" * 32, "layout": "MLA", "weights": "w1"}
    return instance(name, "decode", **(values | changes))


def test_a_list_changes_by_those_that_are_new_gone_or_different() -> None:
    before = [spec("a"), spec("b"), spec("c")]
    after = [spec("d"), spec("c"), spec("b", max_concurrent=9)]
    changes = member_changes(before, after)
    assert changes.leaving == ("a", "b")
    assert [item.name for item in changes.joining] == ["d", "b"]
    assert member_changes(after, after) == member_changes([], [])


def test_an_order_to_join_is_checked_as_a_file_is() -> None:
    assert Join(name="a", url="http://e", agent="a:1").spec() == spec("a")
    with pytest.raises(ValueError, match="decode_slots"):
        Join(name="a", url="http://e", agent="a:1", decode_slots=0).spec()


def test_why_two_engines_of_one_model_cannot_work_together_names_both_values() -> None:
    one = report("d0")
    assert unlike(one, report("d1")) == ""
    assert unlike(one, report("d1", layout_fingerprint="")) == ""
    other_weights = report("d1", layout_fingerprint="cd" * 32, weights="w2")
    assert unlike(other_weights, one) == "the weights of m are w2 at d1, but w1 at d0"
    other_layout = report("d1", layout_fingerprint="cd" * 32, layout="GQA")
    said = unlike(other_layout, one)
    assert "KVCache of m is laid out as GQA (cdcdcdcdcdcdcdcd) at d1" in said
    assert "but as MLA (abababababababab) at d0" in said
    assert unlike(one, structs.replace(other_layout, model="other")) == ""


def test_another_adapter_is_no_reason_not_to_work_together() -> None:
    one, other = (report("d0", adapters={"poet": name}) for name in ("files:1", "files:2"))
    assert unlike(other, one) == ""
