"""`prfaas region`: what follows from region files; it hands one that changed to its running region.

It also has what commands share that take a region file. It starts nothing.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from deploy.command_line import JsonOption, RunDirOption, command_group, fail, print_json
from deploy.region.spec.loading import load_region
from deploy.region.spec.region import RegionSpec, region_schema
from kvmanager.config_files.fields import SHOWN
from kvmanager.config_files.problems import FileError
from kvmanager.private_files import make_new_directory, make_private_directory, write_private

region_app = command_group("Region files: check, compare, reload, render; schema.")

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="region file, YAML")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="fill ${NAME} in the file; repeatable"),
]
SiteOption = Annotated[
    str | None, typer.Option(metavar="CLUSTER", help="only this cluster's nodes")
]
NodeOption = Annotated[str | None, typer.Option(metavar="NODE", help="only this node")]


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
        document = region.model_dump(mode="json", by_alias=True, exclude_none=True, context=SHOWN)
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
    site: SiteOption = None,
    node: NodeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Hand a changed region file to the region that runs: limits, rights and homes of tenants.

    These are operators, priority_tenants, shared_caches, home, homes, max_in_flight, max_uploads_*
    and max_*buffered_bytes of the gateway, and default_tenant and tenants of
    gateway.scheduling.admission. What else changed is named; it needs `prfaas down` and `prfaas
    up`. With --node or --site, the gateway must be in that part of the region.

    \b
    prfaas region reload region.yaml --set MODEL=/models/qwen3-next
    prfaas region reload region.yaml --node b1
    """
    wanted = load_or_exit(file, variables or [])
    from deploy.region.launch.parts import part_of, run_name
    from deploy.region.launch.reload import reload_region
    from deploy.region.launch.rundir import find_run

    part = part_of(wanted, site=site, node=node)
    if not part.has_gateway:
        names = ", ".join(node.name for node in wanted.gateway_nodes)
        fail(f"the gateway runs on the host of node {names}, not here", 2)
    root, _ = find_run(run_dir, run_name(wanted, part))
    try:
        changes = reload_region(root, wanted, part)
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


@region_app.command("diff")
def diff_command(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="the file that runs")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="the file that is wanted")],
    variables: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say which processes a change of a region file would start, stop and restart, and why.

    It compares what each process is told. Files that the region file names, such as keys and
    certificates, are not compared.

    \b
    prfaas region diff region.yaml region-new.yaml
    """
    before, after = (load_or_exit(file, variables or []) for file in (old, new))
    from deploy.region.diff import changes

    found = changes(before, after)
    if as_json:
        print_json({"changes": found})
        return
    for item in found:
        why = f": {', '.join(item.settings)}" if item.settings else ""
        typer.echo(f"{item.what} {item.process} ({item.kind}, node {item.node}){why}")
    if not found:
        typer.echo("no process changes")


@region_app.command("render")
def render_command(
    file: FileArgument,
    systemd: Annotated[
        Path | None, typer.Option(metavar="DIR", help="write systemd units below DIR")
    ] = None,
    kubernetes: Annotated[
        Path | None, typer.Option(metavar="DIR", help="write a Helm chart and objects below DIR")
    ] = None,
    prometheus: Annotated[
        Path | None, typer.Option(metavar="DIR", help="write what Prometheus and Grafana read")
    ] = None,
    variables: SetOption = None,
    site: SiteOption = None,
    node: NodeOption = None,
    config: Annotated[
        Path | None, typer.Option(help="where the files will be; default: /etc/prfaas/REGION")
    ] = None,
    user: Annotated[str, typer.Option(help="user of the services")] = "prfaas",
    python: Annotated[str, typer.Option(help="the interpreter on the hosts")] = sys.executable,
    values: Annotated[
        Path | None, typer.Option(metavar="FILE", help="values of the chart, for the objects")
    ] = None,
    run_dir: RunDirOption = None,
    gateway_key: Annotated[
        Path | None, typer.Option(help="file with an operator's API key, for Prometheus")
    ] = None,
    docs: Annotated[str, typer.Option(help="URL of the documentation, for alerts")] = "",
) -> None:
    """Write what runs a region instead of `prfaas up`, systemd units or a Helm chart, or what
    Prometheus needs to watch it.

    DIR must be empty or missing. With --systemd it gets a folder for each host with a unit for each
    process and the files that they read; with --node or --site for the hosts of these nodes, with
    whatever else is there. Keys, certificates and models are used where the region
    file says; as relative paths start at the file, write whole paths where hosts keep them
    elsewhere. Variables for all services, such as API keys, may be in the file `environment` beside
    the others.

    With --kubernetes it gets the folder `chart`, a Helm chart of the region with a file of values
    for each cluster, and the folder `objects`, the same objects for `kubectl apply -k`; these are
    those of --site CLUSTER, with the values of --values FILE.

    With --prometheus it gets prometheus.yml, the alert rules, and Grafana's dashboards. A region
    that runs on one machine must be up, since its run chooses ports and keys. Prometheus reads the
    keys and certificates that prometheus.yml names.

    \b
    prfaas region render region.yaml --systemd units
    prfaas region render region.yaml --systemd units --node a1 --user vllm
    prfaas region render region.yaml --kubernetes out --site pd-b
    prfaas region render region.yaml --prometheus watch --gateway-key /etc/prfaas/operator.key
    """
    if sum(wanted is not None for wanted in (systemd, kubernetes, prometheus)) != 1:
        fail("give --systemd DIR, --kubernetes DIR or --prometheus DIR", 2)
    region = load_or_exit(file, variables or [])
    if kubernetes is not None:
        from deploy.region.kubernetes.cli import write_chart

        if node is not None:
            fail("--kubernetes has objects of a whole cluster: give --site instead of --node", 2)
        write_chart(region, kubernetes, site=site, values=values)
        return
    if prometheus is not None:
        from deploy.region.launch.watching import watched_region

        try:
            watched = watched_region(region, site=site, node=node, run_dir=run_dir)
            files = watched.files(gateway_key, docs)
            make_new_directory(prometheus)
            _write(prometheus, files)
        except FileError as error:
            fail(str(FileError(str(file), error.problems)), 2)
        except OSError as error:
            fail(str(error), 1)
        typer.echo(f"start: prometheus --config.file={prometheus}/prometheus.yml")
        typer.echo(f"Grafana: import the files of {prometheus}/dashboards")
        return
    assert systemd is not None
    from deploy.region.certs import hosts_of
    from deploy.region.launch.parts import part_of, spread_problems
    from deploy.region.launch.systemd_units import HostPaths, rendered, target_name

    if problems := spread_problems(region):
        fail(str(FileError(str(file), problems)), 2)
    wanted = set(part_of(region, site=site, node=node).nodes)
    paths = HostPaths((config or Path("/etc/prfaas") / region.name).absolute(), user, python)
    try:
        make_new_directory(systemd)
        for host in hosts_of(region):
            # All nodes of a host together: they share its GPUs and the target of its units.
            if not wanted.isdisjoint(host.nodes):
                folder = systemd / host.folder
                _write(folder, rendered(region, host.nodes, paths))
                typer.echo(
                    f"host {host.addresses[0]}: copy {folder}/config/. to "
                    f"{paths.config}, {folder}/systemd/. to /etc/systemd/system"
                )
    except OSError as error:
        fail(str(error), 1)
    typer.echo(f"then: systemctl daemon-reload && systemctl enable --now {target_name(region)}")


def _write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        make_private_directory(path.parent)
        write_private(path, text.encode())


def load_or_exit(file: Path, variables: list[str]) -> RegionSpec:
    """The region. On problems, prints all of them on stderr and exits with status 2."""
    try:
        return load_variables(file, variables)
    except FileError as error:
        fail(str(error), 2)


def load_variables(file: Path, variables: list[str]) -> RegionSpec:
    """The region, with `${NAME}` filled in from `variables`, else the environment. FileError."""
    return load_region(file, dict(os.environ) | _variables(variables))


def _variables(words: list[str]) -> dict[str, str]:
    pairs = [word.partition("=") for word in words]
    for name, equals, _ in pairs:
        if not equals:
            raise typer.BadParameter(f"{name!r} is not NAME=VALUE", param_hint="--set")
    return {name: value for name, _, value in pairs}
