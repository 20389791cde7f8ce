"""vLLM's CPU worker at the pace of another device. Only a paced engine imports this file.

Each pass has a deadline: the end of the pass before, or the moment when it was given to an idle
engine, plus the time that the device takes. What the CPU computes is inside this time, and a late
wake does not delay the passes after it. Layers take equal shares, so that KVCache leaves layer by
layer as from the device.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import max_memory_usage_bytes
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.worker.cpu_worker import CPUWorker

from deploy.lab.pace.times import VARIABLE, PassTimes

_REST_S: Final = 0.004
_REST_S_PER_TOKEN: Final = 2e-5
"""What the CPU is assumed to need after the last wait of a pass, until it is measured."""


class PacedWorker(CPUWorker):  # type: ignore[misc]
    """`--worker-cls` of a paced engine; its speed is in the environment (`VARIABLE`)."""

    def load_model(self, *args: Any, **options: Any) -> Any:
        """Load the model, and let its layers wait for their shares of a pass."""
        loaded = super().load_model(*args, **options)
        self._times = PassTimes.decode(os.environ[VARIABLE])
        log = Path(self._times.log)
        log.parent.mkdir(exist_ok=True)
        self._log = log.open("a", buffering=1)
        self._start_s = self._due_s = self._woken_s = 0.0
        self._rest_s: dict[int, float] = {}
        self._asked: dict[str, float] | None = None
        layers = _decoder_layers(self.model_runner.model)
        for place, layer in enumerate(layers, start=1):
            # Before the layer computes, since its KVCache leaves as soon as it has.
            left = 1 - place / len(layers)
            layer.register_forward_pre_hook(lambda *_, left=left: self._wait(left))
        return loaded

    def determine_available_memory(self) -> int:
        """KV memory that holds as many requests as that of the device."""
        available: int = super().determine_available_memory()
        specs = self.model_runner.get_kv_cache_spec().values()
        if self._times.kv_requests and specs:
            request = max_memory_usage_bytes(self.vllm_config, specs)
            available = min(available, int(self._times.kv_requests * request))
        return available

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """Begin a pass, and end it unless tokens are sampled by the next call."""
        self._begin(scheduler_output)
        output = super().execute_model(scheduler_output)
        if output is not None:
            self._end()
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        """End the pass."""
        output = super().sample_tokens(grammar_output)
        self._end()
        return output

    def _begin(self, scheduled: SchedulerOutput) -> None:
        chunks = list(_chunks(scheduled))
        # One token after others is a step of decoding: the last token of a prompt whose KVCache
        # came from elsewhere is computed like any other token of the answer.
        prefills = [chunk for chunk in chunks if chunk[1] > 1 or not chunk[0]]
        batch = len(chunks) - len(prefills)
        asked_s = self._times.pass_s(prefills, batch)
        if not asked_s:
            self._asked = None
            return
        now_s = time.monotonic()
        # An engine that goes on with a request has not been idle.
        goes_on = bool(scheduled.scheduled_cached_reqs.req_ids) and self._due_s > 0
        self._start_s = self._due_s if goes_on else max(self._due_s, now_s)
        self._due_s = self._start_s + asked_s
        tokens = sum(num for _, num, _ in prefills)
        self._asked = {"asked": asked_s, "prefill": tokens, "decode": batch}
        self._size = (tokens + batch).bit_length()

    def _wait(self, left: float) -> None:
        """Wait for the end of a layer's share, after which this part of the pass is left."""
        if self._asked is not None:
            # The CPU must compute the last layer and sample before the deadline. Nobody waits for
            # the KVCache of a decode step, which may have more time for it.
            asked_s, spare = self._asked["asked"], 0.01 if self._asked["prefill"] else 0.1
            left_s = max(left * asked_s, self._rest() + spare * asked_s)
            self._sleep_until(self._due_s - left_s)
            self._woken_s = time.monotonic()

    def _rest(self) -> float:
        """Seconds that the CPU needs after the last wait, for passes of this size (log2)."""
        assumed_s = _REST_S + _REST_S_PER_TOKEN * 2**self._size
        return float(self._rest_s.get(self._size, assumed_s))

    def _end(self) -> None:
        asked, self._asked = self._asked, None
        if asked is not None:
            rest_s = 1.5 * (time.monotonic() - self._woken_s)
            self._rest_s[self._size] = max(rest_s, 0.95 * self._rest())
            self._sleep_until(self._due_s)
            took = {"at": time.time(), "took": time.monotonic() - self._start_s}
            self._log.write(json.dumps(took | asked) + "\n")

    def _sleep_until(self, at_s: float) -> None:
        left_s = at_s - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)


class UnpacedRequests(LogitsProcessor):  # type: ignore[misc]
    """Refuses requests whose work on the CPU no profile has; it changes no logits."""

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        """Raise ValueError, which is 400 for the client."""
        if params.structured_outputs is not None:
            raise ValueError("a paced engine does not pace structured outputs; leave them out")

    def __init__(self, *_: Any) -> None:
        pass

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """The same logits."""
        return logits

    def is_argmax_invariant(self) -> bool:
        """Always."""
        return True

    def update_state(self, batch_update: Any) -> None:
        """Ignore the batch: nothing depends on it."""


def _chunks(scheduled: SchedulerOutput) -> Iterator[tuple[int, int, bool]]:
    """Yield of each request its tokens computed before, those of this pass, whether it begins."""
    num = scheduled.num_scheduled_tokens
    for new in scheduled.scheduled_new_reqs:
        yield new.num_computed_tokens, num[new.req_id], True
    cached = scheduled.scheduled_cached_reqs
    for request, done in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        yield done, num[request], False


def _decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    lists = [list(item) for item in model.modules() if isinstance(item, torch.nn.ModuleList)]
    return max(lists, key=len)
