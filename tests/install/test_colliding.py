"""The packages of the project are told from others of the same name, whichever came first."""

from __future__ import annotations

import base64
import hashlib
import os
import sys
import zipfile
from pathlib import Path

import pytest
from built_wheel import ROOT, VERSION, Installed, run

from prfaas.own_packages import foreign_packages

AGAIN = f"pip install --no-deps --force-reinstall prfaas=={VERSION}"
APART = "Install prfaas into a virtual environment of its own"
SHARED = ("scheduler/__init__.py", "scheduler/job.py")
ENTRIES = (
    ("bin/prfaas", "version"),
    *(
        ("bin/prfaas", command, "--help")
        for command in ("gateway", "prefill", "pd", "agent", "directory", "up")
    ),
    # What `prfaas up` and systemd start, and what vLLM loads.
    ("bin/python", "-P", "-m", "deploy.cli", "agent", "--help"),
    ("bin/python", "-P", "-c", "import kvmanager.vllm_connector.connector"),
)


def test_the_checkout_is_its_own() -> None:
    assert foreign_packages(ROOT) == ([], [])


def test_a_package_that_hides_ours_is_named(tmp_path: Path) -> None:
    hiding = tmp_path / "scheduler"
    hiding.mkdir()
    (hiding / "__init__.py").touch()
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    named = f"Python imports 'scheduler' from {hiding} instead of {ROOT / 'scheduler'}.\n{APART}"
    code = "from prfaas.own_packages import main; main()"
    done = run(sys.executable, "-P", "-c", code, PYTHONPATH=path)
    assert done.returncode == 2
    assert named in done.stderr
    code = "import kvmanager.vllm_connector.connector"
    done = run(sys.executable, "-P", "-c", code, PYTHONPATH=path)
    assert done.returncode == 1
    assert f"ForeignPackagesError: {named}" in done.stderr


def colliding_wheel(directory: Path, *files: str, text: str = "# of somebody else\n") -> Path:
    """A distribution `scheduler` 9.1 with these files."""
    directory.mkdir(exist_ok=True)
    path = directory / "scheduler-9.1-py3-none-any.whl"
    contents = dict.fromkeys(files, text)
    contents["scheduler-9.1.dist-info/METADATA"] = (
        "Metadata-Version: 2.1\nName: scheduler\nVersion: 9.1\n"
    )
    contents["scheduler-9.1.dist-info/WHEEL"] = (
        "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    record = "scheduler-9.1.dist-info/RECORD"
    lines = [f"{record},,"]
    for name, content in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content.encode()).digest()).rstrip(b"=")
        lines.append(f"{name},sha256={digest.decode()},{len(content)}")
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
        archive.writestr(record, "\n".join(lines) + "\n")
    return path


def test_every_process_names_a_distribution_that_overwrote_files(
    empty: Installed, wheel: Path, tmp_path: Path
) -> None:
    empty.install(wheel, colliding_wheel(tmp_path / "other", *SHARED))
    for program, *words in ENTRIES:
        done = run(empty.directory / program, *words)
        assert done.returncode == (1 if "-c" in words else 2), (words, done.stderr)
        assert done.stderr.endswith(
            "scheduler 9.1 has overwritten files of prfaas: scheduler/__init__.py.\n"
            f"{APART}, or mend this one: pip uninstall scheduler; {AGAIN}\n"
        )


def test_what_the_message_says_mends_it(empty: Installed, wheel: Path, tmp_path: Path) -> None:
    empty.install(wheel, colliding_wheel(tmp_path / "other", *SHARED))
    empty.pip("uninstall", "--yes", "scheduler")
    done = empty.prfaas("version")
    assert done.returncode == 2
    assert "Files of prfaas are missing from" in done.stderr
    assert "scheduler/__init__.py" in done.stderr
    assert done.stderr.endswith(f"{APART}, or mend this one: {AGAIN}\n")
    empty.pip("install", "--no-deps", "--no-index", "--no-compile", "--force-reinstall", wheel)
    done = empty.prfaas("version")
    assert (done.returncode, done.stderr) == (0, "")


def test_every_process_warns_of_a_distribution_whose_files_prfaas_has_overwritten(
    empty: Installed, wheel: Path, tmp_path: Path
) -> None:
    empty.install(colliding_wheel(tmp_path / "other", *SHARED), wheel)
    # Each of these starts reads the records of all distributions: one of each way to start.
    for program, *words in (ENTRIES[0], ENTRIES[-2]):
        done = run(empty.directory / program, *words)
        assert done.returncode == 0, (words, done.stderr)
        assert done.stderr == (
            "prfaas has overwritten files of scheduler 9.1: scheduler/__init__.py. Removing or "
            "upgrading it breaks prfaas, and it may not work itself. "
            f"{APART}, or mend this one: pip uninstall scheduler; {AGAIN}\n"
        )


@pytest.mark.parametrize("first", [True, False])
def test_files_of_others_that_overwrite_nothing_are_left_alone(
    empty: Installed, wheel: Path, tmp_path: Path, first: bool
) -> None:
    other = colliding_wheel(tmp_path / "other", "scheduler/job.py")
    empty.install(*([other, wheel] if first else [wheel, other]))
    done = empty.prfaas("version")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_file_of_the_same_size_is_told_by_its_time(
    empty: Installed, wheel: Path, tmp_path: Path
) -> None:
    empty.install(wheel)
    name = "transport/versions.py"
    text = "#" * (empty.site_packages / name).stat().st_size
    empty.install(colliding_wheel(tmp_path / "other", name, text=text))
    done = empty.prfaas("version")
    assert done.returncode == 2
    assert f"scheduler 9.1 has overwritten files of prfaas: {name}.\n" in done.stderr


def test_a_file_that_was_edited_by_hand_is_left_alone(empty: Installed, wheel: Path) -> None:
    empty.install(wheel)
    edited = empty.site_packages / "scheduler" / "__init__.py"
    edited.write_text(edited.read_text() + "# edited\n")
    done = empty.prfaas("version")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_start_reads_no_file_of_the_packages(environment: Installed) -> None:
    """What makes the check cheap: an installation that nobody touched is judged by sizes."""
    code = (
        "import sys, hashlib; from pathlib import Path; from prfaas import own_packages as own;"
        "own._has_digest = own._owners = None;"
        f"print(own.foreign_packages(Path({str(environment.site_packages.resolve())!r})))"
    )
    done = run(environment.python, "-P", "-c", code)
    assert (done.stdout, done.stderr) == ("Findings(problems=[], warnings=[])\n", "")
