"""`prfaas certs`: makes the keys and certificates of a region, and says what goes where."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.command_line import JsonOption, command_group, fail, print_json
from deploy.region.file_cli import FileArgument, SetOption, load_or_exit

if TYPE_CHECKING:
    from deploy.region.certs import Host
    from deploy.region.spec.region import RegionSpec

certs_app = command_group("Make the keys and certificates of a region on several hosts.")

DirectoryArgument = Annotated[
    Path, typer.Argument(metavar="DIR", help="directory for the files; must be empty or missing")
]
DaysOption = Annotated[
    int, typer.Option(min=1, max=3650, help="how long the hosts' certificates hold")
]


@certs_app.command("init")
def init_command(
    directory: DirectoryArgument,
    file: FileArgument,
    variables: SetOption = None,
    days: DaysOption = 365,
    as_json: JsonOption = False,
) -> None:
    """Make a region's certificate authority, a certificate for each host, and the shared keys.

    DIR gets a folder for each host with all files that `prfaas up --node` or --site reads there.
    Which files these are follows from `security` in the region file: certificates, unless it has
    `region_key`; then the key of the region. Keep DIR/ca.key off the hosts. Where you have a public
    key infrastructure already, let it issue the certificates (docs/security.md).

    \b
    prfaas certs init keys region.yaml
    scp -r keys/a1/. a1.example:/etc/prfaas/keys/
    """
    region = load_or_exit(file, variables or [])
    from deploy.region.certs import hosts_of, make, settings_of

    try:
        make(region, directory, days=days)
    except OSError as error:
        fail(str(error), 1)
    hosts, settings = hosts_of(region), settings_of(region)
    if as_json:
        print_json({"directory": str(directory), "hosts": hosts, "settings": settings})
        return
    for host in hosts:
        typer.echo(_what_to_copy(host, directory))
    if (directory / "ca.key").exists():
        typer.echo(f"keep {directory / 'ca.key'} where no host of the region reads it")
    typer.echo(_settings(region, settings))


@certs_app.command("add")
def add_command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="what `certs init` made")],
    file: FileArgument,
    variables: SetOption = None,
    days: DaysOption = 365,
    renew: Annotated[
        bool, typer.Option("--renew", help="new certificates for all hosts, before they expire")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Make the files of hosts that joined the region file later, by the same authority.

    It also makes the certificate of a host anew whose nodes or addresses the file changed, and one
    that has expired or will within 30 days. Keys stay as they are, and so does everything of the
    other hosts. Processes use a replaced certificate within a second, without a restart.

    \b
    prfaas certs add keys region.yaml
    prfaas certs add keys region.yaml --renew
    """
    region = load_or_exit(file, variables or [])
    from deploy.region.certs import add

    try:
        hosts = add(region, directory, days=days, renew=renew)
    except (OSError, ValueError) as error:
        fail(str(error), 1)
    if as_json:
        print_json({"directory": str(directory), "hosts": hosts})
        return
    for host in hosts:
        typer.echo(_what_to_copy(host, directory))
    if not hosts:
        typer.echo("every host of the file has its files")


def _what_to_copy(host: Host, directory: Path) -> str:
    nodes = ", ".join(host.nodes)
    gateway = ", with the gateway" if host.has_gateway else ""
    return f"copy {directory / host.folder}/ to the host {host.addresses[0]} ({nodes}{gateway})"


def _settings(region: RegionSpec, settings: dict[str, str]) -> str:
    """Where the hosts look for the files, or what has to be written into the region file."""
    security = region.security
    tls = {} if security.tls is None else {f"tls.{name}": path for name, path in security.tls}
    given = {name: tls.get(name) or getattr(security, name, None) for name in settings}
    if all(given.values()):
        lines = [f"  {settings[name]:<13} {path}" for name, path in given.items()]
        return "\n".join(["each host looks for its files there:", *lines])
    lines = [f"  {name}: keys/{file}" for name, file in settings.items() if "." not in name]
    pairs = (f"{name[4:]}: keys/{file}" for name, file in settings.items() if "." in name)
    if text := ", ".join(pairs):
        lines.insert(0, f"  tls: {{{text}}}")
    return "\n".join(["write into the region file (`keys` is beside it):", "security:", *lines])
