"""Which settings of a gateway change while it runs, and what a changed file means for one.

They are the limits and the rights of tenants. Each is looked at anew for every request, so that
what is in flight goes on and counts. `shared_caches` is among them: the salt of a request is made
when it comes in, and tenants that no longer share find nothing of each other from then on. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeVar

from deploy.gateway.config import GatewaySection
from kvmanager.config_files.fields import Section

LIVE: Final = (
    "operators",
    "priority_tenants",
    "shared_caches",
    "home",
    "homes",
    "max_in_flight",
    "max_buffered_bytes",
    "max_tenant_buffered_bytes",
    "max_uploads_per_address",
    "max_uploads_per_tenant",
)
"""Settings in the section `gateway`."""
LIVE_ADMISSION: Final = ("default_tenant", "tenants")
"""Settings in its section `scheduling.admission`."""

GatewayT = TypeVar("GatewayT", bound=GatewaySection)


@dataclass(frozen=True, slots=True)
class Changes:
    """Paths of settings: those that changed, and those that wait for a restart."""

    made: tuple[str, ...]
    needs_restart: tuple[str, ...]


def with_live(running: GatewayT, read: GatewaySection) -> GatewayT:
    """`running` with the settings of `read` that change live. ValueError if they do not fit those
    that do not.
    """
    changes = {name: getattr(read, name) for name in LIVE}
    wanted = read.scheduling.admission
    admission = running.scheduling.admission.model_copy(
        update={name: getattr(wanted, name) for name in LIVE_ADMISSION}
    )
    scheduling = running.scheduling.model_copy(update={"admission": admission})
    return type(running).model_validate(dict(running) | changes | {"scheduling": scheduling})


def changed_settings(before: Section, after: Section, at: str = "") -> tuple[str, ...]:
    """The paths of the settings that differ, as one would write them; no values."""
    found: list[str] = []
    for name, field in type(before).model_fields.items():
        old, new = getattr(before, name), getattr(after, name)
        path = at + (field.alias or name)
        if old == new:
            continue
        if isinstance(old, Section) and isinstance(new, type(old)):
            found += changed_settings(old, new, f"{path}.")
        else:
            found.append(path)
    return tuple(found)
