"""Settings, specs and the reconnect delay."""

from __future__ import annotations

import pytest

from transport import Endpoint, OutgoingSpec
from transport.backoff import Backoff
from transport.config import TransportConfig


@pytest.mark.parametrize(
    "bad",
    [
        {"num_connections": 0},
        {"frame_bytes": 0},
        {"frame_bytes": 65 << 20},
        {"max_frame_bytes": 65 << 20},
        {"idle_timeout_s": -1.0},
        {"handshake_timeout_s": 0},
        {"ack_timeout_s": 30.0},
        {"idle_timeout_s": float("nan")},
        {"notsent_lowat_bytes": 1 << 31},
    ],
)
def test_impossible_settings_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        TransportConfig(**bad)  # type: ignore[arg-type]


def test_the_watchdog_is_quick_enough_for_short_timeouts_and_slow_otherwise() -> None:
    assert TransportConfig().tick_s == 1.0
    assert TransportConfig(ack_timeout_s=0.4).tick_s == pytest.approx(0.1)


def test_spec_sizes_are_checked() -> None:
    with pytest.raises(ValueError, match="token must have 32 bytes, got 3"):
        OutgoingSpec(bytes(16), b"abc", bytes(32), Endpoint("x", 1))


def test_delays_double_up_to_the_limit_and_start_anew_after_a_good_connection() -> None:
    backoff = Backoff(0.1, 1.0, uniform=lambda: 1.0)
    assert [backoff.after(0.0) for _ in range(6)] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert backoff.after(0.5) == 1.0
    assert backoff.after(30.0) == 0.1
    assert backoff.after(0.0) == 0.2
    backoff.reset()
    assert backoff.after(0.0) == 0.1


def test_delays_of_many_who_lost_one_peer_together_lie_apart() -> None:
    delays_s = [Backoff(1.0, 8.0).after(0.0) for _ in range(200)]
    assert all(0.5 <= delay_s <= 1.0 for delay_s in delays_s)
    assert max(delays_s) - min(delays_s) > 0.25
