"""`prfaas plan live` without a gateway: its tables, and what it says when it cannot ask."""

import io

import msgspec
from rich.console import Console
from typer.testing import CliRunner

from deploy.cli import app
from deploy.gateway.scheduling.plan_overview import (
    ClusterModel,
    EncodeNow,
    LinkModel,
    ModelPlanNow,
    PlanDecision,
    PlanOverview,
    RegionModel,
    TrafficNow,
)
from deploy.ops.plan import print_plan
from scheduler.live.long_term.model_plan import PlanGoal

UNKNOWN = ModelPlanNow(
    model="tiny",
    num_prefill={"near": 3},
    num_decode={"near": 5},
    unknown="no request has ended yet",
)
NOTHING_YET = PlanOverview(
    mode="act",
    period_s=300.0,
    next_step_s=120.0,
    thresholds={"far": 8000.0},
    models=[UNKNOWN],
)
GOAL = PlanGoal(
    num_prefill={"near": 4},
    num_decode={"near": 4},
    thresholds={"far": 19_400.0},
    max_rps=3.2,
    bottlenecks=["decode of near"],
)
TINY = ModelPlanNow(
    model="tiny",
    num_prefill={"near": 4},
    num_decode={"near": 4},
    traffic=TrafficNow(
        num_requests=900.0,
        rate_rps=2.5,
        window_s=3600.0,
        input_tokens=27_000.0,
        uncached_tokens=21_000.0,
        uncached_p90_tokens=60_000.0,
        output_tokens=1024.0,
        hit_ratio=0.22,
    ),
    region=RegionModel(
        clusters=[
            ClusterModel(
                name="far",
                num_instances=4,
                prefill=(0.39, 4.2e-5, 1e-10),
                prefill_s=[(1024, 0.43), (8192, 0.74)],
                num_seen=120,
                error=0.04,
            ),
            ClusterModel(
                name="near",
                num_instances=8,
                prefill=(0.45, 1.3e-4, 2.7e-10),
                prefill_s=[(1024, 0.58), (8192, 1.5)],
                num_seen=300,
                decode_slots=20,
                step_s=0.025,
            ),
        ],
        links=[LinkModel(source="far", target="near", bytes_per_s=1.25e10, rtt_s=0.02)],
        kv_fixed_bytes=1.8e8,
        kv_token_bytes=17_280.0,
        notes=["other is left out: it had no usable instance"],
    ),
)
BEGAN = PlanDecision(
    model="tiny",
    at_s=1e9,
    age_s=20.0,
    reason="convert",
    done=["began to convert d-0 of near from decode to prefill: it is the first"],
    numbers={"gain": 0.08},
    goal=GOAL,
)
PLANNED = PlanOverview(
    mode="act",
    period_s=300.0,
    next_step_s=12.0,
    thresholds={"far": 19_000.0},
    conversion="d-0 of near from decode to prefill: draining",
    models=[TINY],
    decisions=[
        BEGAN,
        PlanDecision(
            model="tiny", at_s=1e9 - 300, age_s=320.0, reason="not_known", done=["did nothing"]
        ),
    ],
)


def printed(found: PlanOverview, **options: int) -> str:
    console = Console(file=io.StringIO(), width=120)
    print_plan(console, found, **options)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_a_plan_is_shown_with_what_it_rests_on() -> None:
    text = printed(PLANNED)
    for part in (
        "mode act, every 5 min, next in 12 s",
        "planned threshold of far, tokens",
        "19,400",
        "near prefill instances",
        "converting d-0 of near from decode to prefill: draining",
        "2.50 requests/s, prompts of 27,000 tokens, 21,000 of them uncached (P90 60,000)",
        "far to near: 100Gbit, round trip 20ms",
        "740ms",
        "KVCache: 171.7 MiB and 16.5 MiB per 1000 tokens",
        "other is left out",
        "began to convert d-0",
        "8.0%",
        "5 min",
    ):
        assert part in text, part
    assert "not_known" not in printed(PLANNED, num_decisions=1)


def test_several_models_are_shown_apart() -> None:
    other = ModelPlanNow(
        model="other", num_prefill={"near": 1}, num_decode={"near": 2}, unknown="no report"
    )
    text = printed(msgspec.structs.replace(PLANNED, models=[TINY, other]))
    for part in (
        "model tiny",
        "model other",
        "no plan: no report",
        "near prefill instances of tiny",
        "near decode instances of other",
    ):
        assert part in text, part
    assert "of tiny" not in printed(PLANNED)


def test_an_encode_stage_is_shown_where_there_is_one() -> None:
    assert "encode" not in printed(PLANNED)
    goal = msgspec.structs.replace(GOAL, num_encode={"near": 3})
    decision = msgspec.structs.replace(PLANNED.decisions[0], goal=goal)
    assert TINY.traffic is not None
    traffic = msgspec.structs.replace(TINY.traffic, media_tokens_per_s=1234.0)
    encode = EncodeNow(stage_s=0.12, own_s=0.3)
    model = msgspec.structs.replace(TINY, num_encode={"near": 1}, encode=encode, traffic=traffic)
    found = msgspec.structs.replace(PLANNED, models=[model], decisions=[decision])
    text = printed(found)
    for part in (
        "near encode instances",
        "1,234 media tokens/s to encode",
        "encoding: 120ms",
        "300ms on",
    ):
        assert part in text, part


def test_without_a_plan_it_says_why() -> None:
    text = printed(NOTHING_YET)
    assert "no plan: no request has ended yet" in text
    assert "8,000" in text
    off = PlanOverview(
        mode="off",
        period_s=300.0,
        next_step_s=None,
        thresholds={},
    )
    assert "mode off: nothing is re-planned" in printed(off)


def test_a_gateway_that_is_not_there_is_named() -> None:
    for options in ([], ["--json"]):
        result = CliRunner().invoke(
            app, ["plan", "live", "--gateway", "http://127.0.0.1:1", *options]
        )
        assert result.exit_code == 3
        assert "127.0.0.1:1" in result.output
