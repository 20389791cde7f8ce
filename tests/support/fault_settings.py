"""Settings of the transport's fault matrices: timeouts so short that every cell is quick."""

from __future__ import annotations

from typing import Any

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
