"""Which settings of a gateway's file are different in each of its processes. Pure."""

from __future__ import annotations

from pathlib import Path

from deploy.gateway.file import GatewayFile


def own_file(file: GatewayFile, number: int) -> GatewayFile:
    """The file as the process of this number uses it; `file` has `shared` (`GatewaySection`).

    Each process has a name, a file of what was learnt and a folder of recordings for itself. The
    first one keeps the file's own path, so that a gateway that gets a second process goes on from
    what it has learnt.
    """
    gateway = file.gateway
    assert gateway.shared is not None
    own: dict[str, object] = {
        "shared": gateway.shared.model_copy(
            update={"name": process_name(gateway.shared.name, number)}
        )
    }
    if gateway.state is not None and number:
        own["state"] = Path(f"{gateway.state}.{number}")
    if (recorder := gateway.recorder) is not None:
        own["recorder"] = recorder.model_copy(
            update={
                "dir": recorder.dir / f"process-{number}",
                "keep": recorder.keep // gateway.processes,
            }
        )
    return file.model_copy(update={"gateway": gateway.model_copy(update=own)})


def process_name(gateway: str, number: int) -> str:
    """What operators and the other gateways call a process of this gateway."""
    return f"{gateway}.{number}"
