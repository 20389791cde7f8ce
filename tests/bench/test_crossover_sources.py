"""What `bench_crossover.py` takes from the results of other benches."""

from pathlib import Path

from bench_crossover import loopback_gbps
from bench_transport import loopback_peers


def test_the_ceiling_is_the_default_transport_at_its_best_block_size(tmp_path: Path) -> None:
    names = [peer.name for peer in loopback_peers(tmp_path, full=False)]
    assert "ours" in names
    measured = [
        {
            "peer": name,
            "place": place,
            "cells": [{"gbit_per_s": rate} for rate in (best / 2, best, None)],
        }
        for name in names
        for place, best in (("loopback", 20.0 if name == "ours" else 40.0), ("veth", 50.0))
    ]
    assert loopback_gbps({"measured": measured}) == 20.0


def test_without_a_measurement_there_is_no_ceiling() -> None:
    assert loopback_gbps({"measured": []}) is None
