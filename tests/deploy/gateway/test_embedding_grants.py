"""Grants for moves of embeddings."""

from report_cases import cluster, instance

from deploy.gateway.grants import embedding_grant
from kvmanager.agent.grants import embedding_pull
from kvmanager.embedding_keys import embedding_key
from kvmanager.hashing import split_keys
from scheduler.reports import ClusterReport, EncodeReport

STAGE = EncodeReport()


class Signing:
    """Signs nothing, and remembers what it was asked to sign."""

    def __init__(self) -> None:
        self.granted: list[object] = []

    def grant(self, granted: object, _for_s: float) -> bytes:
        self.granted.append(granted)
        return b"signed"


def report(*encoders: str, encode: EncodeReport | None = STAGE) -> ClusterReport:
    instances = (instance(f"i{number}", encoder=one) for number, one in enumerate(encoders))
    return cluster("c", *instances, encode=encode)


def test_a_grant_is_for_the_media_at_all_encoders_of_the_cluster() -> None:
    granter = Signing()
    keys, grant = embedding_grant(granter, report("x", "x", "", "y"), ["a", "b"])  # type: ignore[arg-type]
    expected = sorted(embedding_key(encoder, name) for encoder in "xy" for name in "ab")
    assert list(split_keys(keys)) == expected
    assert grant == b"signed"
    assert granter.granted == [embedding_pull(expected)]


def test_nothing_is_signed_where_nothing_moves() -> None:
    granter = Signing()
    for args in (
        (None, report("x"), ["a"]),
        (granter, None, ["a"]),
        (granter, report("x", encode=None), ["a"]),
        (granter, report(""), ["a"]),
        (granter, report("x"), []),
    ):
        assert embedding_grant(*args) == (b"", b"")  # type: ignore[arg-type]
    assert not granter.granted
