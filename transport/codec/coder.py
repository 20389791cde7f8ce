"""Codes the chunks of one link: the shell around `CodecChooser`, shared by the link's lanes.

A configured codec is used for every chunk that it makes smaller. With "auto" the chooser decides,
and learns what coding costs, how fast the link takes bytes, and how much CPU is idle. Knows no
frame and no socket.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import psutil

from transport.codec.choice import SAMPLE_BYTES, CodecChoice, CodecChooser, CodecConfig
from transport.codec.codecs import Codec, encode
from transport.config import TransportConfig
from transport.interfaces import Elements
from transport.receiving.incoming import RAW_LENGTH
from transport.wire.handshake import codec_feature

logger = logging.getLogger("prfaas.transport")

CANDIDATES = (Codec.ZSTD_PLANES, Codec.LZ4)
"""The codecs of "auto": the best one for floating-point numbers, and the cheapest for padding."""
CPU_SAMPLE_S = 0.5
RAW_HOLDS_S = 0.01
"""Time for which the choice not to code holds, unless a sample or a tick says something new."""


@dataclass(frozen=True, slots=True)
class CodedChunk:
    """A chunk as it is to be sent; `payload` None: send the raw bytes."""

    codec: Codec
    payload: bytes | memoryview | None = None


RAW_CHUNK = CodedChunk(Codec.RAW)


def _named(name: str) -> tuple[Codec, ...]:
    return () if name == "none" else (Codec[name.upper()],)


def _timed_encode(
    codec: Codec, views: Sequence[memoryview], element_bytes: int
) -> tuple[bytes | memoryview, float]:
    """The payload, and the CPU seconds of this thread that it took."""
    # CPU time of this thread alone: wall time would count waiting for a core as cost of the codec.
    begin_s = time.thread_time()
    payload = encode(codec, views, element_bytes)
    return payload, time.thread_time() - begin_s


class LinkCoder:
    """Codes the chunks of the link `name` while a codec pays. Thread-safe; codes outside of the
    lock. At level DEBUG it logs each change of the codec, with the numbers that decided it.
    """

    def __init__(self, config: TransportConfig, name: str) -> None:
        self._name = name
        self._mode = config.codec
        self._lock = threading.Lock()
        self._chooser: CodecChooser | None = None
        if config.codec == "auto":
            self._chooser = CodecChooser(CANDIDATES, CodecConfig(), time.monotonic())
        self._choice: CodecChoice | None = None
        self._sent: dict[Codec, tuple[int, int]] = {}  # raw and wire bytes since the last tick
        self._ask_s = 0.0  # the time from which the chooser is asked again, while it says raw
        self._tick_s: float | None = None
        self._cpu_s = 0.0
        self._cpu_before: tuple[float, float] | None = None  # idle and all CPU seconds of the host
        self._num_cores = len(os.sched_getaffinity(0))
        candidates = CANDIDATES if config.codec == "auto" else _named(config.codec)
        self._wanted_features = sum(codec_feature(codec) for codec in candidates)

    @property
    def codec_name(self) -> str:
        """The codec that the next chunk would get; "raw" for none."""
        if self._chooser is None:
            return "raw" if self._mode == "none" else self._mode
        return "raw" if self._choice is None else self._choice.codec.name.lower()

    @property
    def reason(self) -> str:
        """Why the link has this codec."""
        if self._chooser is None:
            return f'configured: codec "{self._mode}"'
        return "nothing was sent yet" if self._choice is None else self._choice.reason

    def encode(
        self, views: Sequence[memoryview], offset: int, elements: Elements, features: int
    ) -> CodedChunk:
        """One chunk that begins at `offset` of its transfer, for a receiver with these features."""
        if not features & self._wanted_features:
            return RAW_CHUNK
        # A chunk that begins within an element cannot be split into planes of elements.
        element_bytes = 1 if offset % elements.num_bytes else elements.num_bytes
        codec = self._codec(views, element_bytes)
        if codec is Codec.RAW or not features & codec_feature(codec):
            return RAW_CHUNK
        if codec is Codec.FP8 and (elements is not Elements.BF16 or element_bytes != 2):
            return RAW_CHUNK
        payload, spent_s = _timed_encode(codec, views, element_bytes)
        raw_bytes, payload_bytes = sum(map(len, views)), len(payload)
        if self._chooser is not None:
            with self._lock:
                self._chooser.observe_encoded(codec, raw_bytes, payload_bytes, spent_s)
        # A coded body has its raw length in front, which has to be saved as well.
        is_shorter = payload_bytes + RAW_LENGTH.size < raw_bytes
        return CodedChunk(codec, payload) if is_shorter else RAW_CHUNK

    def sent(self, codec: Codec, raw_bytes: int, wire_bytes: int) -> None:
        """The kernel took a chunk."""
        if self._chooser is not None:
            with self._lock:
                raw, wire = self._sent.get(codec, (0, 0))
                self._sent[codec] = raw + raw_bytes, wire + wire_bytes

    def tick(self, *, is_backlogged: bool, num_lanes: int, now_s: float) -> None:
        """Tell the chooser what the link took since the last tick, and how busy the host is;
        `num_lanes` threads encode.
        """
        if self._chooser is None:
            return
        with self._lock:
            self._ask_s = 0.0
            sent, self._sent = self._sent, {}
            # Only a link with a backlog at both ends of the period was limited by itself.
            last_s, self._tick_s = self._tick_s, now_s if is_backlogged else None
            if last_s is not None and is_backlogged and sent:
                codec = max(sent, key=lambda key: sent[key])
                raw = sum(raw for raw, _ in sent.values())
                wire = sum(wire for _, wire in sent.values())
                self._chooser.observe_sent(codec, raw, wire, now_s - last_s, now_s=now_s)
            if now_s - self._cpu_s >= CPU_SAMPLE_S:
                self._cpu_s = now_s
                # psutil opens /proc/stat; without a free descriptor the last measurement holds.
                with suppress(OSError):
                    self._observe_cpu(self._chooser, num_lanes, now_s)

    def _observe_cpu(self, chooser: CodecChooser, num_lanes: int, now_s: float) -> None:
        times = psutil.cpu_times()
        idle_s, total_s = times.idle + times.iowait, sum(times)
        before, self._cpu_before = self._cpu_before, (idle_s, total_s)
        if before is not None and total_s > before[1]:
            idle_share = (idle_s - before[0]) / (total_s - before[1])
            cores = min(self._num_cores, num_lanes)
            chooser.observe_cpu(idle_share, cores, now_s=now_s)

    def _codec(self, views: Sequence[memoryview], element_bytes: int) -> Codec:
        if self._chooser is None:
            return Codec[self._mode.upper()]
        now_s = time.monotonic()
        with self._lock:
            before = choice = self._choice
            # What it depends on changes with samples and ticks, so raw chunks need not ask each.
            if choice is None or choice.codec is not Codec.RAW or now_s >= self._ask_s:
                choice = self._choice = self._chooser.choose(now_s)
                self._ask_s = now_s + RAW_HOLDS_S
            wanted = self._chooser.wants_sample(now_s)
        if before is None or before.codec is not choice.codec:
            logger.debug("%s: %s", self._name, choice)
        if wanted is not None:
            self._sample(wanted, views, element_bytes)
        return choice.codec

    def _sample(self, codec: Codec, views: Sequence[memoryview], element_bytes: int) -> None:
        sample, missing = [], SAMPLE_BYTES
        for view in views:
            sample.append(view[:missing])
            missing -= len(sample[-1])
            if not missing:
                break
        payload, spent_s = _timed_encode(codec, sample, element_bytes)
        assert self._chooser is not None
        with self._lock:
            self._ask_s = 0.0
            self._chooser.observe_sample(
                codec, SAMPLE_BYTES - missing, len(payload), spent_s, now_s=time.monotonic()
            )
