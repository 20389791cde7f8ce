"""Who keeps a place at a receiver that more connections want than it serves."""

from __future__ import annotations

import random
from itertools import count

from transport.receiving.places import MIN_STAY_S, Places

LONG_S = 2 * MIN_STAY_S
ONE, OTHER = b"1" * 16, b"2" * 16


def filled(max_connections: int = 16, network: str = "attacker") -> Places:
    """Every place for newcomers is taken, by connections 0 and following, one every `LONG_S`."""
    places = Places(max_connections)
    for number in range(max_connections // 4):
        assert places.admit(number, network, number * LONG_S) is None
    return places


def test_the_oldest_connection_of_the_same_network_makes_room() -> None:
    places = filled()
    assert [places.admit(number, "attacker", number * LONG_S) for number in range(4, 8)] == [
        *range(4)
    ]
    assert len(places) == places.num_turned_away == 4


def test_a_newcomer_does_not_push_out_what_has_just_come_from_a_network_like_its_own() -> None:
    places = Places(16)
    for number in range(4):
        assert places.admit(number, "attacker", 0.0) is None
    assert places.admit(4, "attacker", MIN_STAY_S - 0.01) == 4
    assert places.admit(5, "attacker", MIN_STAY_S) == 0


def test_another_network_gets_a_place_at_once_and_keeps_it() -> None:
    places = Places(16)
    for number in range(4):
        assert places.admit(number, "attacker", 0.0) is None
    assert places.admit(4, "sender", 0.0) == 0
    assert places.turned_away_party == "attacker"
    for number in range(5, 500):
        loser = places.admit(number, "attacker", number * LONG_S)
        assert loser is not None
        assert loser != 4


def test_networks_share_the_places_evenly() -> None:
    places, numbers = filled(), count(100)
    for _ in range(8):
        places.admit(next(numbers), "sender", 100.0)
    assert places.num_turned_away == 8
    assert places.turned_away_party == "sender"  # it has its half
    assert places.admit(next(numbers), "third", 100.0) in range(4)


def test_known_connections_stay_and_take_no_newcomers_place() -> None:
    places = Places(16)
    for number in range(12):
        assert places.admit(number, "sender", 0.0) is None
        assert not places.greeted(number, ONE + bytes([number]), has_opened=False)
        assert places.greeted(number, ONE + bytes([number]), has_opened=True)
    for number in range(12, 100):
        places.admit(number, "sender", number * LONG_S)
    assert len(places) == 16
    assert all(places.greeted(number, ONE, has_opened=False) for number in range(12))


def test_nobody_is_admitted_when_all_places_belong_to_known_connections() -> None:
    places = Places(4)
    for number in range(4):
        assert places.admit(number, "sender", 0.0) is None
        assert places.greeted(number, ONE, has_opened=True)
    assert places.admit(4, "sender", LONG_S) == 4
    assert places.admit(5, "another", LONG_S) == 5
    places.leave(0)
    assert places.admit(6, "another", LONG_S) is None


def test_one_accepted_transfer_speaks_for_all_connections_of_its_process() -> None:
    places = filled()
    assert not places.greeted(0, ONE, has_opened=False)
    assert not places.greeted(1, OTHER, has_opened=False)
    assert places.greeted(2, ONE, has_opened=True)
    assert places.greeted(0, ONE, has_opened=False)
    assert not places.greeted(1, OTHER, has_opened=False)
    assert places.greeted(3, ONE, has_opened=False)
    for number in (0, 2, 3):
        places.leave(number)
    # Nobody is left who could speak for it.
    assert places.admit(10, "attacker", 100.0) is None
    assert not places.greeted(10, ONE, has_opened=False)


def test_silent_peers_push_out_no_agent_of_the_region() -> None:
    places = Places(16)
    for number in range(4):
        assert places.admit(number, "nat", 0.0) is None
        assert places.authenticated(number, 0.0) is None
    for number in range(4, 100):
        assert places.admit(number, "nat", number * LONG_S) not in range(4)
    assert len(places) == 8


def test_agents_without_a_transfer_have_so_many_places_themselves() -> None:
    places = Places(16)
    for number in range(6):
        assert places.admit(number, "nat", number * LONG_S) is None
        loser = places.authenticated(number, number * LONG_S)
        assert loser == (None if number < 4 else number - 4)
    assert places.authenticated(0, 100.0) is None  # it has gone meanwhile
    assert not places.greeted(0, ONE, has_opened=True)
    assert len(places) == 4


def test_when_known_connections_leave_little_an_agent_keeps_its_place() -> None:
    places = Places(8)
    for number in range(7):
        assert places.admit(number, "sender", 0.0) is None
        assert places.greeted(number, ONE, has_opened=True)
    assert places.admit(7, "nat", 0.0) is None
    assert places.authenticated(7, 0.0) is None
    assert places.admit(8, "nat", 100.0) == 8


def test_whatever_happens_the_limits_hold_and_known_connections_stay() -> None:
    for seed in range(50):
        dice = random.Random(seed)
        places, now_s, known, there = Places(24), 0.0, set[int](), set[int]()
        has_tls = seed % 2 == 1
        for number in range(400):
            now_s += dice.choice((0.0, 0.1, MIN_STAY_S))
            losers = [places.admit(number, f"net {dice.randrange(1 + seed % 7)}", now_s)]
            there.add(number)
            subject = dice.choice(sorted(there))
            if has_tls and subject not in losers and dice.random() < 0.5:
                losers.append(places.authenticated(subject, now_s))
            there.difference_update(loser for loser in losers if loser is not None)
            assert known <= there, "a known connection was turned away"
            subject = dice.choice(sorted(there))
            has_opened = dice.random() < 0.1
            if places.greeted(subject, bytes([dice.randrange(5)]) * 16, has_opened=has_opened):
                known.add(subject)
            if dice.random() < 0.3:
                gone = dice.choice(sorted(there))
                places.leave(gone)
                there.discard(gone)
                known.discard(gone)
            assert len(places) == len(there) <= 24
