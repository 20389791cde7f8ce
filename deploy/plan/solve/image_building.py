"""Images of a plan file: what they add to prompts and prefills, and the instances that serve them.

It turns values into values. `building` reads the file and notes what is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from deploy.plan.solve.spec import EncodeSpec, ImagesSpec, PlanPdClusterSpec, SloSpec
from deploy.profile_file import DecodeStep, MeasuredEncode
from scheduler.encoding.line import EncodeLine
from scheduler.encoding.times import line_through
from scheduler.encoding.values import EncodeConfig
from scheduler.planning.curves import Curve
from scheduler.planning.lengths import EmpiricalLengths, mean_tokens
from scheduler.planning.region_model import Region, Traffic
from scheduler.replay.decode import step_table
from scheduler.routing.profiles import KvProfile, PrefillProfile
from scheduler.stages.batching import Batching
from scheduler.stages.profile import StageProfile, StageSizes, StageSlo
from scheduler.stages.simulation import StageModel
from scheduler.stages.traffic import MediaTraffic

_NUM_QUANTILES = 200
"""A continuous distribution of text lengths becomes so many lengths."""


@dataclass(frozen=True)
class ImagePlanInput:
    """The PD cluster whose instances are arranged, and its requests."""

    cluster: str
    num_instances: int
    model: StageModel
    traffic: MediaTraffic
    spec: ImagesSpec
    text: Traffic
    """The traffic without images."""
    prefills: Mapping[str, Curve]
    """The prefill times of text in each cluster; the region's count encoding, too."""
    encoders: Mapping[str, EncodeLine]
    """The encoder passes in each cluster."""

    @property
    def request_tokens(self) -> float:
        """Media tokens of a request that has images."""
        return self.spec.per_request * self.spec.tokens


def encode_line(spec: EncodeSpec | None, measured: MeasuredEncode | None) -> EncodeLine:
    """The time of an encoder pass, by the plan file or else its profile file. ValueError without
    either.
    """
    if spec is not None and spec.points is None:
        return EncodeLine(spec.fixed_s or 0.0, spec.s_per_token or 0.0)
    found = spec or measured
    points = (None if found is None else found.points) or ()
    line = line_through([(point.tokens, point.seconds) for point in points])
    if line is None:
        raise ValueError(
            "has no encode times, which `images` needs: give encode.fixed_s and "
            "encode.s_per_token, or measure the engine with `prfaas plan profile --images`"
        )
    return line


def with_images(traffic: Traffic, images: ImagesSpec) -> Traffic:
    """The traffic with media tokens in its prompts."""
    text = traffic.lengths
    if isinstance(text, EmpiricalLengths):
        tokens, weights = text.tokens, text.weights / text.weights.sum()
    else:
        shares = (np.arange(_NUM_QUANTILES) + 0.5) / _NUM_QUANTILES
        tokens = text.quantile(shares)
        weights = np.full(_NUM_QUANTILES, 1 / _NUM_QUANTILES)
    least, odd = divmod(images.per_request, 1)
    parts = (
        (0.0, 1 - images.share),
        (least * images.tokens, images.share * (1 - odd)),
        ((least + 1) * images.tokens, images.share * odd),
    )
    lengths = EmpiricalLengths.of(
        np.concatenate([tokens + more for more, _ in parts]),
        np.concatenate([weights * share for _, share in parts]),
    )
    more = images.share * images.per_request * images.tokens
    return replace(traffic, lengths=lengths, input_tokens=traffic.input_tokens + more)


def encode_mean_s(line: EncodeLine, images: ImagesSpec) -> float:
    """What encoding adds to a prefill of the same instance, in the mean over all requests."""
    tokens = images.per_request * images.tokens
    return images.share * (1 - images.repeats) * line.seconds(tokens)


def with_encoding(prefill: Curve, line: EncodeLine, images: ImagesSpec) -> Curve:
    """The prefill time with what encoding adds to it in the mean."""
    return Curve(
        prefill.coefficients + np.array([encode_mean_s(line, images), 0.0, 0.0]), prefill.starts
    )


def stage_model(
    prefill: Curve,
    line: EncodeLine,
    steps: Sequence[DecodeStep],
    region: Region,
    embedding_token_bytes: float,
    cluster: PlanPdClusterSpec,
    images: ImagesSpec,
    slo: StageSlo,
) -> StageModel:
    """One instance of the PD cluster, and its objectives."""
    room = cluster.decode_memory
    typical = max(1, round(mean_tokens(region.traffic.lengths)))
    return StageModel(
        profile=StageProfile(
            encode=line,
            prefill=PrefillProfile.of(prefill),
            decode_steps=step_table([(step.batch_size, step.step_seconds) for step in steps]),
        ),
        sizes=StageSizes(
            embedding_token_bytes=embedding_token_bytes,
            kv=KvProfile.of(region.kv, typical),
            kv_room_bytes=float("inf") if room is None else room,
            bytes_per_s=images.move.rate,
            latency_s=images.move.latency,
        ),
        slo=slo,
        batching=Batching(images.batching),
        encoding=EncodeConfig(ttft_s=slo.ttft_s, tpot_s=slo.tpot_s),
    )


def stage_slo(slo: SloSpec) -> StageSlo | None:
    """The objectives of a request; None if the file leaves one out."""
    if slo.ttft_p90 is None or slo.tokens_per_s is None:
        return None
    return StageSlo(slo.ttft_p90, 1 / slo.tokens_per_s)


def media_traffic(text: Traffic, images: ImagesSpec) -> MediaTraffic:
    """The requests that the instances are tried with."""
    return MediaTraffic(
        text=text.lengths,
        output_tokens=text.output_tokens,
        share=images.share,
        media_per_request=images.per_request,
        media_tokens=images.tokens,
        repeats=images.repeats,
    )
