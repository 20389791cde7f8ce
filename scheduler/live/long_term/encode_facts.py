"""The encode stage of a running PD cluster as the long-term loop takes it: from its report, the
media of recent requests, and the times that were learnt.

Pure; knows neither the plan nor requests.
"""

from __future__ import annotations

from collections.abc import Set
from types import MappingProxyType
from typing import Final

from scheduler.encoding.line import EncodeLine
from scheduler.live.learning.media_window import MediaDemand
from scheduler.live.long_term.conversion import Conversion
from scheduler.live.long_term.encode_step import EncodeStage, OtherRole
from scheduler.reports import (
    ClusterReport,
    InstanceReport,
    Role,
    convertible_roles,
    is_of_model,
    same_model,
)

_OTHERS: Final[tuple[OtherRole, ...]] = ("prefill", "decode")


def has_stage(report: ClusterReport | None, model: str) -> bool:
    """Whether instances of the cluster encode for others, or could be told to."""
    instances = () if report is None else report.instances
    return any(
        item.encodes or "encode" in convertible_roles(item)
        for item in instances
        if is_of_model(item, model)
    )


def num_encoding(
    report: ClusterReport | None, model: str, lasting: Set[str], conversion: Conversion | None
) -> int:
    """The instances whose role is to encode, as they will be after the conversion that runs."""
    return sum(role == "encode" for _, role in _counted(report, model, lasting, conversion))


def _counted(
    report: ClusterReport | None, model: str, lasting: Set[str], conversion: Conversion | None
) -> list[tuple[InstanceReport, Role | None]]:
    return [
        (item, _role(item, conversion))
        for item in (() if report is None else report.instances)
        if item.name in lasting and is_of_model(item, model)
    ]


def encode_stage(
    report: ClusterReport,
    model: str,
    lasting: Set[str],
    media: MediaDemand,
    own: EncodeLine | None,
    conversion: Conversion | None,
) -> EncodeStage | str:
    """The stage, or why no instance of it is converted.

    `lasting` are the instances that were healthy for long enough. `own` is how long one that
    prefills takes to encode.
    """
    counted = _counted(report, model, lasting, conversion)
    # An instance that encodes and decodes was set up so by an operator. How much of the encoding
    # it does is its front's choice, and no number of others follows from it.
    beside = sorted(item.name for item, role in counted if item.encodes and role != "encode")
    if beside and conversion is None:
        return f"{', '.join(beside)} encode beside other work"
    line = _stage_line(report, model, media) or own
    if line is None:
        return "how long encoding takes is not known: nothing was encoded lately"
    encoding = [item for item, role in counted if role == "encode"]
    able = {
        role: sum("encode" in convertible_roles(item) for item, has in counted if has == role)
        for role in _OTHERS
    }
    num_leaving = sum(bool({*_OTHERS} & {*convertible_roles(item)}) for item in encoding)
    if not num_leaving and not any(able.values()):
        return "no instance of it can change its role"
    return EncodeStage(
        num_encode=len(encoding),
        num_leaving=num_leaving,
        num_able=MappingProxyType(able),
        stage_s=media.seconds(line),
        own_s=media.seconds(own or line),
        relative_error=media.relative_error,
    )


def _role(item: InstanceReport, conversion: Conversion | None) -> Role | None:
    """The role that an instance will have; None while it cannot be counted."""
    if conversion is not None and conversion.instance == item.name:
        return conversion.wish.to_role
    return None if item.draining or not item.role_ready else item.role


def _stage_line(report: ClusterReport, model: str, media: MediaDemand) -> EncodeLine | None:
    """The passes of the instance of the stage that is in the middle by its speed. Under load they
    are as large as the stage makes them, so that the fixed part is spread over more media.
    """
    instances = () if report.encode is None else report.encode.instances
    seconds = sorted(
        item.line.seconds(num_tokens) / num_tokens
        for item in instances
        if item.line is not None and same_model(item.model, model)
        for num_tokens in [max(media.typical_tokens, item.budget_tokens)]
    )
    return EncodeLine(0.0, seconds[len(seconds) // 2]) if seconds else None
