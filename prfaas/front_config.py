"""Configuration of a prefill cluster's front: what every front has, and the order of its queue.

The section for the order is also part of a region's and a gateway's file. Does not know clusters
or jobs.
"""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from prfaas.engines.front_config import FrontConfig
from scheduler.routing.queue_order import DEFAULT_BUCKETS, LengthBucket, OrderConfig

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class BucketSection(_Section):
    """Prompts with up to `up_to_tokens` uncached (left out: of any length), and their share."""

    up_to_tokens: Annotated[int, Field(gt=0)] | None = None
    share: Positive


class QueueSection(_Section):
    """The order in which waiting jobs start (`scheduler.routing.queue_order`)."""

    buckets: tuple[BucketSection, ...] = tuple(
        BucketSection(
            up_to_tokens=None if math.isinf(bucket.max_tokens) else int(bucket.max_tokens),
            share=bucket.share,
        )
        for bucket in DEFAULT_BUCKETS
    )
    ageing_tokens_per_s: Positive = OrderConfig().ageing_tokens_per_s
    patience_s: Positive = OrderConfig().patience_s

    def order(self) -> OrderConfig:
        """For the queue."""
        return OrderConfig(
            buckets=tuple(
                LengthBucket(math.inf if b.up_to_tokens is None else b.up_to_tokens, b.share)
                for b in self.buckets
            ),
            ageing_tokens_per_s=self.ageing_tokens_per_s,
            patience_s=self.patience_s,
        )

    @model_validator(mode="after")
    def _check(self) -> QueueSection:
        self.order()
        return self


class PrefillFrontConfig(FrontConfig):
    """The file of `prfaas prefill`."""

    queue: QueueSection = QueueSection()
