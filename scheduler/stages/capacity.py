"""The most requests/s that each group of an arrangement's instances can compute: bounds without
queues.

They choose the divisions that are worth a simulation, and name what is full first.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.planning.lengths import mean_tokens
from scheduler.stages.arrangement import Division, Stage
from scheduler.stages.batching import Batching, budgets_of
from scheduler.stages.simulation import StageModel
from scheduler.stages.traffic import MediaTraffic


@dataclass(frozen=True, slots=True)
class StageWork:
    """Seconds of an instance for one request of the mean size, at the best batch of each stage."""

    encode_s: float
    prefill_s: float
    decode_s: float
    overlap: float = 0.0
    """The share of the encoder's part that decodes hide, where an instance runs both at once."""

    def of(self, group: str) -> float:
        """The work of a group that runs these stages."""
        parts = {
            Stage.ENCODE: self.encode_s,
            Stage.PREFILL: self.prefill_s,
            Stage.DECODE: self.decode_s,
        }
        total_s = sum(parts[Stage(letter)] for letter in group)
        if Stage.ENCODE in group and Stage.DECODE in group:
            total_s -= self.overlap * min(self.encode_s, self.decode_s)
        return total_s


def stage_work(
    model: StageModel, traffic: MediaTraffic, *, prefilled_share: float = 0.0
) -> StageWork:
    """What one request needs. Another cluster prefills `prefilled_share` of all requests."""
    profile = model.profile
    here = 1 - prefilled_share
    media_tokens = traffic.encoded_tokens
    budgets = budgets_of(
        profile,
        model.sizes,
        model.slo,
        batching=model.batching,
        decodes=False,
        config=model.encoding,
    )
    together = max(budgets.media_tokens, traffic.media_tokens)
    encode_s = profile.encode.seconds(together) / together * media_tokens
    prompt = mean_tokens(traffic.text) + traffic.tokens_of_media
    fixed_s = profile.prefill.prefill_s(0)
    whole_s = profile.prefill.prefill_s(round(prompt))
    # Several short prompts share the fixed part of a pass.
    prefill_s = whole_s - fixed_s * (1 - min(1.0, prompt / budgets.tokens))
    decode_s = _decode_s(model, prompt, traffic.output_tokens)
    overlap = profile.overlap if model.batching is Batching.STAGE_LEVEL else 0.0
    return StageWork(here * encode_s, here * prefill_s, decode_s, overlap)


def _decode_s(model: StageModel, prompt: float, output_tokens: float) -> float:
    """A request's part of the steps of the largest batch that keeps TPOT and has room."""
    profile, sizes = model.profile, model.sizes
    room = sizes.kv_room_bytes / max(1.0, sizes.kv.size_bytes(round(prompt + output_tokens)))
    context = prompt + output_tokens / 2
    best_s = profile.step_s(1, context)
    for batch in range(2, int(min(profile.slots, max(1.0, room))) + 1):
        step_s = profile.step_s(batch, batch * context)
        if step_s > model.slo.tpot_s:
            break
        best_s = min(best_s, step_s / batch)
    return best_s * max(0.0, output_tokens - 1)


def bound_rps(work: StageWork, division: Division) -> float:
    """No more requests/s than this can be computed."""
    return min(
        (num / work.of(group) for group, num in division.groups if work.of(group) > 0),
        default=float("inf"),
    )
