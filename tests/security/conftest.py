"""Regions of doubles around a real gateway, for attacks on it."""

from gateway_fixtures import open_region_fixture, region

__all__ = ["open_region_fixture", "region"]
