"""Health from probes, load between two looks at an engine, and its metrics text."""

from prfaas.engines.client import EngineLoad, parse_load
from prfaas.engines.health import HealthTracker
from prfaas.engines.load import LoadEstimate

METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 2.0
vllm:num_requests_running{engine="1",model_name="tiny"} 1.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 3.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="deferred"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="tiny"} 7.5e-01
vllm:cache_config_info{num_gpu_blocks="4567",num_gpu_blocks_override="9",engine="0"} 1.0
vllm:cache_config_info{num_gpu_blocks="4567",num_gpu_blocks_override="9",engine="1"} 1.0
"""


def test_metrics_of_all_ranks_are_added_up() -> None:
    assert parse_load(METRICS) == EngineLoad(
        num_running=3, num_waiting=4, num_deferred=1, kv_usage=0.75, num_kv_blocks=4567
    )


def test_an_engine_that_does_not_know_its_blocks_yet_says_none() -> None:
    assert parse_load(METRICS.replace("4567", "None")).num_kv_blocks == 0


def test_other_text_means_no_load() -> None:
    assert parse_load("hello\n") == EngineLoad()


def test_one_good_probe_makes_healthy_several_bad_ones_do_not_end_it() -> None:
    tracker = HealthTracker()
    assert not tracker.healthy
    assert not tracker.probe_failed("refused")
    assert tracker.reason == "refused"
    assert tracker.probe_succeeded()
    assert not tracker.probe_succeeded()
    assert not tracker.probe_failed("slow")
    assert not tracker.probe_failed("slow")
    assert tracker.healthy
    assert tracker.probe_failed("slow")
    assert (tracker.healthy, tracker.reason) == (False, "slow")


def test_a_good_probe_resets_the_count() -> None:
    tracker = HealthTracker()
    tracker.probe_succeeded()
    for _ in range(5):
        assert not tracker.probe_failed("slow")
        assert not tracker.probe_failed("slow")
        tracker.probe_succeeded()
    assert tracker.healthy


def test_a_lost_request_is_proof() -> None:
    tracker = HealthTracker()
    tracker.probe_succeeded()
    assert tracker.mark_lost("connection reset")
    assert not tracker.mark_lost("connection reset")
    assert (tracker.healthy, tracker.reason) == (False, "connection reset")
    assert not tracker.gone
    for _ in range(3):
        tracker.probe_failed("refused")
    assert tracker.gone
    tracker.probe_succeeded()
    assert not tracker.gone


def test_requests_given_since_the_last_look_count() -> None:
    load = LoadEstimate()
    load.given()
    load.given()
    assert load.num_requests == 2
    started = load.poll_starts()
    load.given()  # while the poll is on its way: its answer need not contain this one
    load.polled(2, started)
    assert load.num_requests == 3
    load.polled(3, load.poll_starts())
    assert load.num_requests == 3
    load.polled(0, load.poll_starts())
    assert load.num_requests == 0


def test_requests_that_ended_since_the_last_look_do_not_count() -> None:
    load = LoadEstimate()
    load.polled(3, load.poll_starts())
    load.request_ended()
    assert load.num_requests == 2
    started = load.poll_starts()
    load.given()
    load.polled(2, started)
    assert load.num_requests == 3
    for _ in range(5):  # of requests that the engine had lost
        load.request_ended()
    assert load.num_requests == 0
    load.polled(1, load.poll_starts())
    assert load.num_requests == 1
