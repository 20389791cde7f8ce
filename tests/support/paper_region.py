"""Curves of the paper's case study: prefill on its two kinds of GPUs, KVCache sizes, lengths."""

from scheduler.planning.curves import Curve
from scheduler.planning.lengths import LogNormalLengths
from scheduler.planning.region_model import KvSize

FAST = Curve.quadratic(0.39180, 4.2061e-5, 9.937e-11)
SLOW = Curve.quadratic(0.4488, 1.3177e-4, 2.7035e-10)
KV = KvSize(Curve.quadratic(1.8e8, 17280), 1.8e8)
LENGTHS = LogNormalLengths(9.9, 1, 128, 131072)
