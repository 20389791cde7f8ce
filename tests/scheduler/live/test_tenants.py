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
