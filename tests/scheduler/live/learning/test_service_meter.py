"""How a place serves beside others, learnt from synthetic first tokens. No clock."""

from __future__ import annotations

import math
import random
from statistics import median

import msgspec
import pytest

from scheduler.live.learning.service_meter import MIN_SEEN, ServiceMeter, ServiceState
from scheduler.routing.prediction import Prediction
from scheduler.routing.service import ALONE, Load, ServiceModel

TRUE = ServiceModel(0.03, 0.8, 0.015, 0.04, 3.0)


def stream(
    seed: int, true: ServiceModel, num: int, *, noise: float = 0.1, longer: float = 1.0
) -> list[tuple[Prediction, float]]:
    """First tokens of a place that serves by `true`: what is predicted of them alone, and TTFT."""
    draws = random.Random(seed)
    found = []
    for _ in range(num):
        prefill_s = longer * draws.choice((0.04, 0.08, 0.15, 0.3))
        queue_s = draws.choice((0.0, 0.0, draws.expovariate(1 / (2 * longer * 0.14))))
        load = Load(draws.randrange(4), float(draws.random() < 0.5), draws.uniform(0.002, 0.01))
        predicted = Prediction(queue_s, 0.0, prefill_s, 0.02, step_s=0.01, load=load)
        whole = true.overhead_s + predicted.ttft_s
        whole += true.contention_s(prefill_s, load)
        found.append((predicted, whole * math.exp(draws.gauss(0.0, noise))))
    return found


def with_model(model: ServiceModel, alone: Prediction) -> float:
    return alone.ttft_s + model.overhead_s + model.contention_s(alone.prefill_s, alone.load)


def errors(meter: ServiceMeter, tokens: list[tuple[Prediction, float]]) -> list[float]:
    """The errors of the predictions, each made before its first token teaches."""
    found = []
    for predicted, measured_s in tokens:
        found.append(abs(with_model(meter.model, predicted) / measured_s - 1))
        meter.observe(predicted, measured_s)
    return sorted(found)


def test_nothing_is_believed_of_one_or_two_first_tokens() -> None:
    meter = ServiceMeter()
    for _ in range(MIN_SEEN - 1):
        meter.observe(Prediction(prefill_s=0.1), 60.0)
        assert meter.model is ALONE
    meter.observe(Prediction(prefill_s=0.1), 60.0)
    assert meter.model != ALONE


@pytest.mark.parametrize("seed", range(5))
def test_after_30_requests_predictions_are_within_15_percent(seed: int) -> None:
    meter = ServiceMeter()
    tokens = stream(seed, TRUE, 130)
    errors(meter, tokens[:30])
    found = errors(meter, tokens[30:])
    assert median(found) <= 0.15
    assert found[90] <= 0.40
    alone = [abs(with_model(ALONE, predicted) / ttft_s - 1) for predicted, ttft_s in tokens[30:]]
    assert median(found) < 0.6 * median(alone)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "then",
    [
        TRUE._replace(overhead_s=0.2),  # another link
        TRUE._replace(prefill=1.6, render=5.0),  # another neighbour on the host
        TRUE._replace(decode_s=0.0, busy_s=0.0, overhead_s=0.0),  # neighbours are gone
    ],
)
def test_after_a_change_30_requests_are_enough(seed: int, then: ServiceModel) -> None:
    meter = ServiceMeter()
    errors(meter, stream(seed, TRUE, 300))
    tokens = stream(seed + 50, then, 130)
    errors(meter, tokens[:30])
    found = errors(meter, tokens[30:])
    assert median(found) <= 0.15
    assert found[90] <= 0.40


@pytest.mark.parametrize("seed", range(5))
def test_prompts_three_times_as_long_are_no_surprise(seed: int) -> None:
    meter = ServiceMeter()
    errors(meter, stream(seed, TRUE, 100))
    found = errors(meter, stream(seed + 50, TRUE, 50, longer=3.0))
    assert median(found) <= 0.15
    assert found[45] <= 0.40


def test_a_change_is_noticed_and_noise_is_none() -> None:
    meter = ServiceMeter()
    errors(meter, stream(1, TRUE, 500, noise=0.2))
    assert meter.num_changes == 0
    errors(meter, stream(2, TRUE._replace(overhead_s=0.5), 20))
    assert meter.num_changes > 0


def test_queues_and_transfers_teach_nothing_about_themselves() -> None:
    meter, draws = ServiceMeter(), random.Random(8)
    for _ in range(300):
        # Three times as long as predicted, as while a link slows down.
        alone = Prediction(prefill_s=0.2, tail_s=draws.choice((0.0, 0.1)))
        meter.observe(alone, 0.2 + 3 * alone.tail_s)
    slow = with_model(meter.model, Prediction(prefill_s=0.2, tail_s=2.0))
    assert slow == pytest.approx(2.3, abs=0.1)


def test_stalls_teach_little() -> None:
    meter, draws = ServiceMeter(), random.Random(3)
    for predicted, measured_s in stream(3, TRUE, 200):
        meter.observe(predicted, measured_s * (20.0 if draws.random() < 0.1 else 1.0))
    found = errors(meter, stream(4, TRUE, 100))
    assert median(found) <= 0.15


def test_no_number_falls_below_zero_so_load_never_shortens_a_prediction() -> None:
    meter, draws = ServiceMeter(), random.Random(5)
    for _ in range(300):
        parts = [draws.random() for _ in range(4)]
        load = Load(draws.randrange(9), draws.random(), draws.random())
        meter.observe(Prediction(*parts, load=load), draws.random() + 1e-3)
        assert min(meter.model) >= 0


@pytest.mark.parametrize(
    ("predicted", "measured_s"),
    [
        (Prediction(queue_s=math.inf), 1.0),
        (Prediction(prefill_s=1.0, tail_s=math.inf), 1.0),
        (Prediction(prefill_s=1.0), 0.0),
        (Prediction(prefill_s=1.0), math.inf),
        (Prediction(prefill_s=1.0), math.nan),
    ],
)
def test_what_is_no_time_teaches_nothing(predicted: Prediction, measured_s: float) -> None:
    meter = ServiceMeter()
    meter.observe(predicted, measured_s)
    assert meter.num_seen == 0


def test_a_restored_meter_learns_on_as_the_one_before() -> None:
    before = ServiceMeter()
    errors(before, stream(6, TRUE, 80))
    data = msgspec.msgpack.encode(before.state())
    after = ServiceMeter.restored(msgspec.msgpack.decode(data, type=ServiceState))
    assert after.model == before.model
    for predicted, measured_s in stream(7, TRUE._replace(overhead_s=0.4), 40):
        before.observe(predicted, measured_s)
        after.observe(predicted, measured_s)
        assert after.model == before.model
    assert len(data) < 1000  # however much was seen


def test_a_state_of_other_numbers_is_refused() -> None:
    state = msgspec.structs.replace(ServiceMeter().state(), wanted=[0.0])
    with pytest.raises(ValueError, match="has 5 numbers, not 1"):
        ServiceMeter.restored(state)
