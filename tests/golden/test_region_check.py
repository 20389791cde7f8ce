"""Files with a mistake: what `prfaas region check`, `render` and `up` say is all a user has."""

from __future__ import annotations

from pathlib import Path

from golden import check
from prfaas_commands import ROOT, refusals, said

FOLDER = Path(__file__).parent / "region_check"
EXAMPLES = ROOT / "deploy" / "region" / "examples"
PREFILLS = (
    "profile: {prefill: {points: [{tokens: 1000, seconds: 1}, {tokens: 8000, seconds: 8}]}}\n"
)


def test_every_mistake_is_told_with_its_place_and_a_cure(tmp_path: Path) -> None:
    # What some of the files name.
    (tmp_path / "prefills.yaml").write_text(PREFILLS)
    (tmp_path / "wide").mkdir()
    (tmp_path / "wide" / "adapter_config.json").write_text('{"r": 20}')
    check(FOLDER / "messages.txt", refusals(FOLDER / "cases.yaml", tmp_path))


def test_right_files_and_files_that_are_none() -> None:
    model = ("--set", "MODEL=/models/tiny")
    commands = (
        (FOLDER / "base.yaml",),
        (EXAMPLES / "demo.yaml", *model),
        (EXAMPLES / "demo.yaml", *model, "--json"),
        (EXAMPLES / "two_hosts.yaml", *model),
        (EXAMPLES / "two_hosts.yaml", *model, "--json"),
        (EXAMPLES / "gateway_api.yaml",),
        ("/nowhere/region.yaml",),
    )
    text = "\n".join(said(["region", "check", *map(str, words)]) for words in commands)
    check(FOLDER / "files.txt", text)
