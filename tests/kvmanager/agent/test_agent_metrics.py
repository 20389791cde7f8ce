"""What an agent counts of transfers, and what it shows of its engines and landings."""

from msgspec import structs
from report_cases import agent_status

from kvmanager.agent.messages import EngineStatus, TransferReport
from kvmanager.agent.metrics import AgentMetrics

STATUS = agent_status(
    landing_cap_bytes=50,
    engines=[EngineStatus("p0", 2, 1, "layout", "fingerprint", model="tiny", engine="vllm 0.32.0")],
    landing_room_bytes=30,
)


def test_landings_and_engines_are_shown() -> None:
    value = AgentMetrics(lambda: STATUS).registry.get_sample_value
    assert value("prfaas_agent_landing_limit_bytes") == 50
    assert value("prfaas_agent_landing_room_bytes") == 30
    labels = {"instance": "p0", "model_name": "tiny", "engine": "vllm 0.32.0"}
    assert value("prfaas_agent_engine_info", labels) == 1


def test_bytes_on_the_wire_count_also_for_transfers_that_failed() -> None:
    metrics = AgentMetrics(lambda: STATUS)
    report = TransferReport(
        "t", "outbox", "complete", 100, wire_bytes=130, resent_bytes=40, acked_bytes=100
    )
    metrics.transfer_ended(report)
    metrics.transfer_ended(structs.replace(report, state="failed", wire_bytes=7, resent_bytes=0))
    metrics.transfer_ended(structs.replace(report, kind="landing", wire_bytes=0))
    value = metrics.registry.get_sample_value
    assert value("prfaas_agent_wire_bytes_total") == 137
    assert value("prfaas_agent_resent_bytes_total") == 40
    labels = {"kind": "outbox", "hand_off": "transport"}
    assert value("prfaas_agent_transferred_bytes_total", labels) == 100
