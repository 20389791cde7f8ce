"""The plan of faults that wait for a byte count, and the commands as JSON."""

from __future__ import annotations

import msgspec
import pytest

from deploy.lab.emulator.faults import Command, Cut, Fault, FaultPlan, Flip, Heal, Stall


def test_faults_strike_in_the_order_of_their_counts() -> None:
    plan = FaultPlan()
    late: Fault = Cut(after_bytes=500)
    early: Fault = Flip(direction="forward", after_bytes=100)
    plan.add(late, {"forward": 1000, "backward": 0})
    plan.add(early, {"forward": 1000, "backward": 0})
    assert plan.bytes_until_next("forward", 1040) == 60
    assert plan.bytes_until_next("backward", 0) is None
    assert plan.pop_due("forward", 1099) == []
    assert plan.pop_due("forward", 1100) == [early]
    assert plan.bytes_until_next("forward", 1100) == 400
    assert plan.pop_due("forward", 9999) == [late]
    assert len(plan) == 0


def test_directions_are_counted_apart() -> None:
    plan = FaultPlan()
    plan.add(Stall(direction="backward", after_bytes=10), {"forward": 0, "backward": 7})
    assert plan.bytes_until_next("forward", 0) is None
    assert plan.bytes_until_next("backward", 7) == 10


def test_negative_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        FaultPlan().add(Cut(after_bytes=-1), {"forward": 0, "backward": 0})


def test_commands_are_tagged_json() -> None:
    decode = msgspec.json.Decoder(Command).decode
    assert decode(b'{"op": "cut", "for_s": 3}') == Cut(for_s=3)
    assert decode(b'{"op": "heal"}') == Heal()
    with pytest.raises(msgspec.ValidationError, match="forceful"):
        decode(b'{"op": "cut", "forceful": true}')
    with pytest.raises(msgspec.ValidationError, match="Invalid value"):
        decode(b'{"op": "explode"}')
