"""The arenas that node agents of one machine keep across restarts, and how they are removed.

A kept arena outlives its agent on purpose, so a region that is stopped for good must discard it.
This file knows names and directories, but not what is in an arena or which process maps it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

from blake3 import blake3

from deploy.region.spec.region import NodeSpec, RegionSpec
from kvmanager.arena import Arena

_DIGEST_BYTES = 6
_NAME_CHARS = 40


def arena_name(region: RegionSpec, node: NodeSpec, root: Path) -> str | None:
    """The name of the node's arena, or None if it is not kept.

    The last part is a digest of the run directory and the whole names, so that two runs of one file
    stay apart. The names themselves are shortened: two whole names would be too long for a file
    name.
    """
    if not (node.agent.keep_arena and region.caches(node)):
        return None
    identity = "\0".join((os.fspath(root.resolve()), region.name, node.name))
    digest = blake3(os.fsencode(identity)).hexdigest(_DIGEST_BYTES)
    return f"{region.name[:_NAME_CHARS]}-{node.name[:_NAME_CHARS]}-{digest}"


def kept_arenas(
    region: RegionSpec, root: Path, nodes: Collection[str] | None = None
) -> Iterator[tuple[Path, str]]:
    """(directory, name) of every kept arena of a region that runs in `root`, or of these nodes."""
    for cluster in region.clusters:
        for node in cluster.nodes:
            name = arena_name(region, node, root)
            if name is not None and (nodes is None or node.name in nodes):
                yield node.agent.arena_dir, name


def discard_arenas(
    region: RegionSpec, root: Path, nodes: Collection[str] | None = None
) -> list[Path]:
    """Remove the kept arenas that no agent holds, with their indexes, of all nodes or of these.
    Returns what was removed.
    """
    return [
        path
        for directory, name in kept_arenas(region, root, nodes)
        for path in Arena.discard(directory, name)
    ]


if __name__ == "__main__":
    # DIRECTORY NAME, as units of systemd say when the region is stopped.
    Arena.discard(Path(sys.argv[1]), sys.argv[2])
