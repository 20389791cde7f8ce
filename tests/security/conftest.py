"""Regions of doubles around a real gateway, for attacks on it."""

from typing import Any

import pytest
from gateway_region import open_region


@pytest.fixture(name="open_region")
def open_region_fixture() -> Any:
    """Opens a region of its own with `async with open_region(...)`."""
    return open_region
