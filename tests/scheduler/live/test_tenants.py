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
