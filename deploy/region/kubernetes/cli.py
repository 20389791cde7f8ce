"""`prfaas region render --kubernetes`: writes the chart of a region, and its objects."""

from __future__ import annotations

from pathlib import Path

import typer

from deploy.command_line import fail
from deploy.region.kubernetes.chart import chart, chosen_values, kustomization
from deploy.region.kubernetes.network import unreachable
from deploy.region.kubernetes.pods import object_name, pods_of
from deploy.region.launch.parts import part_of
from deploy.region.spec.region import RegionSpec
from kvmanager.config_files.problems import FileError
from kvmanager.private_files import make_new_directory, make_private_directory, write_private


def write_chart(region: RegionSpec, folder: Path, *, site: str | None, values: Path | None) -> None:
    """Write `chart` and `objects` below the folder, and say how they are used. Exits with status 2
    on a problem in a file, with 1 where the folder cannot be written.
    """
    part_of(region, site=site)
    try:
        files = {f"chart/{name}": text for name, text in chart(region).items()}
        chosen = chosen_values(region, site, values)
        objects = kustomization(region, chosen)
        files |= {f"objects/{name}": text for name, text in objects.items()}
        make_new_directory(folder)
        for name, text in files.items():
            path = folder / name
            make_private_directory(path.parent)
            write_private(path, text.encode())
    except FileError as error:
        fail(str(error), 2)
    except OSError as error:
        fail(str(error), 1)
    for cluster in region.clusters:
        file = folder / "chart" / f"values-{cluster.name}.yaml"
        release = object_name(region.name)  # Helm takes lower case, digits and dashes
        typer.echo(f"{cluster.name}: helm upgrade --install {release} {folder}/chart -f {file}")
    for sentence in unreachable(pods_of(region), chosen.network_policies):
        typer.echo(sentence, err=True)
    typer.echo(f"without Helm: kubectl apply -k {folder}/objects")
