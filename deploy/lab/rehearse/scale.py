"""The world of the profiles and that of the engines here: which unit of one is which of the other.

*Real* is what the engines on this machine see: tokens of the tiny model, seconds of a wall clock,
bytes of its KVCache. Everything is planned and reported in the units of the profiles.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from scheduler.planning.curves import Curve
from scheduler.planning.region_model import KvSize, Region, Traffic
from scheduler.replay.links import RateSchedule
from scheduler.replay.workload import Workload


@dataclass(frozen=True, slots=True)
class Scale:
    """`tokens` of a profile are one real token of a prompt, `output_tokens` one of an answer, and
    one of its seconds takes `slowdown` real seconds. One real byte on a link stands for
    `link_bytes`.
    """

    tokens: int = 1
    output_tokens: int = 1
    slowdown: float = 1.0
    link_bytes: float = 1.0

    @property
    def step(self) -> float:
        """Real seconds of a decode step, which stands for several, over those of the profile."""
        return self.output_tokens * self.slowdown

    def curve(self, profile: Curve) -> Curve:
        """Real prefill seconds over real tokens."""
        powers = np.array([1.0, self.tokens, self.tokens**2])
        return Curve(profile.coefficients * powers * self.slowdown, profile.starts / self.tokens)

    def kv_of_profile(self, kv: KvSize) -> KvSize:
        """The KVCache of a real model, over tokens of the profile."""
        powers = np.array([1.0, 1 / self.tokens, 1 / self.tokens**2])
        size = Curve(kv.size.coefficients * powers, kv.size.starts * self.tokens)
        return KvSize(size, kv.fixed_bytes)

    def link_bytes_per_s(self, profile_bytes_per_s: float) -> float:
        """The rate at which real KVCache takes as long as the plan's, times the slowdown."""
        return profile_bytes_per_s / self.link_bytes / self.slowdown

    def schedule(self, profile: RateSchedule) -> RateSchedule:
        """What a link carries over time, in real seconds and bytes."""
        return RateSchedule(
            tuple(at_s * self.slowdown for at_s in profile.times_s),
            tuple(map(self.link_bytes_per_s, profile.rates)),
            profile.losses,
        )

    def region(self, profile: Region, kv: KvSize) -> Region:
        """The region in real units. `kv` is that of the real model, over real tokens."""
        traffic = profile.traffic
        return replace(
            profile,
            prefill_clusters=tuple(
                replace(cluster, prefill=self.curve(cluster.prefill))
                for cluster in profile.prefill_clusters
            ),
            pd_clusters=tuple(
                replace(
                    pd,
                    prefill=self.curve(pd.prefill),
                    step_s=pd.step_s * self.step,
                    decode_memory_bytes=None,
                )
                for pd in profile.pd_clusters
            ),
            links=tuple(
                replace(
                    link,
                    bytes_per_s=self.link_bytes_per_s(link.bytes_per_s),
                    rtt_s=link.rtt_s * self.slowdown,
                )
                for link in profile.links
            ),
            kv=kv,
            traffic=Traffic(
                traffic.lengths.scaled(1 / self.tokens),
                max(1.0, traffic.output_tokens / self.output_tokens),
                traffic.input_tokens / self.tokens,
            ),
        )

    def workload(self, profile: Workload, max_model_len: int) -> Workload:
        """The requests in real units. ValueError if one is too long for the real model, or if
        blocks of a trace are no whole number of real tokens.
        """
        outputs = [max(1, round(n / self.output_tokens)) for n in profile.output_tokens]
        prompts = [max(1, round(tokens / self.tokens)) for tokens in profile.prompt_tokens]
        longest = max(prompts)
        # The length at which a distribution ends is often exactly that of the model.
        if longest > max_model_len:
            raise ValueError(
                f"the longest prompt has {max(profile.prompt_tokens):,} tokens, and the tiny model "
                f"has room for {max_model_len:,}: set rehearsal.tokens_per_token to "
                f"{-(-max(profile.prompt_tokens) // max_model_len)} or more"
            )
        if profile.block_ids is not None and profile.block_tokens % self.tokens:
            raise ValueError(
                f"blocks of {profile.block_tokens} tokens are no whole number of real tokens with "
                f"tokens_per_token {self.tokens}: choose a divisor of {profile.block_tokens}"
            )
        return replace(
            profile,
            arrivals_s=[at * self.slowdown for at in profile.arrivals_s],
            # A prompt and its answer share the room.
            prompt_tokens=[
                max(1, min(prompt, max_model_len - output - 1))
                for prompt, output in zip(prompts, outputs, strict=True)
            ],
            output_tokens=outputs,
            block_tokens=max(1, profile.block_tokens // self.tokens),
        )
