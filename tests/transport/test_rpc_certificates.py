"""When a gRPC server is given certificates: gRPC frees those it has at once."""

from pathlib import Path

import pytest

from transport.errors import LocalError
from transport.rotating import PlainFiles, Rotating
from transport.rpc_auth import ReplacedCertificates


class Rig:
    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_text("first")
        self.now_s = 0.0
        self.pauses_s: list[float] = []
        files = Rotating(PlainFiles((path,)), lambda files: self._load())
        self.certificates = ReplacedCertificates(files, lambda: self.now_s, self.pauses_s.append)

    def _load(self) -> str:
        text = self.path.read_text()
        if text == "broken":
            raise LocalError("tls_files", "no certificate")
        return text


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path / "tls.crt")


def test_files_that_stay_the_same_are_given_once(rig: Rig) -> None:
    assert rig.certificates.given == "first"
    for rig.now_s in (0.0, 1.0, 2.0):
        assert rig.certificates.fetch() is None
    assert rig.pauses_s == []


def test_new_files_are_given_once_and_after_a_pause(rig: Rig) -> None:
    rig.path.write_text("the second")
    rig.now_s = 1.0
    assert rig.certificates.fetch() == "the second"
    assert rig.pauses_s == [pytest.approx(0.1)]
    for rig.now_s in (1.0, 2.0, 3.0):
        assert rig.certificates.fetch() is None
    assert len(rig.pauses_s) == 1


def test_files_that_cannot_be_used_are_not_given(rig: Rig) -> None:
    rig.path.write_text("broken")
    for rig.now_s in (1.0, 2.0):
        assert rig.certificates.fetch() is None
    assert rig.pauses_s == []
