"""Files with a mistake: what `prfaas region check`, `render` and `up` say is all a user has."""

from __future__ import annotations

from pathlib import Path

from golden import check
from prfaas_commands import EXAMPLES, refusals, said

FOLDER = Path(__file__).parent / "region_check"
SHARED = FOLDER.parent / "region_render" / "shared.yaml"
PREFILLS = (
    "profile: {prefill: {points: [{tokens: 1000, seconds: 1}, {tokens: 8000, seconds: 8}]}}\n"
)


def test_every_mistake_is_told_with_its_place_and_a_cure(tmp_path: Path) -> None:
    # What some of the files name.
    (tmp_path / "prefills.yaml").write_text(PREFILLS)
    (tmp_path / "wide").mkdir()
    (tmp_path / "wide" / "adapter_config.json").write_text('{"r": 20}')
    text = refusals(FOLDER / "cases.yaml", tmp_path)
    # Passwords and variables of engines.
    assert "hunter2" not in text
    assert "5.17" not in text
    check(FOLDER / "messages.txt", text)


def test_right_files_and_what_else_may_be_wrong(tmp_path: Path) -> None:
    model = ("--set", "MODEL=/models/tiny")
    commands = (
        (FOLDER / "base.yaml",),
        (EXAMPLES / "demo.yaml", *model),
        (EXAMPLES / "demo.yaml", *model, "--json"),
        (EXAMPLES / "two_hosts.yaml", *model),
        (EXAMPLES / "two_hosts.yaml", *model, "--json"),
        (EXAMPLES / "gateway_api.yaml",),
        (SHARED, "--json"),
        ("/nowhere/region.yaml",),
    )
    texts = [said(["region", "check", *map(str, words)]) for words in commands]
    # A folder that is not empty, and a region of one machine that does not run.
    (tmp_path / "file").touch()
    for options in (
        ("kubernetes.yaml", "--systemd", str(tmp_path)),
        ("kubernetes.yaml", "--kubernetes", str(tmp_path)),
        ("demo.yaml", "--prometheus", "/nowhere", *model),
    ):
        words = ["region", "render", str(EXAMPLES / options[0]), *options[1:]]
        texts.append(said(words, {str(tmp_path): "FOLDER"}))
    text = "\n".join(texts)
    assert "hunter2" not in text
    check(FOLDER / "files.txt", text)
