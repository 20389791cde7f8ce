"""The encode stage in the long-term loop: which number of instances is best, and the way there."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paper_region import FAST, KV, LENGTHS, SLOW
from scheduling_cases import untimed

from scheduler.encoding.line import EncodeLine
from scheduler.live.learning.measured_traffic import TrafficMeter
from scheduler.live.long_term.conversion import ConversionWish
from scheduler.live.long_term.encode_step import (
    EncodeSearch,
    EncodeStage,
    EncodeStep,
    OtherRole,
    encode_step,
    raised,
)
from scheduler.live.long_term.loop import LongTermConfig, LongTermDecision, StepReason
from scheduler.live.long_term.model_plan import ModelPlan
from scheduler.live.long_term.running_region import Modelled
from scheduler.planning.region_model import (
    Allocation,
    Link,
    PdClusterModel,
    PrefillClusterModel,
    Region,
    Traffic,
)
from scheduler.planning.solve import best_plan, plan_at
from scheduler.planning.throughput import Mode

PERIOD_S = 300.0
OUTPUT = 1024
LINE = EncodeLine(0.05, 4e-4)


def pair(num_others: int = 8) -> Region:
    return Region(
        (PrefillClusterModel("far", 4, FAST),),
        (PdClusterModel("near", num_others, SLOW, 20, 0.025),),
        (Link("far", "near", 100e9 / 8),),
        KV,
        Traffic(LENGTHS, OUTPUT, 27_000),
    )


def stage(num: int = 1, stage_s: float = 1.0, **fields: object) -> EncodeStage:
    values: dict[str, object] = {
        "num_leaving": num,
        "num_able": {"prefill": 9, "decode": 9},
        "own_s": stage_s,
        "relative_error": 0.0,
    }
    return EncodeStage(num_encode=num, stage_s=stage_s, **(values | fields))  # type: ignore[arg-type]


def search(num: int = 1, num_prefill: int = 3, **fields: object) -> EncodeSearch:
    return EncodeSearch(pair(), stage(num, **fields), num_prefill)  # type: ignore[arg-type]


def step(found: EncodeSearch, **settings: object) -> EncodeStep:
    given: dict[str, object] = {
        "is_converting": False,
        "changed_s": -1e9,
        "changed": None,
        "now_s": 0.0,
    }
    return encode_step(found, LongTermConfig(), **(given | settings))  # type: ignore[arg-type]


def test_without_work_for_it_the_stage_limits_nothing() -> None:
    found = search(stage_s=0.0).present
    plain = plan_at(pair(), {"near": 3})
    assert found.rps == plain.system_rps(Mode.EXACT)
    assert search(stage_s=0.0).left_share(100.0) == 0


def test_a_stage_limits_the_region_and_without_one_prefills_take_longer() -> None:
    without, small, large = (search(num, stage_s=2.0).present for num in (0, 1, 50))
    local = 1 - small.plan.offload_fraction
    assert small.rps == pytest.approx(1 / (2.0 * local))
    assert small.rps < large.rps == plan_at(pair(), {"near": 3}).system_rps(Mode.EXACT)
    own = raised(pair(), 2.0)
    assert without.rps == plan_at(own, {"near": 3}).system_rps(Mode.EXACT)


def test_instances_that_prefill_encode_what_the_stage_does_not_in_time() -> None:
    found = search(1, stage_s=2.0)
    local = 1 - found.present.plan.offload_fraction
    assert found.left_share(0.0) == found.left_share(0.5) == 0
    assert found.left_share(9.0) == pytest.approx(1 - 1 / (9.0 * 2.0 * local))
    assert search(0, stage_s=2.0).left_share(2.0) == 1


def test_a_stage_that_is_too_small_gains_an_instance_where_that_gains_most() -> None:
    found = search(1, stage_s=2.0)
    assert found.best.num_encode > 1
    taken = step(found)
    assert (taken.reason, taken.way) == (StepReason.CONVERT, 1)
    assert taken.after is not None
    assert taken.role is not None
    others = {role: found.after(1, role).rps for role in ("prefill", "decode")}  # type: ignore[arg-type]
    assert taken.after.rps == max(others.values()) > found.present.rps


def test_a_stage_that_is_too_large_gives_instances_back() -> None:
    found = search(4, stage_s=0.05)
    assert found.best.num_encode < 4
    taken = step(found)
    assert (taken.reason, taken.way) == (StepReason.CONVERT, -1)
    assert taken.after is not None
    assert taken.after.num_encode == 3


def test_the_last_instance_of_any_role_stays() -> None:
    few = EncodeSearch(pair(2), stage(1, stage_s=9.0), 1)
    assert few.best.num_encode == 1
    assert few.step(1) is None
    assert search(1, stage_s=1e-6).best.num_encode == 1
    assert search(1, stage_s=1e-6).step(-1) is None


def test_only_instances_that_can_change_do() -> None:
    fixed = search(3, stage_s=1e-6, num_leaving=0)
    assert fixed.best.num_encode == 3
    unable = search(1, stage_s=5.0, num_able={"prefill": 0, "decode": 0})
    assert unable.best.num_encode == 1
    assert step(unable).reason is StepReason.BEST_ALREADY
    from_decode = search(1, stage_s=2.0, num_able={"prefill": 0, "decode": 9})
    assert step(from_decode).role == "decode"


@pytest.mark.parametrize(
    ("changed_s", "changed", "reason"),
    [
        (-1e9, None, StepReason.CONVERT),
        (-1e9, (-250.0, 1), StepReason.CONVERT),
        (-1e9, (-200.0, 1), StepReason.DWELLING),
        (-1e9, (-1700.0, -1), StepReason.DWELLING),
        (-1e9, (-1900.0, -1), StepReason.CONVERT),
        (-1e9, (-1700.0, 0), StepReason.DWELLING),  # it failed
        (-200.0, None, StepReason.DWELLING),  # between prefill and decode
    ],
)
def test_the_stage_dwells(
    changed_s: float, changed: tuple[float, int] | None, reason: StepReason
) -> None:
    assert step(search(1, stage_s=2.0), changed_s=changed_s, changed=changed).reason is reason


def test_nothing_begins_beside_a_conversion() -> None:
    assert step(search(1, stage_s=2.0), is_converting=True).reason is StepReason.CONVERTING


def test_few_media_convert_nothing() -> None:
    """The next instance pays for the mean, and would not for half of it."""
    sure = search(1, stage_s=0.8)
    assert step(sure).reason is StepReason.CONVERT
    unsure = replace(sure, stage=replace(sure.stage, relative_error=0.2))
    assert step(unsure).reason is StepReason.UNSURE


@untimed
@given(
    st.integers(0, 4),
    st.integers(2, 8),
    st.floats(0, 10),
    st.floats(0, 10),
    st.integers(0, 4),
    st.integers(0, 4),
    st.data(),
)
def test_a_step_never_lowers_what_the_model_says(
    num: int,
    num_others: int,
    stage_s: float,
    own_s: float,
    prefill_able: int,
    decode_able: int,
    data: st.DataObject,
) -> None:
    num_prefill = data.draw(st.integers(1, num_others - 1))
    able: dict[OtherRole, int] = {
        "prefill": min(prefill_able, num_prefill),
        "decode": min(decode_able, num_others - num_prefill),
    }
    leaving = data.draw(st.integers(0, num))
    found = EncodeSearch(
        pair(num_others),
        stage(num, stage_s=stage_s, own_s=own_s, num_leaving=leaving, num_able=able),
        num_prefill,
    )
    assert found.best.rps >= found.present.rps
    taken = step(found)
    assert taken.gain >= 0
    if taken.reason is not StepReason.CONVERT:
        return
    assert taken.after is not None
    assert taken.role is not None
    assert taken.after.rps > found.present.rps
    if taken.way > 0:
        assert able[taken.role] > 0
        assert (num_prefill if taken.role == "prefill" else num_others - num_prefill) > 1
    else:
        assert leaving > 0
        assert num > 1


@dataclass
class World:
    """A PD cluster under load with images; conversions are done before the next step."""

    num_encode: int = 1
    num_prefill: int = 4
    num_decode: int = 4
    media_share: float = 0.5
    media_tokens: int = 2000
    rate_rps: float = 4.0
    seed: int = 1
    now_s: float = 0.0
    plan: ModelPlan = field(default_factory=lambda: ModelPlan(""))
    meter: TrafficMeter = field(default_factory=TrafficMeter)
    conversions: list[ConversionWish] = field(default_factory=list)
    threshold: float = 20_000.0

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)

    def period(self) -> LongTermDecision:
        num = int(self._rng.poisson(self.rate_rps * PERIOD_S))
        times = np.sort(self._rng.uniform(self.now_s, self.now_s + PERIOD_S, num)).tolist()
        lengths = LENGTHS.sample(num, self._rng).tolist()
        shows = (self._rng.random(num) < self.media_share).tolist()
        sizes = self._rng.exponential(self.media_tokens, num).tolist()
        for at_s, tokens, has_media, size in zip(times, lengths, shows, sizes, strict=True):
            self.meter.arrived(int(tokens) + 1, 0, at_s, int(size) + 1 if has_media else 0)
            self.meter.finished(OUTPUT, at_s)
        self.now_s += PERIOD_S
        measured = self.meter.measured(self.now_s)
        assert measured is not None
        current = Allocation(
            thresholds={"far": self.threshold},
            num_prefill={"near": self.num_prefill},
            num_decode={"near": self.num_decode},
        )
        found = None
        if measured.media is not None:
            seconds = measured.media.seconds(LINE)
            found = EncodeStage(
                num_encode=self.num_encode,
                num_leaving=self.num_encode,
                num_able={"prefill": self.num_prefill, "decode": self.num_decode},
                stage_s=seconds,
                own_s=seconds,
                relative_error=measured.media.relative_error,
            )
        modelled = Modelled(pair(self.num_prefill + self.num_decode), current, encode=found)
        self.plan.ask(modelled, measured, LongTermConfig(), self.now_s)
        decision = self.plan.decide()
        assert decision is not None
        self.apply(decision)
        return decision

    def apply(self, decision: LongTermDecision) -> None:
        self.threshold = decision.thresholds_after["far"]
        for wish in decision.conversions:
            self.conversions.append(wish)
            for role, step in ((wish.from_role, -1), (wish.to_role, 1)):
                name = f"num_{role}"
                setattr(self, name, getattr(self, name) + step)
        assert min(self.num_prefill, self.num_decode) >= 1
        assert self.num_encode >= 1 or not self.conversions
        # Only one instance changes at a time.
        assert len(decision.conversions) <= 1


def with_encode(world: World) -> list[ConversionWish]:
    return [wish for wish in world.conversions if "encode" in (wish.from_role, wish.to_role)]


@pytest.mark.parametrize("seed", [1, 2])
def test_the_stage_follows_the_media_and_does_not_flap(seed: int) -> None:
    world = World(seed=seed)
    for _ in range(18):
        world.period()
    settled = world.num_encode
    # 90 minutes of the same traffic: it came to its number and stayed there.
    ways = {wish.to_role == "encode" for wish in with_encode(world)}
    assert len(ways) <= 1
    world.media_share, world.media_tokens = 1.0, 8000
    for _ in range(12):
        world.period()
    assert world.num_encode > settled
    many = world.num_encode
    world.media_share, world.media_tokens = 0.05, 500
    for _ in range(24):
        world.period()
    assert 1 <= world.num_encode < many


def test_the_goal_says_how_many_encode() -> None:
    world = World(media_share=1.0, media_tokens=8000)
    decision = world.period()
    assert decision.encode is not None
    assert decision.encode.num_encode > 1
    assert decision.encode.needed_encode > 0
    assert {"encode_gain", "encode_left"} <= decision.numbers.keys()


def test_text_alone_is_planned_as_if_there_were_no_stage() -> None:
    """Bit by bit, and no instance of the stage is taken for it."""
    world, plain = World(media_share=0.0), World(media_share=0.0, num_encode=5)
    for _ in range(6):
        found, expected = world.period(), plain.period()
        assert found.reason is expected.reason
        assert found.thresholds == expected.thresholds
        assert found.numbers == expected.numbers
        assert found.conversions == expected.conversions
    assert not with_encode(world)
    assert not with_encode(plain)


def test_a_step_of_the_stage_keeps_prefill_and_decode_from_changing_for_a_while() -> None:
    world = World(media_share=1.0, media_tokens=8000)
    first = world.period()
    assert first.reason is StepReason.CONVERT
    (wish,) = first.conversions
    assert wish.to_role == "encode"
    assert world.plan.changed_encode == {"near": (PERIOD_S, 1)}
    assert world.plan.changed == {}
    world.plan.ended(wish, "p-0", world.now_s + 60.0, is_converted=False)
    assert world.plan.changed_encode == {"near": (PERIOD_S + 60.0, 0)}
    # 240 s after the failure neither kind of conversion has dwelt long enough for another try.
    later = world.period()
    assert not [wish for wish in later.conversions if wish.to_role == "encode"]


def test_the_best_number_is_the_best_of_all() -> None:
    """Against trying every number with the best division of the others."""
    for stage_s in (0.05, 0.3, 1.0, 3.0):
        found = search(2, stage_s=stage_s)
        tried = {}
        for num in range(1, 9):
            others = 10 - num
            plan = best_plan(pair(others), bounds={"near": (1, others - 1)})
            need_s = stage_s * (1 - plan.offload_fraction)
            tried[num] = min(plan.system_rps(Mode.EXACT), num / need_s)
        assert found.best.rps == pytest.approx(max(*tried.values(), found.present.rps))
