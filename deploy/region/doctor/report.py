"""A diagnosis for people and for scripts. Judges nothing."""

from __future__ import annotations

import math
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from deploy.region.doctor.diagnosis import Diagnosis, Finding
from deploy.region.doctor.measurement import EndLoad, Measurement
from deploy.table_style import new_table
from kvmanager.config_files.units import format_duration, format_rate
from transport.config import NEAR_RTT_S


def as_json(names: tuple[str, str], endpoint: str, m: Measurement, d: Diagnosis) -> dict[str, Any]:
    """The numbers for scripts, in SI units. `healthy` says the same as the exit status."""
    return {
        "from": names[0],
        "to": names[1],
        "endpoint": endpoint,
        "healthy": d.is_healthy,
        "limiting_stage": d.stage,
        "evidence": d.evidence,
        "achieved_bytes_per_s": d.achieved_bytes_per_s,
        "expected_bytes_per_s": _finite(d.expected_bytes_per_s),
        "window_bytes_per_s": _finite(d.window_bytes_per_s),
        "link_bytes_per_s": d.link_bytes_per_s,
        "measured": m,
        "kernel": d.kernel,
        "findings": d.findings,
    }


def render(names: tuple[str, str], endpoint: str, m: Measurement, d: Diagnosis) -> RenderableType:
    """The path, the kernel and the verdict for a terminal."""
    title = Text.assemble((f"{names[0]} → {names[1]}", "bold"), ("  data port ", "dim"), endpoint)
    parts: list[RenderableType] = [title, Text(), _path_table(m), _kernel_table(d)]
    parts.append(_rate_line(d))
    parts += [line for finding in d.findings for line in _finding_lines(finding)]
    verdict = ("healthy", "green") if d.is_healthy else ("something to mend", "bold red")
    return Group(*parts, Text(), Text(*verdict))


def _path_table(m: Measurement) -> Table:
    path = m.path
    table = new_table(title="path")
    table.show_header = False
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    wanted = m.wanted_congestion or "the kernel's default"
    kernel = m.sender_kernel
    if wanted in kernel.available_congestion:
        allowed = "allowed" if wanted in kernel.allowed_congestion else "not allowed"
    else:
        allowed = "not loaded"
    used = ", ".join(path.congestion) or "unknown"
    min_rtt, rtt = format_duration(path.min_rtt_s), format_duration(path.rtt_s)
    table.add_row("round trip", f"{rtt}, at least {min_rtt}")
    table.add_row("loss", f"{path.loss:.3%} of the bytes sent again")
    table.add_row("congestion control", f"{used} in use; {wanted} is {allowed}{_near_note(m)}")
    table.add_row("connections", f"{m.width} carry data, at most {m.max_connections} ({m.tuning})")
    table.add_row("frames", f"{m.frame_bytes >> 10} KiB")
    table.add_row("send buffers", f"up to {path.send_buffer_bytes >> 10} KiB a connection")
    table.add_row(
        "sockets",
        f"busy {path.busy:.0%} of the time; of that waited for the receive window"
        f" {path.rwnd_limited:.0%}, for the send buffer {path.sndbuf_limited:.0%}",
    )
    table.add_row("sender CPU", _load(m.sender))
    table.add_row("receiver CPU", _load(m.receiver))
    table.add_row("probe", f"{m.nbytes / 2**20:.0f} MiB in {m.seconds_s:.1f} s")
    return table


def _near_note(m: Measurement) -> str:
    is_other = m.wanted_congestion and set(m.path.congestion) - {m.wanted_congestion}
    is_near = m.path.min_rtt_s < NEAR_RTT_S
    return ", which is for links to other hosts" if is_other and is_near else ""


def _kernel_table(d: Diagnosis) -> Table:
    table = new_table("setting", "host", "now", "set to", title="kernel")
    for check in d.kernel:
        wanted = Text(check.wanted, style="red") if check.is_wrong else Text("fine", style="green")
        table.add_row(check.name, check.host, check.present, wanted)
    return table


def _rate_line(d: Diagnosis) -> Text:
    believed = f", the link {format_rate(d.link_bytes_per_s)}" if d.link_bytes_per_s else ""
    return Text.assemble(
        ("rate: ", "dim"),
        (format_rate(d.achieved_bytes_per_s), "bold"),
        f" achieved, at most {_rate(d.expected_bytes_per_s)} expected"
        f" (windows allow {_rate(d.window_bytes_per_s)}{believed})",
    )


def _finding_lines(finding: Finding) -> list[Text]:
    mark, style = ("✗", "red") if finding.mends else ("·", "dim")
    return [
        Text.assemble((f"{mark} {finding.what}", style), f": {finding.evidence}"),
        Text(f"  → {finding.fix}"),
    ]


def _load(end: EndLoad) -> str:
    return (
        f"agent {end.agent_cpus:.2f} of {end.usable_cpus:.3g} CPUs, host {end.host_busy:.0%} busy"
    )


def _rate(bytes_per_s: float) -> str:
    return format_rate(bytes_per_s) if math.isfinite(bytes_per_s) else "unknown"


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
