"""When a worker begins loads: before the forward pass of the step that vLLM names them in, once."""

from typing import Any

from kvmanager.vllm_connector.connector import PrfaasConnector
from kvmanager.vllm_connector.metadata import LoadStep, PrfaasMetadata


class Worker:
    """The worker's side as the facade sees it."""

    def __init__(self) -> None:
        self.called: list[tuple[str, PrfaasMetadata]] = []

    def begin_step(self, meta: PrfaasMetadata, now_s: float) -> None:
        self.called.append(("begin_step", meta))

    def start_step(self, meta: PrfaasMetadata) -> None:
        self.called.append(("start_step", meta))

    def save_kv_layer(self, meta: PrfaasMetadata, layer_name: str) -> None:
        self.called.append((f"save {layer_name}", meta))

    def wait_for_save(self, meta: PrfaasMetadata) -> None:
        self.called.append(("wait_for_save", meta))


def test_loads_begin_before_the_forward_pass_and_not_again_behind_it() -> None:
    """vLLM calls `start_load_kv` behind the pass, as no request of the step waits for a load."""
    connector: Any = object.__new__(PrfaasConnector)
    connector._worker = worker = Worker()
    meta = PrfaasMetadata(loads=[LoadStep("r1")])
    connector.bind_connector_metadata(meta)
    assert connector.has_connector_metadata()
    connector.wait_for_layer_load("layers.0")
    connector.save_kv_layer("layers.0", None, None)
    connector.start_load_kv(None)
    connector.wait_for_save()
    called = [name for name, of_step in worker.called if of_step is meta]
    assert called == ["begin_step", "save layers.0", "start_step", "wait_for_save"]
