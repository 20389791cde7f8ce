"""A region whose engines only answer /health, and stay connected to their node agents."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
from engine_module import install

from deploy.region.spec.region import RegionSpec

ROOT = Path(__file__).resolve().parents[2]

# Takes the place of vLLM's API server: found first on PYTHONPATH. Like it, it has a child; like our
# connector, it stays connected to the node agent.
DUMMY_ENGINE = """
    import http.server, json, os, socket, subprocess, sys, threading, time
    from kvmanager.agent.engines.protocol import EngineHello, encode_frame
    from kvmanager.layout import KVGroup, KVKind, KVLayer, KVLayout, KVPart

    if os.environ.get("DUMMY_FAILS"):
        sys.exit("no such model: nonsense")
    subprocess.Popen(["sleep", "1000"])
    option = lambda name: sys.argv[sys.argv.index(name) + 1]
    connector = json.loads(option("--kv-transfer-config"))["kv_connector_extra_config"]
    group = KVGroup(KVKind.FULL, 16, (KVLayer("layer.0", (KVPart("kv", 1, 256, "bfloat16"),)),))
    layout = KVLayout("dummy", "dummy:0", "digest", 1, (group,)).encode()

    def stay_connected():
        while True:
            try:
                with socket.socket(socket.AF_UNIX) as agent:
                    agent.connect(connector["agent_socket"])
                    hello = EngineHello(connector["instance"], "scheduler", os.getpid(), layout)
                    agent.sendall(encode_frame(hello))
                    while agent.recv(65536):
                        pass
            except OSError:
                pass
            time.sleep(0.05)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()
        def log_message(self, *args):
            pass

    threading.Thread(target=stay_connected, daemon=True).start()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", int(option("--port"))), Handler)
    server.serve_forever()
"""


@pytest.fixture(scope="module")
def dummy_vllm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("dummy")
    install(base, textwrap.dedent(DUMMY_ENGINE))
    (base / "arenas").mkdir()
    return base


def document(dummy: Path, **changes: Any) -> dict[str, Any]:
    agent = {"arena_gib": 0.01, "arena_dir": str(dummy / "arenas")}
    region: dict[str, Any] = {
        "name": "test",
        "gateway": {"port": 0},
        "models": [
            {
                "name": "dummy",
                "path": str(dummy),
                "env": {"PYTHONPATH": f"{dummy}:{ROOT}"},
            }
        ],
        "clusters": [
            {
                "name": "prefill-a",
                "kind": "prefill",
                "nodes": [
                    {
                        "name": "a1",
                        "agent": agent,
                        "instances": [{"name": "a1-prefill"}],
                    }
                ],
            },
            {
                "name": "pd-b",
                "kind": "pd",
                "nodes": [
                    {
                        "name": "b1",
                        "agent": agent,
                        "instances": [
                            {"name": "b1-prefill", "role": "prefill"},
                            {"name": "b1-decode", "role": "decode"},
                        ],
                    }
                ],
            },
        ],
        "links": [{"from": "prefill-a", "to": "pd-b", "emulate": {"rate": "1Gbit", "rtt": "20ms"}}],
    }
    return region | changes


def spec(dummy: Path, **changes: Any) -> RegionSpec:
    return RegionSpec.model_validate(document(dummy, **changes))
