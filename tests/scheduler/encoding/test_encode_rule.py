import pytest

from scheduler.encoding.line import EncodeLine
from scheduler.encoding.rule import encoded_in_s, predict
from scheduler.encoding.values import EncodeReason
from scheduler.reports import EncodeInstanceReport, EncodeReport

LINE = EncodeLine(0.1, 0.001)


def at(name: str = "e0", busy_s: float = 0.0, **more: object) -> EncodeInstanceReport:
    fields = {"budget_tokens": 400, "line": LINE} | more
    return EncodeInstanceReport(name=name, busy_s=busy_s, **fields)  # type: ignore[arg-type]


def test_a_free_instance_is_as_fast_as_the_prefill_instance() -> None:
    found = predict(EncodeReport(instances=(at(),)), "", 300)
    assert found.reason is None
    assert found.apart_s == found.own_s == pytest.approx(0.4)


@pytest.mark.parametrize(("wait_s", "is_late"), [(0.0, True), (0.5, True), (0.7, False)])
def test_encoding_apart_may_take_as_long_as_the_prefill_waits(wait_s: float, is_late: bool) -> None:
    # 1.0 + 0.4 s against the wait and twice 0.4 s.
    report = EncodeReport(instances=(at(busy_s=1.0),))
    found = predict(report, "", 300, wait_s=wait_s)
    assert (found.reason is EncodeReason.WAIT_TOO_LONG) == is_late


def test_a_slow_prefill_instance_is_relieved_sooner() -> None:
    report = EncodeReport(instances=(at(busy_s=1.0),))
    assert predict(report, "", 300, own=EncodeLine(1.0, 0.0)).reason is None


def test_waiting_media_go_first() -> None:
    report = EncodeReport(waiting_media=4, waiting_tokens=500, instances=(at(), at("e1")))
    # Two passes of 400 at once.
    assert predict(report, "", 300).apart_s == pytest.approx(0.5)
    assert encoded_in_s((at(),), 800) == pytest.approx(1.0)


def test_unknown_times_are_found_out() -> None:
    found = predict(EncodeReport(instances=(at(busy_s=9.0, line=None),)), "", 300)
    assert found.reason is None
    assert found.apart_s is None
    assert found.own_s is None


def test_instances_of_other_models_or_lost_ones_do_not_count() -> None:
    report = EncodeReport(instances=(at(model="a"), at("e1", healthy=False)))
    assert predict(report, "b", 300).reason is EncodeReason.NO_INSTANCE
    assert predict(report, "a", 300).reason is None


def test_a_deep_queue_is_spread_by_rates() -> None:
    found = encoded_in_s((at(), at("e1")), 4_000_000)
    assert found == pytest.approx(4_000_000 / 800 * 0.5, rel=0.01)
