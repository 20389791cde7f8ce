"""Which settings change while a gateway runs, and which are only named."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from deploy.gateway.api_keys import parse_api_keys
from deploy.gateway.config import GatewayConfig, with_api_keys
from deploy.gateway.reload import LIVE, LIVE_ADMISSION, changed_settings, with_live

KEYS = parse_api_keys("acme=one,ops=two", "test")
LIMITED = {"scheduling": {"admission": {"tenants": {"acme": {"max_requests": 3}}}}}


def config(**settings: Any) -> GatewayConfig:
    read = GatewayConfig.model_validate({"models": [{"name": "m"}], "port": 0} | settings)
    return with_api_keys(read, KEYS)


def test_limits_and_rights_of_tenants_change_and_nothing_else_does() -> None:
    running = config(threshold_tokens=7)
    read = config(
        **LIMITED | {"scheduling": LIMITED["scheduling"] | {"routing": {"margin_s": 9}}},
        operators=["ops"],
        priority_tenants=["acme"],
        shared_caches={"all": ["acme", "ops"]},
        max_in_flight=5,
        timeouts={"drain_s": 1},
        port=1,
    )
    after = with_live(running, read)
    assert changed_settings(running, after) == (
        "operators",
        "priority_tenants",
        "shared_caches",
        "scheduling.admission.tenants",
        "max_in_flight",
    )
    assert changed_settings(after, read) == (
        "port",
        "threshold_tokens",
        "scheduling.routing.margin_s",
        "timeouts.drain_s",
    )
    assert after.api_keys == KEYS
    assert with_live(after, running) == running


def test_every_live_setting_is_one() -> None:
    assert set(LIVE) <= GatewayConfig.model_fields.keys()
    admission = config().scheduling.admission
    assert set(LIVE_ADMISSION) <= type(admission).model_fields.keys()


def test_what_does_not_fit_the_settings_that_stay_changes_nothing() -> None:
    running = config(max_body_bytes="32MiB", max_buffered_bytes="1GiB")
    small = config(max_body_bytes="1MiB", max_buffered_bytes="2MiB")
    with pytest.raises(ValidationError, match="must hold at least one body"):
        with_live(running, small)
