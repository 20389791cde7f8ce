"""The span of a prefill job at the front that runs it.

It does not know how the job is run. `prfaas.engines.prefill_run` has the spans of the tries.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from msgspec import structs

from kvmanager.tracing.spans import begin
from prfaas.engines.errors import PrefillFailed
from prfaas.jobs import PrefillJob

if TYPE_CHECKING:  # which needs the extra `traces`
    from kvmanager.tracing.export import Tracer


@contextmanager
def traced_job(tracer: Tracer | None, cluster: str, job: PrefillJob) -> Iterator[PrefillJob]:
    """The job to run: what is done for it becomes a part of the span that lasts as long as the
    context.
    """
    span = begin(tracer, "prefill_job", job.traceparent, time.monotonic(), "server")
    failed = ""
    try:
        yield structs.replace(job, traceparent=span.traceparent) if span.is_recorded else job
    except PrefillFailed as error:
        failed = error.code
        raise
    except asyncio.CancelledError:
        failed = "cancelled"
        raise
    finally:
        attributes = {"prfaas.cluster": cluster, "prfaas.request_id": job.request_id}
        span.end(time.monotonic(), attributes, error=failed)
