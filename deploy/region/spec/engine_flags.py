"""Options of vLLM that a region's file gives in other keys than `args`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from deploy.region.spec.region import RegionSpec
from kvmanager.config_files.problems import KeyPath, Problem

_OURS: Final = "prfaas gives it; leave it out"
_TLS: Final = "engines have the certificate of security.tls; leave it out"
_ADAPTERS: Final = "it is made of the model's adapters; name them there instead"
_FLAGS: Final = {
    "--max-num-seqs": "it is not what routing counts on; write decode_slots instead",
    "--max-model-len": "clients are told another length; write max_model_len instead",
    "--max-num-batched-tokens": "write max_num_batched_tokens instead",
    "--tensor-parallel-size": "GPUs are given by tensor_parallel_size; write that instead",
    "-tp": "GPUs are given by tensor_parallel_size; write that instead",
    "--pipeline-parallel-size": "GPUs are given by pipeline_parallel_size; write that instead",
    "-pp": "GPUs are given by pipeline_parallel_size; write that instead",
    "--data-parallel-size": "an instance is one engine; name more instances instead",
    "-dp": "an instance is one engine; name more instances instead",
    "--model": "write path instead",
    "--served-model-name": "clients ask for the model's name; write name instead",
    "--host": "write listen of the node instead; without TLS engines stay on loopback",
    "--port": "write port of the instance instead",
    "--uds": "others ask the engine at its port; leave it out",
    "--config": "its options are not looked at; write them here",
    "--api-key": "engines demand security.engine_key; leave it out",
    "--enable-prefix-caching": "write prefix_caching of the model instead",
    "--no-enable-prefix-caching": "write prefix_caching of the model instead",
    "--otlp-traces-endpoint": "write traces instead",
    "--kv-transfer-config": _OURS,
    "--ec-transfer-config": _OURS,
    "--kv-events-config": _OURS,
    "--middleware": _OURS,
    "--ssl-certfile": _TLS,
    "--ssl-keyfile": _TLS,
    "--ssl-ca-certs": _TLS,
    "--ssl-cert-reqs": _TLS,
    "--enable-ssl-refresh": _TLS,
    # The gateway would answer 404 for adapters that only an engine knows, and nobody would compare
    # their weights. With room for fewer adapters an engine would read their files again later, when
    # they may have changed.
    "--lora-modules": _ADAPTERS,
    "--enable-lora": _ADAPTERS,
    "--max-lora-rank": _ADAPTERS,
    "--max-loras": _ADAPTERS,
    "--max-cpu-loras": _ADAPTERS,
}
"""Options of vLLM that would contradict what the region's other processes count on, and what to
write instead.
"""


def check_args(region: RegionSpec) -> Iterator[Problem]:
    """The options in `args` of models and instances that contradict the region."""
    at: KeyPath
    given: list[tuple[KeyPath, tuple[str, ...]]]
    given = [(("models", m, "args"), model.args) for m, model in enumerate(region.models)]
    for c, cluster in enumerate(region.clusters):
        for n, node in enumerate(cluster.nodes):
            for i, item in enumerate(node.instances):
                at = ("clusters", c, "nodes", n, "instances", i, "args")
                given.append((at, item.args))
    for at, args in given:
        for arg in args:
            # As vLLM reads them: --a_b is --a-b, and --a.b sets a key of the JSON in --a.
            flag = re.split(r"[=.]", arg, maxsplit=1)[0].replace("_", "-")
            if flag in _FLAGS:
                yield Problem(at, f"{flag}: {_FLAGS[flag]}")
