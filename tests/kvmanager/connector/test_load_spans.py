"""When requests were loaded, until their first step is over."""

from kvmanager.load_times import LoadTimes
from kvmanager.vllm_connector.load_spans import MAX_SPANS, LoadSpans
from kvmanager.vllm_connector.metadata import FirstStep


def first_step(request_id: str, arrived_s: float = 10.0) -> FirstStep:
    return FirstStep(request_id, bytes(16), "e1", arrived_s)


def test_the_times_follow_each_other() -> None:
    spans = LoadSpans()
    spans.loaded("r", 11.0, 11.5)
    times = spans.first_step_over(first_step("r"), 11.75)
    assert times == LoadTimes(1.0, 0.5, 0.25)
    assert times.total_s == 1.75
    assert spans.first_step_over(first_step("r"), 12.0) is None, "it is told once"


def test_what_was_never_loaded_has_no_times() -> None:
    assert LoadSpans().first_step_over(first_step("r"), 12.0) is None


def test_a_load_that_ends_behind_the_step_makes_no_negative_time() -> None:
    spans = LoadSpans()
    spans.loaded("r", 9.0, 13.0)
    assert spans.first_step_over(first_step("r"), 12.0) == LoadTimes(0.0, 4.0, 0.0)


def test_requests_that_take_no_step_are_forgotten_at_last() -> None:
    spans = LoadSpans()
    for number in range(MAX_SPANS + 1):
        spans.loaded(f"r{number}", 1.0, 2.0)
    assert spans.first_step_over(first_step("r0"), 3.0) is None
    assert spans.first_step_over(first_step("r1"), 3.0) is not None
