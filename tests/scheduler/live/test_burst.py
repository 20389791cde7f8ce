"""Clients without pause never make a region collapse, from a cold start and at default settings."""

import pytest
from closed_region import ClosedRegion, first_come_first_served

SECONDS = 600.0


def h200_s(tokens: int) -> float:
    return 0.39 + 4.2e-5 * tokens + 9.9e-11 * tokens**2


def h20_s(tokens: int) -> float:
    return 0.39 + 14.7e-5 * tokens + 34.7e-11 * tokens**2


@pytest.mark.parametrize(("num_far", "num_local"), [(0, 2), (1, 1), (2, 2)])
@pytest.mark.parametrize(("short_share", "share"), [(0.0, 0.95), (0.3, 0.85)])
@pytest.mark.parametrize("num_clients", [40, 100])
def test_a_region_completes_what_first_come_first_served_would(
    num_far: int, num_local: int, short_share: float, share: float, num_clients: int
) -> None:
    """The oracle computes short prompts beside the decode engine, which the region cannot."""

    def region() -> ClosedRegion:
        return ClosedRegion(h200_s, h20_s, num_far, num_local, short_share=short_share)

    wanted = first_come_first_served(region(), num_clients, SECONDS)
    burst = region()
    burst.run(num_clients, SECONDS)
    # The second half, too: nothing gets worse with what is learnt.
    for after_s in (0.0, SECONDS / 2):
        num_wanted = sum(after_s < at_s <= SECONDS for at_s in wanted)
        assert sum(at_s > after_s for at_s in burst.completed_s) >= share * num_wanted
