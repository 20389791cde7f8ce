"""The alert rules, tried by `promtool test rules`: each fires on its fault, and not on less."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.observability import alert_rules

ROOT = Path(__file__).parents[3]
RULES: dict[str, dict[str, Any]] = {
    rule["alert"]: rule
    for group in yaml.safe_load(alert_rules())["groups"]
    for rule in group["rules"]
}
GATEWAY = 'region="r",job="prfaas-gateway",instance="gateway",node="b1"'
LINK = f'{GATEWAY},source="far",target="home"'
AGENT = 'region="r",job="prfaas-agent",instance="agent.b1",node="b1",cluster="home"'


@dataclass(frozen=True)
class Case:
    """Series with a sample every 15 s (`fires` and `quiet`: name and values), the labels and the
    value of the alert that must fire at `at`, and not a minute or more before.
    """

    fires: dict[str, str]
    quiet: dict[str, str]
    at: str
    labels: dict[str, str]
    value: str
    not_yet: str = "0m"


def decisions(reason: str) -> str:
    labels = f'{GATEWAY},model_name="m",route="local",reason="{reason}"'
    return f"prfaas_gateway_decisions_total{{{labels}}}"


def failures() -> str:
    labels = f'{GATEWAY},target="far",code="timeout"'
    return f"prfaas_gateway_prefill_failures_total{{{labels}}}"


def staging_waits() -> str:
    labels = 'region="r",cluster="far",instance="e"'
    return f"vllm:prfaas_staging_wait_seconds_total{{{labels}}}"


def expiry() -> str:
    return f'prfaas_certificate_expiry_timestamp_seconds{{{AGENT},certificate="own"}}'


def admissions(verdict: str, reason: str) -> str:
    return f'prfaas_gateway_admission_total{{{GATEWAY},verdict="{verdict}",reason="{reason}"}}'


def requests(status: int) -> str:
    return f'prfaas_gateway_requests_total{{{GATEWAY},model_name="m",status="{status}"}}'


def condition(name: str) -> str:
    return f'prfaas_gateway_link_condition{{{LINK},condition="{name}"}}'


def ttft(le: str) -> str:
    return (
        f'prfaas_gateway_time_to_first_token_seconds_bucket{{{GATEWAY},model_name="m",le="{le}"}}'
    )


def always(value: float) -> str:
    """For an hour and a half."""
    return f"{value}x360"


def steadily(per_sample: float) -> str:
    """A counter that grows at this rate."""
    return f"0+{per_sample}x360"


ON_GATEWAY = {"region": "r", "job": "prfaas-gateway", "instance": "gateway", "node": "b1"}
ON_LINK = {"region": "r", "source": "far", "target": "home"}
CASES = {
    "PrfaasGatewayDown": Case(
        {f"up{{{GATEWAY}}}": "1 0x20"},
        {f"up{{{GATEWAY}}}": "1 0 1x20"},
        *("1m", ON_GATEWAY, "0", "15s"),
    ),
    "PrfaasProcessDown": Case(
        {f"up{{{AGENT}}}": "1 0x20"},
        {f"up{{{AGENT}}}": "1 0 0 1x20", f"up{{{GATEWAY}}}": "0x20"},
        "90s",
        {
            "region": "r",
            "job": "prfaas-agent",
            "instance": "agent.b1",
            "node": "b1",
            "cluster": "home",
        },
        "0",
        "45s",
    ),
    # A cluster's front in one gateway sees no instance, in another it does: that one is believed.
    "PrfaasNoDecodeInstance": Case(
        {f'prfaas_pd_healthy_instances{{{GATEWAY},cluster="home"}}': "1 0x20"},
        {
            f'prfaas_pd_healthy_instances{{{GATEWAY},cluster="home"}}': "0x20",
            'prfaas_pd_healthy_instances{region="r",instance="gateway.b2",cluster="home"}': "1x20",
        },
        *("1m", {"region": "r", "cluster": "home"}, "0", "15s"),
    ),
    "PrfaasNoPrefillInstance": Case(
        {f'prfaas_prefill_healthy_instances{{{GATEWAY},cluster="far"}}': "1 0x20"},
        {f'prfaas_prefill_healthy_instances{{{GATEWAY},cluster="far"}}': "1 0 0 1x20"},
        *("90s", {"region": "r", "cluster": "far"}, "0", "45s"),
    ),
    "PrfaasLoopBlocked": Case(
        {f'prfaas_agent_loop_longest_own_gap_seconds{{{AGENT},within="minute"}}': always(3)},
        {
            f'prfaas_agent_loop_longest_own_gap_seconds{{{AGENT},within="minute"}}': "3x8 0.2x60",
            f'prfaas_agent_loop_longest_own_gap_seconds{{{AGENT},within="start"}}': always(3),
        },
        "6m",
        {"region": "r", "job": "prfaas-agent", "instance": "agent.b1", "node": "b1"},
        "3s",
        "4m",
    ),
    # The clock of a test begins at 0.
    "PrfaasCertificateExpires": Case(
        {expiry(): always(345960)},
        {expiry(): always(700000)},
        *("6m", {"region": "r", "instance": "agent.b1", "node": "b1"}, "4d 0h 0m 0s", "4m"),
    ),
    "PrfaasGatewayAlone": Case(
        {f"prfaas_gateway_shared_joined{{{GATEWAY}}}": "1 0x20"},
        {f"prfaas_gateway_shared_joined{{{GATEWAY}}}": "1 0 0 1x20"},
        *("90s", ON_GATEWAY, "0", "45s"),
    ),
    "PrfaasLinkDown": Case(
        {condition("down"): "0 1x20"},
        {condition("down"): "0 1 0x20", condition("congested"): "1x20"},
        *("1m", ON_LINK, "1", "15s"),
    ),
    "PrfaasLinkCongested": Case(
        {condition("congested"): "1x20"},
        {condition("congested"): "0x20 1x4 0x20"},
        *("90s", ON_LINK, "100%", "30s"),
    ),
    "PrfaasLinkRising": Case(
        {condition("rising"): "1x360"},
        {condition("rising"): "1x4 0x356"},
        *("30m", ON_LINK, "100%", "4m"),
    ),
    # One of two gateways that hears of the link is enough.
    "PrfaasLinkSilent": Case(
        {f"prfaas_gateway_link_age_seconds{{{LINK}}}": always(90)},
        {
            f"prfaas_gateway_link_age_seconds{{{LINK}}}": always(90),
            'prfaas_gateway_link_age_seconds{region="r",source="far",target="home"}': always(1),
        },
        *("90s", ON_LINK, "1m 30s", "45s"),
    ),
    "PrfaasErrors": Case(
        {requests(200): steadily(90), requests(503): steadily(10)},
        {requests(200): steadily(1000), requests(503): steadily(1), requests(429): steadily(99)},
        *("10m", {"region": "r"}, "10%", "2m"),
    ),
    "PrfaasRefusedForLoad": Case(
        {
            admissions("admitted", "admitted"): steadily(75),
            admissions("refused", "decode_load"): steadily(25),
        },
        {
            admissions("admitted", "admitted"): steadily(75),
            admissions("refused", "tenant_rate"): steadily(25),
        },
        *("10m", {"region": "r"}, "25%", "2m"),
    ),
    "PrfaasTenantAtLimit": Case(
        {admissions("refused", "tenant_rate"): steadily(15)},
        {
            admissions("refused", "tenant_rate"): steadily(1),
            admissions("refused", "decode_load"): steadily(15),
        },
        *("10m", {"region": "r", "reason": "tenant_rate"}, "1", "30s"),
    ),
    "PrfaasSlowFirstToken": Case(
        {ttft("10"): steadily(0), ttft("20"): steadily(10), ttft("+Inf"): steadily(10)},
        {ttft("10"): steadily(96), ttft("20"): steadily(100), ttft("+Inf"): steadily(100)},
        *("20m", {"region": "r", "model_name": "m"}, "19.5s", "9m"),
    ),
    "PrfaasPredictionsOff": Case(
        {
            f'prfaas_gateway_ttft_prediction_median_error_ratio{{{GATEWAY},model_name="m",place="far"}}'
            "": always(0.75)
        },
        {
            f'prfaas_gateway_ttft_prediction_median_error_ratio{{{GATEWAY},model_name="m",place="far"}}'
            "": always(0.25)
        },
        *("31m", {"region": "r", "model_name": "m", "place": "far"}, "75%", "29m"),
    ),
    "PrfaasPrefillClusterNotUsed": Case(
        {decisions("no_landing_room"): steadily(25), decisions("above_threshold"): steadily(75)},
        {decisions("below_threshold"): steadily(75), decisions("link_busy"): steadily(5)},
        *("12m", {"region": "r", "reason": "no_landing_room"}, "25%", "5m"),
    ),
    "PrfaasPrefillsFail": Case(
        {failures(): steadily(15)},
        {failures(): "0x8 1x352"},
        *("10m", {"region": "r", "target": "far", "code": "timeout"}, "1", "30s"),
    ),
    "PrfaasLandingsFail": Case(
        {decisions("reserve_failed"): steadily(15)},
        {decisions("reserve_failed"): "0x8 1x352"},
        *("10m", {"region": "r"}, "1", "30s"),
    ),
    "PrfaasDecodesFail": Case(
        {decisions("decode_engine_failed"): steadily(15)},
        {decisions("decode_engine_failed"): "0x8 1x352"},
        *("10m", {"region": "r"}, "1", "30s"),
    ),
    "PrfaasLandingsFull": Case(
        {
            f"prfaas_agent_landing_room_bytes{{{AGENT}}}": always(10),
            f"prfaas_agent_landing_limit_bytes{{{AGENT}}}": always(1000),
        },
        {
            f"prfaas_agent_landing_room_bytes{{{AGENT}}}": "10x8 500x352",
            f"prfaas_agent_landing_limit_bytes{{{AGENT}}}": always(1000),
        },
        *("6m", {"region": "r", "cluster": "home", "node": "b1"}, "1%", "4m"),
    ),
    "PrfaasCacheDamaged": Case(
        {
            f"prfaas_agent_cache_wrong_parts_total{{{AGENT}}}": "0 0 7x358",
            f"prfaas_agent_cache_ssd_failures_total{{{AGENT}}}": always(0),
        },
        {
            f"prfaas_agent_cache_wrong_parts_total{{{AGENT}}}": always(7),
            f"prfaas_agent_cache_ssd_failures_total{{{AGENT}}}": always(0),
        },
        *("60m", {"region": "r", "node": "b1"}, "7", "15s"),
    ),
    "PrfaasCopiesHoldSteps": Case(
        {staging_waits(): steadily(3)},
        {staging_waits(): steadily(0.3)},
        *("20m", {"region": "r", "cluster": "far", "instance": "e"}, "20%", "9m"),
    ),
}

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="promtool is not installed; `make system` does that",
)


def rendered(template: str, case: Case) -> str:
    """An annotation as Prometheus fills it in."""
    text = re.sub(r"{{ \$labels\.(\w+) }}", lambda found: case.labels[found[1]], template)
    return re.sub(r"{{ \$value[^}]*}}", case.value, text)


def expected(name: str, case: Case) -> dict[str, Any]:
    rule = RULES[name]
    annotations = {key: rendered(text, case) for key, text in rule["annotations"].items()}
    return {"exp_labels": rule["labels"] | case.labels, "exp_annotations": annotations}


def trials(name: str, case: Case) -> list[dict[str, Any]]:
    """Two tests in promtool's words: the fault, and something less."""

    def trial(series: dict[str, str], checks: list[dict[str, Any]]) -> dict[str, Any]:
        given = [{"series": key, "values": values} for key, values in series.items()]
        return {"interval": "15s", "input_series": given, "alert_rule_test": checks}

    def check(at: str, *alerts: dict[str, Any]) -> dict[str, Any]:
        return {"eval_time": at, "alertname": name, "exp_alerts": list(alerts)}

    fires = [check(case.not_yet), check(case.at, expected(name, case))]
    quiet = [check(at) for at in (case.not_yet, "1m", "90s", "6m", "12m", case.at, "80m")]
    return [trial(case.fires, fires), trial(case.quiet, quiet)]


def test_every_alert_has_a_case() -> None:
    assert list(CASES) == list(RULES)


def test_every_alert_says_how_bad_what_and_where_to_read() -> None:
    for name, rule in RULES.items():
        assert name.startswith("Prfaas")
        assert rule["labels"]["severity"] in ("critical", "warning"), name
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}, name
        assert "$value" in rule["annotations"]["description"], name
        assert (ROOT / rule["annotations"]["runbook_url"]).is_file(), name


def test_alerts_find_the_runbook_on_a_site() -> None:
    text = alert_rules("https://docs.example.org/prfaas/")
    assert "https://docs.example.org/prfaas/runbook/conditions/down.html\n" in text
    assert "docs/runbook/" not in text.replace("docs.example.org", "")


@needs_promtool
def test_promtool_fires_each_alert_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "alerts.yaml").write_text(alert_rules())
    tests = [trial for name, case in CASES.items() for trial in trials(name, case)]
    document = {"rule_files": ["alerts.yaml"], "evaluation_interval": "15s", "tests": tests}
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    said = subprocess.run(
        ["promtool", "test", "rules", str(tmp_path / "tests.yaml")],
        *(),
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert said.returncode == 0, said.stdout + said.stderr
