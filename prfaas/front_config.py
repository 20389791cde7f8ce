"""Configuration of a prefill cluster's front: the bounds of its queue, the order of its jobs, and
how their media are encoded.

The sections for the order and for encoding are also part of a region's and a gateway's file. Does
not know clusters or jobs.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from kvmanager.config_files.fields import (
    Positive,
    Seconds,
    Section,
    Tokens,
    filled_from,
    settings_of,
    spelled,
)
from kvmanager.config_files.units import parse_tokens
from prfaas.engines.front_config import FrontConfig
from prfaas.queue_values import QueueConfig
from scheduler.encoding.values import EncodeConfig
from scheduler.routing.order_config import DEFAULT_BUCKETS, LengthBucket, OrderConfig
from transport import Role


class BucketSection(Section):
    """A class of prompts up to a length, and its share of the prefilled tokens."""

    up_to_tokens: Tokens | None = None
    """Most uncached tokens of a prompt in this class, or such as 64Ki. Left out: any length."""
    share: Positive
    """Share of the uncached tokens that start while other classes wait."""


@filled_from(OrderConfig)
class QueueSection(Section):
    """The order in which waiting jobs start (`scheduler.routing.queue_order`)."""

    buckets: tuple[BucketSection, ...] = tuple(
        BucketSection(
            up_to_tokens=None if math.isinf(bucket.max_tokens) else int(bucket.max_tokens),
            share=bucket.share,
        )
        for bucket in DEFAULT_BUCKETS
    )
    """Classes of prompts by length, shortest first; the last one has no upper length."""
    ageing_tokens_per_s: Annotated[Positive, spelled(parse_tokens)]
    patience_s: Seconds

    def order(self) -> OrderConfig:
        """The queue's settings for the order."""
        buckets = tuple(
            LengthBucket(math.inf if b.up_to_tokens is None else b.up_to_tokens, b.share)
            for b in self.buckets
        )
        return settings_of(self, OrderConfig, buckets=buckets)

    @model_validator(mode="after")
    def _check(self) -> QueueSection:
        self.order()
        return self


@filled_from(QueueConfig)
class QueueBounds(Section):
    """How much may wait at a prefill cluster's front, and for how long."""

    max_queued: Annotated[int, Field(ge=0)]
    max_wait_s: Seconds

    def queue_config(self, order: OrderConfig) -> QueueConfig:
        """The settings of a queue whose jobs start in this order."""
        return settings_of(self, QueueConfig, order=order)


@filled_from(EncodeConfig)
class EncodingSection(Section):
    """How instances encode images and other media for others, where a cluster has such ones."""

    ttft_s: Seconds
    tpot_s: Seconds
    timeout_s: Seconds

    def encode_config(self) -> EncodeConfig:
        """The settings of an encode stage."""
        return settings_of(self, EncodeConfig)


class PrefillFrontConfig(FrontConfig, QueueBounds):
    """The file of `prfaas prefill`."""

    role: ClassVar[Role] = "prefill-front"

    encoding: EncodingSection = EncodingSection.of()
    """How instances encode images and other media for others."""

    queue: QueueSection = QueueSection.of()
    """The order in which waiting jobs start."""
