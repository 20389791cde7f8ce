"""Has the media of a request encoded before one engine serves it whole.

Only where an instance of the PD cluster encodes for others. This file does not know how media are
encoded, nor how the engine was chosen.
"""

from __future__ import annotations

import logging

from deploy.gateway.grants import embedding_grant
from deploy.gateway.serving.exchange import Exchange, Services
from deploy.gateway.serving.planning import RequestPlan
from local_pd.errors import PdError
from local_pd.messages import DirectTarget
from prfaas.encoding.chats import named_media
from prfaas.encoding.values import EncodeDone, EncodeOrder

logger = logging.getLogger("prfaas.deploy.gateway")


async def encode_media(
    services: Services, exchange: Exchange, plan: RequestPlan, pd: str, target: DirectTarget
) -> EncodeDone:
    """Wait until the media are encoded for `target`, as far as that is of use. Without it the
    engine encodes them itself, so that no failure matters.
    """
    inbound = exchange.inbound
    # With an adapter engines may make other embeddings of the same media, under other names.
    if (
        inbound.kind not in ("chat", "responses")
        or not inbound.content.has_media
        or inbound.adapter
    ):
        return EncodeDone()
    report = services.reports().get(pd)
    if report is None or report.encode is None:
        return EncodeDone()
    # Those that decode as well encode for hand-offs only.
    if all(one.decodes for one in report.encode.instances):
        return EncodeDone()
    names = [one.identifier for one in plan.media]
    if services.granter is not None and not names:
        # A prompt that was not counted: its body has the names.
        names = list(named_media(inbound.body))
    keys, grant = embedding_grant(services.granter, report, names)
    order = EncodeOrder(
        request_id=exchange.request_id,
        chat=inbound.body,
        instance=target.instance,
        model=inbound.model,
        media=plan.media,
        cached_tokens=plan.shape.local_cached_tokens,
        tenant=exchange.record.tenant,
        traceparent=exchange.span.traceparent,
        granted_keys=keys,
        grant=grant,
        embedding_nodes=await services.embedding_nodes(report, names),
    )
    started_s = exchange.elapsed_s()
    try:
        done = await services.pds[pd].encode(order)
    except PdError as error:
        logger.warning("%s: media not encoded apart: %s", exchange.request_id, error)
        done = EncodeDone()
    exchange.encoded(done, exchange.elapsed_s() - started_s)
    return done
