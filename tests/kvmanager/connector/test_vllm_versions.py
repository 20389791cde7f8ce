"""What the connector uses of vLLM is in every version it was written for; how that is read."""

import tomllib
import zipfile
from itertools import pairwise
from pathlib import Path

import pytest
from vllm_trees import source_tree

from kvmanager.vllm_connector.versions import __main__ as command
from kvmanager.vllm_connector.versions import interface
from kvmanager.vllm_connector.versions.check import (
    OWN_CLASSES,
    Differences,
    UnsupportedVllmError,
    compare,
    lost_members,
    nearest,
    own_classes,
    verdict,
)
from kvmanager.vllm_connector.versions.interface import (
    OWN_ROOT,
    Interface,
    derived_classes,
    installed_root,
    known_interfaces,
    rendered,
    used_names,
    used_words,
)
from kvmanager.vllm_connector.versions.sources import Method, Name, Sources

KNOWN = known_interfaces()
REGENERATE = "run `python -m kvmanager.vllm_connector.versions` as docs/support.md says"
BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: known.version)
def test_the_connector_fits_each_version_it_was_written_for(known: Interface) -> None:
    assert [name for name in used_names() if name not in known.names] == [], REGENERATE
    assert compare(known.names, known.names, own_classes()) == Differences()


def test_a_newer_known_version_has_all_that_is_used_of_the_older() -> None:
    assert [known.minor for known in KNOWN] == [(0, 32), (0, 33)]
    for older, newer in pairwise(KNOWN):
        assert list(lost_members(older, newer, used_words())) == []


def test_the_file_of_the_installed_version_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--check"]) == 0, f"{capsys.readouterr().out}\n{REGENERATE}"


def test_pip_installs_a_version_that_the_connector_was_written_for() -> None:
    project = tomllib.loads((OWN_ROOT / "pyproject.toml").read_text())["project"]
    (extra,) = project["optional-dependencies"]["engine"]
    with pytest.raises(UnsupportedVllmError, match=f"install {extra}, or"):
        verdict("1.0", KNOWN, Differences(("B.do is gone",)))


def test_no_class_that_derives_from_vllm_is_left_out() -> None:
    assert set(derived_classes()) == set(OWN_CLASSES)
    assert len(own_classes()) == len(OWN_CLASSES)


def test_what_0_33_added_is_told_to_a_connector_of_0_32() -> None:
    """The hooks of sleep mode, one of which claims what the connector cannot do."""
    without = [Name("class", bases=name.bases) for name in own_classes()]
    changes = compare(KNOWN[0].names, KNOWN[1].names, without).changes
    base = "KVConnectorBase_V1"
    assert f"{base}.supports_sleep_mode (cls, kv_transfer_config) is new, and returns True" in (
        changes
    )
    assert f"{base}.unregister_kv_caches (self) is new" in changes


def test_lost_members_are_those_whose_words_the_code_has() -> None:
    before = Interface("1.0", {"v.A": Name("class", members=("a", "b", "c")), "v.f": Name("value")})
    after = Interface("1.1", {"v.A": Name("class", members=("c",))})
    assert list(lost_members(before, after, {"a", "c"})) == ["v.A.a", "v.f"]


# Sources.

MODULES = {
    "lib/__init__.py": "from .parts import *\nfrom .kinds import Kind as Sort",
    "lib/version.py": "try:\n from ._version import __version__\nexcept Exception:\n"
    ' __version__ = "dev"',
    "lib/_version.py": "__version__: str\n__version__ = version = '1.2.3'",
    "lib/parts.py": "from lib.kinds import Base\ndef f(a: int, /, b=1, *c, d: str, e=2, **g): ...",
    "lib/kinds.py": '''
from typing import TYPE_CHECKING, overload
from elsewhere import Other
if TYPE_CHECKING:
    from lib.parts import f as typed
@overload
def g(a: int): ...
def g(a, b=()): ...
class Base:
    shared: int = 0
    _hidden = 1
    def __init__(self, x):
        self.x = x
    def keeps(self):
        """Text."""
        return
    @property
    def big(self): return True
class Kind(Base, Other):
    y: str
    @classmethod
    def made(cls): return Kind([])
    @abstractmethod
    def must(self, a, *, b=None): pass
''',
}


def test_a_wheel_and_a_directory_are_read_alike(tmp_path: Path) -> None:
    root = source_tree(tmp_path / "tree", MODULES)
    wheel = tmp_path / "lib.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in MODULES.items():
            archive.writestr(name, text)
    for place in (root, wheel):
        sources = Sources(place)
        assert sources.name("lib.f") == Name("function", "a, /, b=..., *c, d, e=..., **g")
        assert sources.name("lib.kinds.typed") == sources.name("lib.f")
        assert sources.name("lib.kinds.g") == Name("function", "a, b=...")
        assert sources.name("lib.version.__version__") == Name("value")
        assert sources.name("lib.Sort") == Name(
            "class",
            bases=("elsewhere.Other",),
            members=("big", "keeps", "made", "must", "shared", "x", "y"),
        )
        methods = {
            "__init__": Method("self, x", returns="..."),
            "keeps": Method("self"),
            "big": Method("self", "property", "True"),
            "made": Method("cls", "classmethod", "..."),
            "must": Method("self, a, *, b=...", abstract=True),
        }
        assert sources.name("lib.Sort", with_methods=True) == Name(
            "class",
            bases=("elsewhere.Other",),
            members=("_hidden", "shared", "x", "y"),
            methods=methods,
        )
        for missing in ("lib.nothing", "lib.Other", "nowhere.f"):
            assert sources.name(missing) is None


def test_the_version_is_the_one_that_the_build_wrote(tmp_path: Path) -> None:
    modules = {name.replace("lib/", "vllm/"): text for name, text in MODULES.items()}
    assert Sources(source_tree(tmp_path / "built", modules)).version() == "1.2.3"
    del modules["vllm/_version.py"]
    assert Sources(source_tree(tmp_path / "checkout", modules)).version() == "dev"


def test_a_version_that_lacks_what_is_used_is_written_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    modules = {name.replace("lib/", "vllm/"): text for name, text in MODULES.items()}
    root = source_tree(tmp_path / "tree", modules)
    monkeypatch.setattr(interface, "FILES", tmp_path)
    (tmp_path / "vllm_0_33.json").write_text(rendered(KNOWN[1]))
    assert command.main([str(root)]) == 1
    out = capsys.readouterr().out
    assert (tmp_path / "vllm_1_2.json").is_file()
    assert "vLLM 1.2.3 has no vllm.config.VllmConfig\n" in out
    assert f"vLLM 1.2.3, not as 0.33.0: {BASE}.KVConnectorBase_V1 is gone\n" in out


def test_a_file_that_is_not_current_is_shown_as_a_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(interface, "FILES", tmp_path)
    installed = nearest(KNOWN, Sources(installed_root()).version())
    text = rendered(installed).replace('"self, forward_context, **kwargs"', '"self, old"')
    interface.file_of(installed).write_text(text)
    assert command.main(["--check"]) == 1
    out = capsys.readouterr().out
    assert '-    "start_load_kv": { "parameters": "self, old"' in out
    assert '+    "start_load_kv": { "parameters": "self, forward_context, **kwargs"' in out
