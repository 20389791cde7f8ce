"""What a region becomes: units, charts, Prometheus' files, and what `prfaas up` would start.

It is done for every shipped example and for the corner files in the folder `region_render`. Golden
texts show a file that is much like another one by what differs; `folding` does that.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory
from textwrap import dedent
from typing import Any, Final

import pytest
import yaml
from folding import folded
from golden import check
from launched import PortsInOrder, launched
from prfaas_commands import EXAMPLES, ROOT, plain, ran, said

FOLDER: Final = Path(__file__).parent / "region_render"
SHIPPED: Final = ROOT / "deploy" / "observability"
NOT_REGIONS: Final = ("gateway_api", "values")
FILES: Final = {
    path.stem: path
    for path in sorted([*EXAMPLES.glob("*.yaml"), *FOLDER.glob("*.yaml")])
    if path.stem not in NOT_REGIONS
}
BASES: Final = {"systemd": "two_sites", "kubernetes": "kubernetes", "prometheus": "kubernetes"}
"""The region of each target whose files the others are compared with."""
OPTIONS: Final = {
    "systemd": ("--python", "/usr/bin/python3"),
    "kubernetes": (),
    "prometheus": ("--gateway-key", "/etc/prfaas/operator.key", "--docs", "https://docs.example"),
}
NAMED: Final = ("prfaas-{}", "prfaas/{}", "region {}", '"region": "{}"', '"{}-')
"""Where the name of a region is, in units and settings."""
RUNS_HERE: Final = ["demo", *(name for name, path in FILES.items() if path.parent == FOLDER)]
"""Regions whose hosts this machine can be."""
SETTINGS_HERE: Final = ("demo", "paced", "shared")
"""Those of them whose settings are shown as `prfaas up` writes them."""
_CHECKSUM: Final = re.compile(r"(?<=checksum/config: )[0-9a-f]{64}")
_SETTINGS: Final = re.compile(r"^  (\S+\.json): \|-\n((?:    .*\n)+)", re.MULTILINE)
_JSON_WORD: Final = re.compile(r"^.*\{\\?\".*$", re.MULTILINE)
_JSON_KEY: Final = re.compile(r", (?=\\?\")")
_OBJECT: Final = re.compile(r"^(?=\{\{- if )", re.MULTILINE)


def variables(region: str) -> list[str]:
    """The options that fill in what an example leaves to its user."""
    given = {"MODEL": "/models/chat"} if FILES[region].parent == EXAMPLES else {}
    if region == "two_hosts":
        given |= {"HOST_A": "10.0.0.1", "HOST_B": "10.1.0.1"}
    return [word for name, value in given.items() for word in ("--set", f"{name}={value}")]


@cache
def rendered(target: str, region: str, *more: str) -> tuple[str, dict[str, str]]:
    """What `prfaas region render` says, and the files that it writes, by name."""
    with TemporaryDirectory() as folder:
        out, names = Path(folder) / "out", {folder: "$TMP"}
        names[str(FILES[region].parent)] = "$HERE"
        name = yaml.safe_load(FILES[region].read_text(encoding="utf-8"))["name"]
        if target == "systemd":
            # So that regions of other names have the same files.
            names |= {form.format(name): form.format("$REGION") for form in NAMED}
        words = ["region", "render", str(FILES[region]), f"--{target}", str(out)]
        text = said([*words, *OPTIONS[target], *variables(region), *more], names)
        paths = sorted(path for path in out.rglob("*") if path.is_file())
        if target == "kubernetes" and paths:
            kustomization = out / "objects" / "kustomization.yaml"
            names[kustomization.read_text().partition("resources:\n")[2]] = "- <every file here>\n"
        # They may have passwords and tokens.
        assert not [path for path in paths if path.stat().st_mode & 0o077]
        files = {str(path.relative_to(out)): path.read_text(encoding="utf-8") for path in paths}
        # Every user may read units.
        assert not [name for name in files if ".service" in name and "hunter2" in files[name]]
    parts = (
        part
        for name, text in files.items()
        for part in divided(plain(name, names), plain(text, names))
    )
    return text, dict(parts)


def divided(name: str, text: str) -> Iterator[tuple[str, str]]:
    """A file's parts that are worth a comparison of their own, by name."""
    file, text = PurePath(name), _CHECKSUM.sub("<digest>", text)
    if name == "chart/values.schema.json":
        yield name, "\n".join(lines_of_schema(json.loads(text)))
    elif name.endswith(".service"):
        # A word of a command a line.
        yield name, apart(text.replace('" "', '"\n  "'))
    elif name.startswith(("chart/templates/", "objects/")) and name.endswith(".yaml"):
        objects = [each for each in _OBJECT.split(text) if each]
        for number, each in enumerate(objects, 1):
            part = f"{file.stem} {number}.yaml" if file.parent.name == "templates" else name
            yield part, apart(_SETTINGS.sub(r"  \1: <below>\n", each))
            for settings in _SETTINGS.finditer(each):
                yield f"{part} {settings[1]}", dedent(settings[2])
    else:
        yield name, text


def apart(text: str) -> str:
    """The text with each key of JSON in a word of a command on a line of its own."""
    return _JSON_WORD.sub(lambda line: _JSON_KEY.sub(",\n    ", line[0]), text)


def lines_of_schema(schema: dict[str, Any]) -> Iterator[str]:
    """A line for each key of values, without what only explains it."""
    for name, kind in [*schema.pop("$defs").items(), ("", schema)]:
        properties = kind.pop("properties", {})
        places = {name: kind} | {f"{name}.{key}": value for key, value in properties.items()}
        for place, keys in places.items():
            keys = {key: keys[key] for key in keys if key not in ("title", "description")}
            yield f"{place}: {json.dumps(keys)}"


def compared(target: str, region: str, *more: str) -> str:
    """The golden text of a region."""
    text, files = rendered(target, region, *more)
    if target == "kubernetes" and (region != BASES[target] or more):
        # Its objects are the templates filled in.
        files = {name: file for name, file in files.items() if "/" in name}
    known: dict[str, str] = {}
    if target == "prometheus":
        paths = [SHIPPED / "alerts.yaml", *(SHIPPED / "dashboards").iterdir()]
        known = {str(path.relative_to(ROOT)): plain(path.read_text()) for path in sorted(paths)}
    base = BASES[target]
    if region != base or more:
        _, others = rendered(target, base)
        known |= {f"{base}: {name}": text for name, text in others.items()}
    if target == "kubernetes":
        # Processes have much the same settings as under systemd.
        _, units = rendered("systemd", region)
        known |= {f"systemd: {name}": text for name, text in units.items()}
    return f"{text}\n{folded(files, known)}"


@pytest.mark.parametrize("region", FILES)
@pytest.mark.parametrize("target", BASES)
def test_what_runs_and_watches_a_region(target: str, region: str) -> None:
    check(FOLDER / f"{region}.{target}.txt", compared(target, region))


ONE: Final = {
    "two_sites.host.systemd": ("--node", "b1", "--user", "vllm", "--config", "/opt/prfaas"),
    "two_sites.host.prometheus": ("--node", "a1"),
    "kubernetes.site.kubernetes": ("--site", "pd-b", "--values", str(FOLDER / "values.yaml")),
}
"""Options for one host or one site, by golden file."""


@pytest.mark.parametrize("name", ONE)
def test_options_for_one_host_and_one_site(name: str) -> None:
    region, _, target = name.split(".")
    check(FOLDER / f"{name}.txt", compared(target, region, *ONE[name]))


def test_nodes_of_one_host_are_rendered_together_whichever_is_named() -> None:
    _, first = rendered("systemd", "trusted", "--node", "a1")
    _, second = rendered("systemd", "trusted", "--node", "a2")
    assert first == second


@cache
def started(region: str) -> dict[str, str]:
    """How `prfaas up` starts each process, and the files that they read."""
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        here = Path(folder)
        for name in ("model", "nixl"):
            (here / name).mkdir()
        (here / "nixl" / "__init__.py").touch()
        patched.syspath_prepend(folder)
        # Texts are in the order of ports, whichever are taken here.
        patched.setattr("deploy.region.launch.ports.random", PortsInOrder())
        patched.setattr("deploy.region.launch.launcher.taken_ports", lambda *_: [])
        patched.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
        # A port that the file says may be taken here.
        text = FILES[region].read_text(encoding="utf-8").replace("port: 8000", "port: 0")
        file, keys = here / "region.yaml", here / "keys"
        file.write_text(text)
        given = dict.fromkeys(("HOST_A", "HOST_B", "HOST_C"), "127.0.0.1")
        given |= {"ANY": "0.0.0.0", "PORT": "0", "ADMIN": "0", "MODEL": str(here / "model")}
        words = [word for name, value in given.items() for word in ("--set", f"{name}={value}")]
        status, output = ran(["certs", "init", str(keys), str(file), *words])
        assert status == 0, output
        # The host of the gateway has all keys.
        owners = [*keys.glob("*/granting.key"), *keys.glob("*/engine.key")]
        given["KEYS"] = str(owners[0].parent)
        files = launched(file, given, here / "run")
        names = {given["KEYS"]: "$HERE/keys", folder: "$TMP"}
        return {name: apart(plain(text, names)) for name, text in files.items()}


@pytest.mark.parametrize("region", RUNS_HERE)
def test_commands_and_settings_of_every_process(region: str) -> None:
    known: dict[str, str] = {}
    if region != "demo":
        known = {f"demo: {name}": text for name, text in started("demo").items()}
        _, units = rendered("systemd", region)
        known |= {f"systemd: {name}": text for name, text in units.items()}
    # Settings of other regions differ from those of units as they do in these.
    files = {
        name: text
        for name, text in started(region).items()
        if region in SETTINGS_HERE or not name.endswith(".json")
    }
    check(FOLDER / f"{region}.up.txt", folded(files, known))


def test_no_text_is_left_over() -> None:
    expected = {f"{region}.{target}.txt" for region in FILES for target in BASES}
    expected |= {f"{region}.up.txt" for region in RUNS_HERE}
    expected |= {f"{name}.txt" for name in ONE}
    assert {path.name for path in FOLDER.glob("*.txt")} <= expected
