"""`prfaas emulate`: an emulated link from the command line, and faults on a running one.

It turns arguments into calls; `relay` has the relay itself.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from deploy.command_line import JsonOption, command_group, fail, print_json
from deploy.lab.emulator.control import RelayControl, RelayError
from deploy.lab.emulator.faults import Command, Configure, LinkReport
from deploy.table_style import new_table
from kvmanager.config_files.units import format_duration, format_rate, parse_duration, parse_rate

emulate_app = command_group("Emulate a long link between two processes, and its faults.")


class Action(StrEnum):
    """What can be done to a running link."""

    REPORT = "report"
    CUT = "cut"
    HEAL = "heal"
    RESET = "reset"
    BLACKHOLE = "blackhole"
    STALL = "stall"
    FLIP = "flip"
    SET = "set"


_FAULTS = (Action.CUT, Action.RESET, Action.BLACKHOLE, Action.STALL, Action.FLIP)


class Way(StrEnum):
    """A direction through the link."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BOTH = "both"


@emulate_app.command("link")
def link_command(
    to: Annotated[str, typer.Option(help="host:port that connections go on to")],
    listen: Annotated[str, typer.Option(help="host:port; port 0 picks one")] = "127.0.0.1:0",
    rate: Annotated[str, typer.Option(help="1Gbit, 200Mbit, unlimited")] = "unlimited",
    rtt: Annotated[str, typer.Option(help="round trip, half of it each way")] = "0",
    jitter: Annotated[str, typer.Option(help="plus or minus, each way")] = "0",
    control: Annotated[str, typer.Option(help="unix socket for `prfaas emulate fault`")] = "",
) -> None:
    """Relay TCP connections as a link of this rate and round trip would, until Ctrl-C.

    The rate is shared by all connections, each way. Prints a JSON line with the address when
    ready. TCP ends on both sides of the relay: no loss, no slow start over the long way.

    \b
    prfaas emulate link --to 127.0.0.1:7100 --rate 1Gbit --rtt 20ms --control /tmp/link.sock
    prfaas emulate fault /tmp/link.sock cut --for 3s
    """
    from deploy.lab.emulator.relay import main

    options = {"--to": to, "--listen": listen, "--rate": rate, "--rtt": rtt, "--jitter": jitter}
    argv = [word for pair in options.items() for word in pair]
    try:
        status = main([*argv, "--control", control] if control else argv)
    except (ValueError, OSError) as error:
        fail(str(error), 1)
    raise typer.Exit(status)


@emulate_app.command("fault")
def fault_command(
    socket: Annotated[Path, typer.Argument(help="the link's control socket")],
    action: Annotated[Action, typer.Argument(help="what to do to it")] = Action.REPORT,
    direction: Annotated[Way, typer.Option(help="forward: from client to target")] = Way.BOTH,
    after_bytes: Annotated[int, typer.Option(help="begin after this many more bytes")] = 0,
    for_: Annotated[str, typer.Option("--for", help="heal after: 3s; 0: never")] = "0",
    rate: Annotated[str | None, typer.Option(help="the new value, with `set`")] = None,
    rtt: Annotated[str | None, typer.Option(help="the new value, with `set`")] = None,
    jitter: Annotated[str | None, typer.Option(help="the new value, with `set`")] = None,
    as_json: JsonOption = False,
) -> None:
    """Break, heal or change a running link, and show its counters.

    \b
    cut        close all connections, refuse new ones
    blackhole  accept and swallow everything
    stall      freeze, lose nothing
    reset      reset all connections once
    flip       invert one byte
    set        change --rate, --rtt, --jitter
    heal       end all of these

    \b
    prfaas emulate fault /tmp/link.sock flip --direction forward --after-bytes 1000000
    prfaas emulate fault /tmp/link.sock set --rate 200Mbit
    """
    try:
        fault = {
            "direction": direction.value,
            "after_bytes": after_bytes,
            "for_s": parse_duration(for_),
        }
        command: Command
        if action is Action.SET:
            command = Configure(
                rate_bytes_per_s=None if rate is None else parse_rate(rate),
                rtt_s=None if rtt is None else parse_duration(rtt),
                jitter_s=None if jitter is None else parse_duration(jitter),
            )
        else:
            fields = fault if action in _FAULTS else {}
            command = msgspec.convert({"op": action.value} | fields, Command)
        report = RelayControl(socket).send(command)
    except (ValueError, RelayError) as error:
        fail(str(error), 1)
    if as_json:
        print_json(report)
    else:
        Console().print(_table(report))


def _table(report: LinkReport) -> Table:
    table = new_table("", numbers=("in", "out", "on its way", "swallowed", "flipped"))
    table.add_column("state", overflow="fold")
    for name, way in (("forward", report.forward), ("backward", report.backward)):
        states = ["cut"] * report.is_cut
        states += ["stalled"] * (name in report.stalled)
        states += ["swallowing"] * (name in report.swallowing)
        counts = (way.in_bytes, way.out_bytes, way.held_bytes, way.swallowed_bytes)
        table.add_row(
            name, *(f"{n:,}" for n in counts), str(way.flipped_bytes), ", ".join(states) or "fine"
        )
    shape = f"{format_rate(report.rate_bytes_per_s)}, {format_duration(report.rtt_s)} round trip"
    table.caption = f"{shape}, {report.open_connections} connections"
    table.caption_justify = "left"
    return table
