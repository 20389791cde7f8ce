"""`prfaas region`: looks at region files, and hands one that changed to the region that runs.

It also has what all commands that take a region file share. It starts nothing.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from deploy.command_line import JsonOption, RunDirOption, command_group, fail, print_json
from deploy.region.spec.loading import load_region
from deploy.region.spec.region import RegionSpec, region_schema
from kvmanager.config_files.problems import FileError

region_app = command_group("Check region files, print their schema, reload one that changed.")

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="region file, YAML")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="fill ${NAME} in the file; repeatable"),
]


@region_app.command("schema")
def schema_command() -> None:
    """Print the JSON Schema of region files, for editors.

    \b
    prfaas region schema > region.schema.json
    and as the first line of a region file:
    # yaml-language-server: $schema=region.schema.json
    """
    typer.echo(json.dumps(region_schema(), indent=2))


@region_app.command("check")
def check_command(
    file: FileArgument, variables: SetOption = None, as_json: JsonOption = False
) -> None:
    """Check a region file; every problem with its line, its path and what to write instead.

    \b
    prfaas region check region.yaml --set MODEL=/models/qwen3-next
    """
    try:
        region = load_region(file, dict(os.environ) | _variables(variables or []))
    except FileError as error:
        if not as_json:
            fail(str(error), 2)
        problems = [
            {"path": item.where, "line": item.line, "message": item.message}
            for item in error.problems
        ]
        print_json({"ok": False, "file": str(file), "problems": problems})
        raise typer.Exit(2) from error
    if as_json:
        document = region.model_dump(mode="json", by_alias=True, exclude_none=True)
        print_json({"ok": True, "file": str(file), "region": document})
        return
    engines = sum(len(cluster.instances) for cluster in region.clusters)
    names = ", ".join(f"{cluster.name} ({cluster.kind})" for cluster in region.clusters)
    typer.echo(f"{file} is right: region {region.name}, clusters {names}, {engines} engines")


@region_app.command("reload")
def reload_command(
    file: FileArgument,
    run_dir: RunDirOption = None,
    variables: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Hand a changed region file to the region that runs: limits and rights of tenants.

    These are operators, priority_tenants and shared_caches of the gateway, and default_tenant and
    tenants of gateway.scheduling.admission. What else changed is named; it needs `prfaas down` and
    `prfaas up`.

    \b
    prfaas region reload region.yaml --set MODEL=/models/qwen3-next
    """
    wanted = load_or_exit(file, variables or [])
    from deploy.region.launch.reload import reload_region
    from deploy.region.launch.rundir import find_run

    root, _ = find_run(run_dir, wanted.name)
    try:
        changes = reload_region(root, wanted)
    except FileError as error:
        fail(str(error), 2)
    except OSError as error:
        fail(str(error), 1)
    if as_json:
        print_json(changes)
        return
    typer.echo(f"the gateway gets: {', '.join(changes.made) or 'nothing new'}")
    if changes.needs_restart:
        typer.echo(f"changed, but needs a restart: {', '.join(changes.needs_restart)}", err=True)


def load_or_exit(file: Path, variables: list[str]) -> RegionSpec:
    """The region. On problems, prints all of them on stderr and exits with status 2."""
    try:
        return load_region(file, dict(os.environ) | _variables(variables))
    except FileError as error:
        fail(str(error), 2)


def _variables(words: list[str]) -> dict[str, str]:
    pairs = [word.partition("=") for word in words]
    for name, equals, _ in pairs:
        if not equals:
            raise typer.BadParameter(f"{name!r} is not NAME=VALUE", param_hint="--set")
    return {name: value for name, _, value in pairs}
