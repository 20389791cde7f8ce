"""Which path each connection of a link takes, while paths fail and come back."""

from __future__ import annotations

from transport import Endpoint
from transport.sending.paths import LinkPath, PathChoice

PATHS = [LinkPath(Endpoint(f"10.{number}.0.1", 7100)) for number in range(3)]


def test_connections_are_spread_over_all_paths() -> None:
    taken = [PathChoice(PATHS, index).path for index in range(6)]
    assert taken == PATHS * 2


def test_a_path_that_fails_costs_only_its_connections() -> None:
    choice = PathChoice(PATHS, 1)
    choice.failed()
    assert (choice.path, choice.is_away) == (PATHS[2], True)
    choice.failed()
    assert choice.path == PATHS[0]
    choice.failed()
    assert (choice.path, choice.is_away) == (PATHS[1], False)


def test_a_lost_connection_tries_its_own_path_first() -> None:
    choice = PathChoice(PATHS, 2)
    choice.failed()
    choice.lost()
    assert (choice.path, choice.is_away) == (PATHS[2], False)


def test_a_single_path_is_never_left() -> None:
    choice = PathChoice(PATHS[:1], 5)
    choice.failed()
    assert (choice.path, choice.is_away) == (PATHS[0], False)
