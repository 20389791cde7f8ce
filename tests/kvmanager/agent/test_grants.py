"""Which calls an agent takes without a grant, and how often it takes one."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest
from granting import grant_files

from kvmanager.agent.cache.move_messages import ReserveCacheMove
from kvmanager.agent.grants import AgentGrants, move_landing, probe_send, reservation
from kvmanager.agent.probe_messages import ProbeSend
from kvmanager.transfers.records import CallNotGranted, NoArenaRoom
from transport import Endpoint
from transport.grants import GRANT_S, SKEW_S, Granter, GrantFile

WANTED = reservation(10, "digest", b"keys")
PROBE = probe_send(ProbeSend("00", "00", "00", 1000, "b", 7100, 5.0))


@pytest.fixture
def files(tmp_path: Path) -> tuple[GrantFile, GrantFile]:
    """The private key, the public one."""
    return grant_files(tmp_path)


def test_without_keys_everything_is_granted() -> None:
    grants = AgentGrants(None, agent="a:1", send_to=None)
    for _ in range(2):
        with grants.once(b"", WANTED):
            pass
    grants.require(b"", PROBE)
    grants.require_for_probe(b"", PROBE)


def test_a_grant_is_good_once_unless_nothing_came_of_it(files: tuple[GrantFile, GrantFile]) -> None:
    grants, raw = AgentGrants(files[1], agent="a:1", send_to=None), Granter(files[0]).grant(WANTED)
    with pytest.raises(NoArenaRoom), grants.once(raw, WANTED):
        raise NoArenaRoom("full")
    with grants.once(raw, WANTED):
        pass
    with pytest.raises(CallNotGranted, match="used before"), grants.once(raw, WANTED):
        raise AssertionError("the call is let in again")
    # A grant of the same content is another one.
    with grants.once(Granter(files[0]).grant(WANTED), WANTED):
        pass


def test_a_move_is_granted_for_one_cache_namespace(files: tuple[GrantFile, GrantFile]) -> None:
    grants, granter = AgentGrants(files[1], agent="a:1", send_to=None), Granter(files[0])
    plain = ReserveCacheMove("00" * 32, b"keys", [(0, 0)], 30.0)
    named = [msgspec.structs.replace(plain, namespace=name) for name in ("aa", "bb")]
    for granted, asked in ((plain, named[0]), (named[0], named[1]), (named[0], plain)):
        raw = granter.grant(move_landing(granted, "a:1"))
        with (
            pytest.raises(CallNotGranted, match="for content"),
            grants.once(raw, move_landing(asked, "a:1")),
        ):
            raise AssertionError("the call is let in")
    for request in (plain, *named):
        with grants.once(granter.grant(move_landing(request, "a:1")), move_landing(request, "a:1")):
            pass


def test_used_grants_are_forgotten_when_they_hold_no_more(
    files: tuple[GrantFile, GrantFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    grants, granter = AgentGrants(files[1], agent="a:1", send_to=None), Granter(files[0])
    began_s = time.time()
    for later_s in range(0, 2000, 10):
        monkeypatch.setattr(time, "time", lambda now_s=began_s + later_s: now_s)
        with grants.once(granter.grant(WANTED), WANTED):
            pass
        assert len(grants._used) <= (GRANT_S + SKEW_S) / 10 + 1


def test_probes_go_without_a_grant_where_the_configuration_says(
    files: tuple[GrantFile, GrantFile],
) -> None:
    AgentGrants(files[1], agent="a:1", send_to=[Endpoint("b", 7100)]).require_for_probe(b"", PROBE)
    grants = AgentGrants(files[1], agent="a:1", send_to=None)
    with pytest.raises(CallNotGranted, match="b:7100 could be named in send_to"):
        grants.require_for_probe(b"", PROBE)
    grants.require_for_probe(Granter(files[0]).grant(PROBE), PROBE)
    more = msgspec.structs.replace(PROBE, nbytes=1001)
    with pytest.raises(CallNotGranted, match="1000 bytes at most, not 1001"):
        grants.require_for_probe(Granter(files[0]).grant(PROBE), more)
