"""One process of a gateway that has several: what the parent starts.

It is a gateway as it would be alone, with settings of its own, and it ends with its parent.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import uvloop

from deploy.gateway.cli import run
from deploy.gateway.file import GatewayFile, load_gateway_file
from deploy.gateway.processes.folder import Folder
from deploy.gateway.processes.own_settings import own_file
from deploy.gateway.processes.siblings import Siblings
from deploy.processes import exit_with_parent, module_argv
from kvmanager.config_files.problems import FileError, Problem
from kvmanager.config_files.yaml_files import exit_on_bad_file
from kvmanager.logs import LogFormat, LogLevel, set_up_logging


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """What a process is told by its parent. `admin` is the address of the pages for operators, ""
    if they have none of their own.
    """

    config: str
    folder: str
    number: int
    num: int
    host: str
    port: int
    admin: str
    logs: tuple[LogLevel, LogFormat]

    def argv(self) -> list[str]:
        """The command line of the process."""
        return module_argv("deploy.gateway.processes.child", msgspec.json.encode(self).decode())


def main(text: str) -> None:
    """Serve as ordered until SIGTERM. Exits with 2 for a file that cannot be used."""
    exit_with_parent()
    orders = msgspec.json.decode(text, type=Orders)
    set_up_logging(*orders.logs)
    config = Path(orders.config)
    with exit_on_bad_file():
        read = load_gateway_file(config)
        file = own_file(_ordered(read, orders), orders.number)
        shared = read.gateway.shared
        assert shared is not None
        folder = Folder(Path(orders.folder))
        siblings = Siblings(
            folder, orders.number, orders.num, shared.name, folder.secret.read_bytes()
        )
        uvloop.run(run(config, read, file, siblings, lambda _host, _port: None))


def _ordered(read: GatewayFile, orders: Orders) -> GatewayFile:
    """The file with what the parent has chosen. FileError: it is not one of several processes any
    more.
    """
    if read.gateway.shared is None:
        message = "it was removed while processes run that need it; write it, or restart all"
        raise FileError("the gateway's file", [Problem(("gateway", "shared"), message)])
    update = {
        "host": orders.host,
        "port": orders.port,
        "admin": orders.admin or None,
        "processes": orders.num,
    }
    return read.model_copy(update={"gateway": read.gateway.model_copy(update=update)})


if __name__ == "__main__":
    main(sys.argv[1])
