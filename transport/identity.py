"""Who a process is: its region, its role and its name, as its certificate or its signed calls say.

A certificate names them in URI subject alternative names, `spiffe://REGION/ROLE/NAME`, as
cert-manager issues them. It may have several names of one region: the processes of a region on one
machine can share one certificate. It knows no socket, no file and no method.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, cast, get_args

Role = Literal["gateway", "prefill-front", "pd-front", "agent", "directory", "operator"]
ROLES: Final[tuple[str, ...]] = get_args(Role)
SCHEME: Final = "spiffe://"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")


@dataclass(frozen=True, slots=True)
class Identity:
    """One name of a process. ValueError for an unknown role or a part that cannot name anything."""

    region: str
    role: Role
    name: str

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"{self.role!r} is no role; the roles are {', '.join(ROLES)}")
        for part in (self.region, self.name):
            if _NAME.fullmatch(part) is None:
                raise ValueError(
                    f"{part!r} cannot name a region or a process; write 1 to 63 letters, digits, "
                    "'.', '_' or '-', a letter or digit first"
                )

    def __str__(self) -> str:
        return f"{SCHEME}{self.region}/{self.role}/{self.name}"

    @classmethod
    def parse(cls, text: str) -> Identity:
        """Parse `spiffe://REGION/ROLE/NAME`. ValueError says what is wrong with `text`."""
        parts = text.removeprefix(SCHEME).split("/")
        if not text.startswith(SCHEME) or len(parts) != 3:
            raise ValueError(f"{text!r} is not {SCHEME}REGION/ROLE/NAME")
        region, role, name = parts
        return cls(region, cast(Role, role), name)


def identities_of(uris: Iterable[str]) -> tuple[Identity, ...]:
    """The names among the URIs of a certificate. URIs of another form are somebody else's."""
    found = []
    for uri in uris:
        try:
            found.append(Identity.parse(uri))
        except ValueError:
            continue
    return tuple(found)


def certificate_identities(certificate: Mapping[str, Any] | None) -> tuple[Identity, ...]:
    """The names in what `ssl.SSLSocket.getpeercert` returns."""
    alternatives = (certificate or {}).get("subjectAltName", ())
    return identities_of(value for kind, value in alternatives if kind == "URI")


def refusal(
    presented: Sequence[Identity], *, region: str, roles: Collection[str], what: str
) -> str | None:
    """The reason, for people, why none of `presented` may take part in `what`; None if one may.

    One name must have both the region and a role: a role of another region counts for nothing.
    """
    if any(one.region == region and one.role in roles for one in presented):
        return None
    needed = " or ".join(sorted(roles)) or "nobody"
    shown = ", ".join(map(str, presented)) or f"no name ({SCHEME}REGION/ROLE/NAME)"
    return f"{what} needs role {needed} of region {region}; the other side shows {shown}"
