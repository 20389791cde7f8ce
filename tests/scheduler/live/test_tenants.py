"""What tenants have in flight: what is remembered of whom, and limits that make no sense."""

import pytest

from scheduler.live.tenants import TenantLedger, TenantLimit


def test_idle_tenants_are_forgotten() -> None:
    tenants = TenantLedger(TenantLimit(tokens_per_s=1.0, burst_tokens=10.0))
    for i in range(TenantLedger.SWEEP_ABOVE):
        tenants.started(f"t{i}", 10, 0.0)
        if i % 2:
            tenants.ended(f"t{i}", 10)
    tenants.started("new", 1, 5.0)
    assert len(tenants) == TenantLedger.SWEEP_ABOVE + 1
    for i in range(1, TenantLedger.SWEEP_ABOVE + 1):
        tenants.started(f"u{i}", 0, 20.0)
    assert len(tenants) <= 1.5 * TenantLedger.SWEEP_ABOVE + 1


def test_limits_that_cannot_be_meant() -> None:
    with pytest.raises(ValueError, match="max_requests is 0"):
        TenantLimit(max_requests=0)
    with pytest.raises(ValueError, match=r"burst_tokens is 0\.0"):
        TenantLimit(tokens_per_s=5.0)


def test_a_bucket_counts_what_a_request_was_in_the_end() -> None:
    tenants = TenantLedger(TenantLimit(tokens_per_s=1.0, burst_tokens=100.0))
    tenants.started("t", 90, 0.0)
    assert tenants.refusal("t", 20, 0.0) is not None
    tenants.ended("t", 90, used_tokens=30)
    assert tenants.refusal("t", 70, 0.0) is None
    assert tenants.refusal("t", 71, 0.0) is not None
    tenants.started("t", 10, 0.0)
    tenants.ended("t", 10, used_tokens=1000)
    refusal = tenants.refusal("t", 1, 0.0)
    assert refusal is not None
    assert refusal.retry_after_s == 1000 + 30 - 100 + 1
    assert tenants.in_flight("t") == (0, 0)


def test_a_bucket_never_holds_more_than_its_burst() -> None:
    tenants = TenantLedger(TenantLimit(tokens_per_s=1.0, burst_tokens=100.0))
    tenants.started("t", 10, 0.0)
    tenants.started("t", 500, 90.0)
    tenants.ended("t", 500, used_tokens=0)
    tenants.started("t", 50, 200.0)
    assert tenants.refusal("t", 50, 200.0) is None
    assert tenants.refusal("t", 51, 200.0) is not None


def test_what_is_in_flight_counts_towards_other_limits() -> None:
    tenants = TenantLedger(TenantLimit(max_requests=3))
    tenants.started("t", 50, 0.0)
    tenants.started("t", 50, 0.0)
    assert tenants.refusal("t", 1, 0.0) is None
    tenants.set_limits(TenantLimit(), {"t": TenantLimit(max_requests=2, max_tokens=1000)})
    refusal = tenants.refusal("t", 1, 0.0)
    assert refusal is not None
    assert refusal.numbers == {"requests": 2, "max_requests": 2}
    tenants.ended("t", 50)
    assert tenants.refusal("t", 950, 0.0) is None
    assert tenants.refusal("t", 951, 0.0) is not None
    tenants.set_limits(TenantLimit(), {})
    tenants.ended("t", 50)
    assert tenants.in_flight("t") == (0, 0)


def test_a_new_rate_does_not_count_what_came_before_it() -> None:
    tenants = TenantLedger()
    for second in range(100):
        tenants.started("t", 1000, float(second))
        tenants.ended("t", 1000, used_tokens=1000)
    tenants.started("t", 30, 100.0)
    tenants.set_limits(TenantLimit(tokens_per_s=1.0, burst_tokens=100.0), {})
    assert tenants.refusal("t", 70, 100.0) is None
    assert tenants.refusal("t", 71, 100.0) is not None
    tenants.ended("t", 30, used_tokens=10)
    assert tenants.refusal("t", 90, 100.0) is None
    assert tenants.refusal("t", 91, 100.0) is not None


def test_a_new_rate_refuses_nobody_for_longer_than_its_bucket_takes_to_fill() -> None:
    tenants = TenantLedger()
    tenants.started("t", 1_000_000, 0.0)
    tenants.set_limits(TenantLimit(tokens_per_s=1.0, burst_tokens=100.0), {})
    refusal = tenants.refusal("t", 500, 0.0)
    assert refusal is not None
    assert refusal.retry_after_s == 100.0


def test_another_rate_goes_on_with_the_bucket_as_it_is() -> None:
    tenants = TenantLedger(TenantLimit(tokens_per_s=1.0, burst_tokens=100.0))
    tenants.started("t", 80, 0.0)
    tenants.set_limits(TenantLimit(tokens_per_s=10.0, burst_tokens=1000.0), {})
    assert tenants.refusal("t", 20, 0.0) is None
    assert tenants.refusal("t", 21, 0.0) is not None
    assert tenants.refusal("t", 120, 10.0) is None
    tenants.set_limits(TenantLimit(tokens_per_s=10.0, burst_tokens=50.0), {})
    assert tenants.refusal("t", 51, 1000.0) is None
    tenants.started("t", 51, 1000.0)
    assert tenants.refusal("t", 1, 1000.0) is not None
