"""`prfaas region reload`: which files of a running region it writes, and which it leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploy.gateway.file import load_gateway_file
from deploy.region.launch.plan import Planner
from deploy.region.launch.ports import resolve_ports
from deploy.region.launch.process_files import region_text
from deploy.region.launch.reload import reload_region
from deploy.region.launch.rundir import RunDirectory
from deploy.region.spec.loading import load_region
from deploy.region.spec.region import RegionSpec
from kvmanager.config_files.problems import FileError

EXAMPLE = Path(__file__).parents[3] / "deploy" / "region" / "examples" / "demo.yaml"
LIMITS = "scheduling: {admission: {tenants: {acme: {max_requests: 4}}}}"


def region(folder: Path, *gateway: str, port: int = 0, rtt: str = "20ms") -> RegionSpec:
    lines = "".join(f"\n  {line}" for line in ("api_keys_file: keys", *gateway))
    text = EXAMPLE.read_text().replace("port: 8000", f"port: {port}{lines}")
    path = folder / "region.yaml"
    path.write_text(text.replace("rtt: 20ms", f"rtt: {rtt}"))
    return load_region(path, {"MODEL": str(folder)})


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """The directory of a region without limits, as its launcher wrote it."""
    (tmp_path / "keys").write_text("acme one\nops two\n")
    root = tmp_path / "run"
    root.mkdir()
    directory = RunDirectory(root, Path("sockets"))  # none is made, and a long path is refused
    wanted = region(tmp_path)
    planner = Planner(resolve_ports(wanted), directory, {})
    for path, text in (planner.files() | {directory.wanted_file: region_text(wanted)}).items():
        path.write_text(text)
    return directory


def test_limits_and_rights_reach_the_gateway_and_ports_stay(
    run: RunDirectory, tmp_path: Path
) -> None:
    before = load_gateway_file(run.gateway_file)
    changes = reload_region(run.root, region(tmp_path, "operators: [ops]", LIMITS))
    assert changes.made == ("gateway.operators", "gateway.scheduling.admission.tenants")
    assert changes.needs_restart == ()
    after = load_gateway_file(run.gateway_file)
    assert after.gateway.operators == ("ops",)
    assert after.gateway.scheduling.admission.tenants["acme"].max_requests == 4
    assert after.gateway.port == before.gateway.port != 0
    assert (after.pd, after.prefill) == (before.pd, before.prefill)
    for path in (run.gateway_file, run.region_file, run.wanted_file):
        assert path.stat().st_mode & 0o777 == 0o600
        assert "api_keys" not in json.loads(path.read_text())["gateway"]
    again = reload_region(run.root, region(tmp_path, "operators: [ops]", LIMITS))
    assert (again.made, again.needs_restart) == ((), ())
    back = reload_region(run.root, region(tmp_path))
    assert back.made == changes.made
    assert load_gateway_file(run.gateway_file) == before


def test_what_needs_a_restart_is_named_until_there_is_one(
    run: RunDirectory, tmp_path: Path
) -> None:
    wanted = region(tmp_path, "operators: [ops]", "max_body_bytes: 1MiB", port=8123, rtt="30ms")
    for made in (("gateway.operators",), ()):
        changes = reload_region(run.root, wanted)
        assert changes.made == made
        assert set(changes.needs_restart) == {"gateway.port", "gateway.max_body_bytes", "links"}
    assert load_gateway_file(run.gateway_file).gateway.port != 8123


def test_what_the_gateway_would_not_take_is_not_written(run: RunDirectory, tmp_path: Path) -> None:
    before = run.gateway_file.read_bytes()
    with pytest.raises(FileError, match="no API key has the name 'opps'"):
        reload_region(run.root, region(tmp_path, "operators: [opps]"))
    (tmp_path / "keys").unlink()
    with pytest.raises(FileError, match="No such file"):
        reload_region(run.root, region(tmp_path, "operators: [ops]"))
    assert run.gateway_file.read_bytes() == before
