"""Settings and cells of the transport's fault matrices: timeouts so short that a cell is quick."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from transport_loopback import FaultRig, Phase

from transport import TransportConfig

KIB = 1024
FAULT_OPTIONS: dict[str, Any] = {
    "num_connections": 4,
    "frame_bytes": 64 * KIB,
    "max_autotuned_frame_bytes": 64 * KIB,  # more would not fit into what the kernel holds
    "connect_timeout_s": 1,
    "handshake_timeout_s": 0.4,
    "ack_timeout_s": 0.3,
    "idle_timeout_s": 3,
    "drop_grace_s": 0.1,
    "reconnect_first_s": 0.02,
    "reconnect_max_s": 0.1,
}
FAULT_CONFIG = TransportConfig(**FAULT_OPTIONS)


def matrix(
    *, plain: Sequence[Callable[[FaultRig], None]], tls: Sequence[Callable[[FaultRig], None]]
) -> pytest.MarkDecorator:
    """One cell per fault and phase, for a test of `rig`, `strike` and `phase`. The parameter of the
    fixture `rig` says whether the cell is over TLS.
    """
    cells = [
        pytest.param(has_tls, strike, phase, id=f"{'tls_' * has_tls}{strike.__name__}-{phase}")
        for has_tls, strikes in ((False, plain), (True, tls))
        for strike in strikes
        for phase in Phase
    ]
    return pytest.mark.parametrize(("rig", "strike", "phase"), cells, indirect=["rig"])
