"""The hardware, models and requests of the HydraInfer paper, as far as its text gives them.

The paper (Dong et al., *HydraInfer: Hybrid Disaggregated Scheduling for Multimodal Large Language
Model Serving*) serves LLaVA-1.5-7B and LLaVA-NeXT-7B on 8 H800 and shows its measurements as
pictures. Its text gives: 576 tokens for an image of LLaVA-1.5, fp16, blocks of 16 tokens, the
objectives (Table 3), and that encoding saturates at about 6 images, prefill with one prompt, and
decode at about 512 requests. **Everything else here is modelled**, from floating-point operations
and bytes:

- An H800 has 989 TFLOP/s (fp16), 3.35 TB/s of memory bandwidth and 80 GB. A 7B language model
  reaches 60% of the first in a prefill, its weights and KVCache are read with 80% of the second,
  and the encoder, whose matrices are small, reaches 30% of the first. Without CUDA graphs, as in
  the paper, a pass of the language model has 12 ms of launches.
- The language model (Vicuna 7B) has 6.74e9 weights, 32 layers of width 4096, and a KVCache of 512
  KiB a token. 56 GB of an instance are for KVCache: 90% of the memory less weights and activations.
- The encoder (CLIP ViT-L/14 at 336 pixels, with projector) needs 0.41 TFLOP for each 576 tokens.
  The fixed part of its pass is such that 6 images have 90% of the highest throughput.
- An image of LLaVA-NeXT is one of 4:3, as most in these data sets: 5 tiles to encode, of which
  2,340 tokens are left in the prompt.
- Lengths of prompts and answers: a question of one or two sentences; a caption of about 64 tokens
  (TextCaps), answers of 48 (VizWiz), 32 (TextVQA), 16 (POPE) and 4 tokens (MME, yes or no).
- Instances pull at 150 GB/s (NVLink) after 0.5 ms. Where encoder and language model run in
  parallel, 80% of the shorter pass costs no time.

The share of the peak in a prefill, the launches and the lengths of captions were settled after
several values had been tried on the ablation (docs/planning.md says what others give).

Values only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from scheduler.encoding.line import EncodeLine
from scheduler.encoding.values import EncodeConfig
from scheduler.planning.lengths import LogNormalLengths
from scheduler.routing.profiles import KvProfile, PrefillProfile
from scheduler.stages.batching import Batching
from scheduler.stages.profile import StageProfile, StageSizes, StageSlo
from scheduler.stages.simulation import StageModel
from scheduler.stages.traffic import MediaTraffic

NUM_INSTANCES: Final = 8

_FLOP_PER_S: Final = 989e12
_BYTES_PER_S: Final = 0.8 * 3.35e12
_LAUNCH_S: Final = 0.012
_WEIGHTS: Final = 6.74e9
_LAYERS: Final = 32
_WIDTH: Final = 4096
_VALUE_BYTES: Final = 2
_KV_TOKEN_BYTES: Final = 2 * _LAYERS * _WIDTH * _VALUE_BYTES
_KV_ROOM_BYTES: Final = 56e9
_TILE_FLOP: Final = 0.41e12
_SATURATING_TILES: Final = 6
_SLOTS: Final = 512
_OVERLAP: Final = 0.8
# Two operations for each weight, and two for each pair of tokens, layer and value of K and of V, of
# which causal attention needs half.
_TOKEN_S: Final = 2 * _WEIGHTS / (0.6 * _FLOP_PER_S)
_PAIR_S: Final = 4 * _LAYERS * _WIDTH / 2 / (0.6 * _FLOP_PER_S)
_TILE_S: Final = _TILE_FLOP / (0.3 * _FLOP_PER_S)
_WEIGHTS_S: Final = _WEIGHTS * _VALUE_BYTES / _BYTES_PER_S

SIZES: Final = StageSizes(
    embedding_token_bytes=_WIDTH * _VALUE_BYTES,
    kv=KvProfile(0.0, _KV_TOKEN_BYTES),
    kv_room_bytes=_KV_ROOM_BYTES,
    bytes_per_s=150e9,
    latency_s=0.0005,
)


@dataclass(frozen=True, slots=True)
class VisionModel:
    """A model of the paper: tokens of an image in the prompt, and tiles that are encoded for it."""

    name: str
    image_tokens: int
    tiles: int
    slo_s: dict[str, tuple[float, float]]
    """TTFT and TPOT by data set: Table 3."""

    def profile(self, overlap: float) -> StageProfile:
        """One H800 that serves it."""
        # throughput(n) = n / (fixed + n tile): nine tenths of 1 / tile at n = 6.
        fixed_s = _SATURATING_TILES * _TILE_S / 9
        return StageProfile(
            encode=EncodeLine(fixed_s, _TILE_S * self.tiles / self.image_tokens),
            prefill=PrefillProfile((0.0,), ((_LAUNCH_S + _WEIGHTS_S, _TOKEN_S, _PAIR_S),)),
            decode_steps=tuple(
                _LAUNCH_S + max(_WEIGHTS_S, batch * _TOKEN_S) for batch in range(_SLOTS + 1)
            ),
            context_token_s=_KV_TOKEN_BYTES / _BYTES_PER_S,
            overlap=overlap,
        )

    def stage_model(self, dataset: str, batching: Batching) -> StageModel:
        """8 of them with the objectives of a data set."""
        slo = StageSlo(*self.slo_s[dataset])
        return StageModel(
            profile=self.profile(_OVERLAP if batching is Batching.STAGE_LEVEL else 0.0),
            sizes=SIZES,
            slo=slo,
            batching=batching,
            # In the paper nothing but an encode instance encodes, however long that takes.
            encoding=EncodeConfig(
                ttft_s=slo.ttft_s,
                tpot_s=slo.tpot_s,
                own_cost=math.inf,
                timeout_s=math.inf,
                max_waiting=1 << 30,
            ),
        )

    def traffic(self, dataset: str) -> MediaTraffic:
        """The requests of a data set."""
        shape = DATASETS[dataset]
        return MediaTraffic(
            text=LogNormalLengths(math.log(shape.text_tokens), 0.4, 4, 400),
            output_tokens=shape.output_tokens,
            output_sigma=shape.output_sigma,
            media_tokens=self.image_tokens,
        )


@dataclass(frozen=True, slots=True)
class Dataset:
    """Requests of one data set. `paper_gain`: goodput over vLLM's, "up to", by the abstract of the
    paper's contributions.
    """

    text_tokens: float
    output_tokens: float
    output_sigma: float
    paper_gain: float


DATASETS: Final = {
    "TextCaps": Dataset(40, 64, 0.5, 2.0),
    "POPE": Dataset(30, 16, 0.5, 1.5),
    "MME": Dataset(50, 4, 0.2, 2.0),
    "TextVQA": Dataset(40, 32, 0.5, 2.0),
    "VizWiz": Dataset(40, 48, 0.5, 4.0),
}

LLAVA_15: Final = VisionModel(
    "LLaVA-1.5",
    576,
    1,
    {
        "TextCaps": (0.25, 0.04),
        "POPE": (0.25, 0.04),
        "MME": (0.25, 0.06),
        "TextVQA": (0.25, 0.04),
        "VizWiz": (8.0, 0.04),
    },
)
LLAVA_NEXT: Final = VisionModel(
    "LLaVA-NeXT",
    2340,
    5,
    {
        "TextCaps": (8.0, 0.08),
        "POPE": (8.0, 0.06),
        "MME": (8.0, 0.14),
        "TextVQA": (8.0, 0.12),
        "VizWiz": (8.0, 0.12),
    },
)
