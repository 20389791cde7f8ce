"""`prfaas doctor link` without agents: samples to numbers, names to agents, output, arguments."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from report_cases import agent_status
from rich.console import Console
from typer.testing import CliRunner

from deploy.cli import app
from deploy.region.doctor import report
from deploy.region.doctor.agents import UnknownAgent, find_pair, is_address
from deploy.region.doctor.diagnosis import diagnose
from deploy.region.doctor.measurement import Measurement, summarise
from deploy.region.doctor.probe import CannotMeasure, ProbeRun, ProbeSample
from deploy.region.launch.rundir import RegionState, RunLock, WhichRun
from deploy.region.spec.loading import load_region
from kvmanager.agent.messages import StatusReply
from kvmanager.agent.probe_messages import AgentLoad, KernelTcp, ProbeStatusReply
from netmon.tcp_info import parse
from transport import ConnectionState, LinkState, TuningWindow

run = CliRunner().invoke
MIB = 1 << 20
EXAMPLE = Path(__file__).parents[4] / "deploy" / "region" / "examples" / "demo.yaml"
NO_INFO = parse(bytes(280))


def connection(number: int, at_s: float) -> ConnectionState:
    """Two thirds busy, a quarter of that limited by the send buffer; 1 byte in 100 sent again."""
    assert NO_INFO is not None
    info = replace(
        NO_INFO,
        rtt_s=0.03,
        min_rtt_s=0.02,
        sent_bytes=int(at_s * 50 * MIB),
        retransmitted_bytes=int(at_s * 50 * MIB / 100),
        busy_s=at_s * 2 / 3,
        sndbuf_limited_s=at_s / 6,
    )
    return ConnectionState(number, True, info, congestion="bbr", send_buffer_bytes=number * MIB)


def sample(at_s: float, *, rate_mib: float = 100.0, state: str = "open") -> ProbeSample:
    """At `at_s`: our probe and as much of others on two connections."""
    acked = int(at_s * rate_mib * MIB)
    link = LinkState(
        endpoint="b:1",
        width=2,
        frame_bytes=256 << 10,
        phase="steady",
        measured=TuningWindow(),
        codec="raw",
        codec_reason="",
        acked_bytes=acked,
        connections=[connection(1, at_s), connection(2, at_s)],
    )
    load = AgentLoad(100.0 + at_s, 10.0 + at_s / 2, 50.0 + 3 * at_s, 4, 2.0)
    sender = ProbeStatusReply(
        state=state,  # type: ignore[arg-type]
        error="",
        nbytes=1 << 30,
        done_bytes=acked // 2,
        load=load,
        kernel=KernelTcp(tcp_wmem_bytes=4 * MIB),
        num_connections=2,
        link=link,
        congestion="bbr",
        max_connections=16,
    )
    return ProbeSample(sender, msgspec.structs.replace(sender, link=None, done_bytes=acked // 2))


def status() -> StatusReply:
    return agent_status(
        arena_bytes=100 * MIB,
        free_bytes=60 * MIB,
        landing_bytes=30 * MIB,
        landing_cap_bytes=50 * MIB,
        data_endpoint="b:1",
    )


def steady(seconds: int = 4) -> ProbeRun:
    return ProbeRun(
        "b:1", [sample(tick / 4) for tick in range(4 * seconds + 1)], status(), status()
    )


def summary() -> Measurement:
    return summarise(steady())


class TestSamples:
    def test_numbers_of_the_plateau(self) -> None:
        measured = summary()
        assert measured.rate_bytes_per_s == pytest.approx(100 * MIB, rel=1e-3)
        assert measured.other_bytes_per_s == pytest.approx(50 * MIB, rel=1e-3)
        assert (measured.width, measured.max_connections, measured.seconds_s) == (2, 16, 4.0)
        assert measured.sender.agent_cpus == pytest.approx(0.5)
        assert measured.sender.host_busy == pytest.approx(0.75)
        assert measured.landing_memory.free_bytes == 20 * MIB
        assert not measured.is_rising
        path = measured.path
        assert (path.rtt_s, path.min_rtt_s, path.congestion) == (0.03, 0.02, ("bbr",))
        assert path.loss == pytest.approx(0.01, rel=1e-3)
        assert path.busy == pytest.approx(2 / 3)
        assert path.sndbuf_limited == pytest.approx(0.25)
        assert path.send_buffer_bytes == 2 * MIB

    def test_slow_start_does_not_count(self) -> None:
        run = steady()
        begin = [
            ProbeSample(
                msgspec.structs.replace(item.sender, link=replace(item.sender.link, acked_bytes=0)),
                item.receiver,
            )
            for item in run.samples[:4]
            if item.sender.link is not None
        ]
        measured = summarise(replace(run, samples=begin + run.samples[4:]))
        assert measured.rate_bytes_per_s == pytest.approx(100 * MIB, rel=1e-3)

    def test_a_rate_that_rises(self) -> None:
        samples = [sample(tick / 4, rate_mib=20.0 * tick) for tick in range(17)]
        assert summarise(ProbeRun("b:1", samples, status(), status())).is_rising

    def test_too_little_to_tell(self) -> None:
        run = steady()
        for few in (run.samples[:2], [sample(1.0, state="complete")], []):
            with pytest.raises(CannotMeasure, match="--mib"):
                summarise(replace(run, samples=few))

    def test_a_halt(self) -> None:
        run = steady()
        halted = [sample(tick / 4, rate_mib=0.0) for tick in range(17)]
        with pytest.raises(CannotMeasure, match="came to a halt"):
            summarise(replace(run, samples=halted))


class TestOutput:
    def test_json(self) -> None:
        measured = summary()
        diagnosis = diagnose(measured, 1e9)
        found = json.loads(
            msgspec.json.encode(report.as_json(("a", "b"), "b:1", measured, diagnosis))
        )
        assert (found["from"], found["to"], found["endpoint"]) == ("a", "b", "b:1")
        assert found["limiting_stage"] == str(diagnosis.stage)
        assert found["healthy"] is diagnosis.is_healthy
        assert found["measured"]["path"]["congestion"] == ["bbr"]
        assert found["window_bytes_per_s"] == pytest.approx(diagnosis.window_bytes_per_s)
        assert {"host", "name", "present", "wanted", "fix", "is_wrong"} == set(found["kernel"][0])
        assert {"what", "evidence", "fix", "mends"} == set(found["findings"][0])

    def test_unknown_limits_are_null(self) -> None:
        measured = replace(summary(), sender_kernel=KernelTcp(), receiver_kernel=KernelTcp())
        measured = replace(measured, path=replace(measured.path, send_buffer_bytes=0))
        found = report.as_json(("a", "b"), "b:1", measured, diagnose(measured))
        assert found["window_bytes_per_s"] is None
        assert "windows allow unknown" in self.printed(measured)

    def test_tables(self) -> None:
        text = self.printed(replace(summary(), rate_bytes_per_s=10 * MIB))
        for words in ("a → b", "30ms, at least 20ms", "bbr in use", "net.ipv4.tcp_wmem max"):
            assert words in text
        assert "83.89Mbit achieved" in text
        assert "something to mend" in text

    @staticmethod
    def printed(measured: Measurement) -> str:
        console = Console(file=io.StringIO(), width=200)
        console.print(report.render(("a", "b"), "b:1", measured, diagnose(measured, 1e9)))
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()


class TestNames:
    @pytest.fixture
    def base(self, tmp_path: Path) -> Iterator[Path]:
        """The state of a running region "demo", whose launcher is this process."""
        region = load_region(EXAMPLE, {"MODEL": "/m"})
        link = region.links[0].model_copy(
            update={"endpoints": {"b1": "127.0.0.1:9"}, "emulate": None}
        )
        region = region.model_copy(update={"links": (link,)})
        root = tmp_path / "demo"
        lock = RunLock(root)
        (root / "region.json").write_text(region.model_dump_json(by_alias=True))
        state = RegionState(
            region="demo",
            phase="running",
            launcher_pid=os.getpid(),
            started_s=0.0,
            gateway_url="",
            region_file=str(root / "region.json"),
            processes=(),
            relays={},
            agents={"a1": "127.0.0.1:1", "b1": "127.0.0.1:2"},
        )
        (root / "state.json").write_bytes(msgspec.json.encode(state))
        yield tmp_path
        lock.release()

    @pytest.mark.parametrize("names", [("a1", "b1"), ("prefill-a", "pd-b"), ("a1-prefill", "b1")])
    def test_nodes_clusters_and_instances(self, base: Path, names: tuple[str, str]) -> None:
        pair = find_pair(*names, base=base)
        assert (pair.sender.control, pair.receiver.control) == ("127.0.0.1:1", "127.0.0.1:2")
        assert pair.via == ("127.0.0.1", 9)

    def test_the_other_way_is_no_link(self, base: Path) -> None:
        assert find_pair("b1", "a1", base / "demo").via is None
        pair = find_pair("b1", "10.0.0.1:7101", region="demo", base=base)
        assert pair.receiver.name == "10.0.0.1:7101"

    def test_unknown_names(self, base: Path) -> None:
        with pytest.raises(UnknownAgent, match="did you mean 'b1-decode'"):
            find_pair("a1", "b1-decod", base=base)

    def test_no_region(self, base: Path, tmp_path: Path) -> None:
        with pytest.raises(WhichRun, match="give control ports as host:port"):
            find_pair("a1", "b1", tmp_path / "empty", base=base)

    def test_addresses_need_no_region(self, tmp_path: Path) -> None:
        pair = find_pair("[::1]:1", "h:2", base=tmp_path)
        assert (pair.sender.control, pair.receiver.control) == ("[::1]:1", "h:2")
        assert pair.credentials is None
        assert not any(map(is_address, ("a1", "h:", ":1", "h:x", "h:70000")))


class TestArguments:
    def test_help_teaches(self) -> None:
        result = run(app, ["doctor", "link", "--help"])
        assert result.exit_code == 0
        for words in ("connections x window / round trip", "Exit status", "--rate-gbps", "--via"):
            assert words in result.output
        assert "link" in run(app, ["doctor", "--help"]).output

    @pytest.mark.parametrize(
        ("words", "status", "message"),
        [
            (["h:1", "h:2", "--via", "nowhere"], 2, "--via"),
            (["h:1", "h:2", "--seconds", "0"], 2, "--seconds"),
            (["h:1", "h:2", "--mib", "8193"], 2, "--mib"),
            (["a1", "b1", "--run-dir", "/nonexistent"], 1, "no region runs"),
        ],
    )
    def test_wrong_arguments(self, words: list[str], status: int, message: str) -> None:
        result = run(app, ["doctor", "link", *words])
        assert result.exit_code == status
        assert message in result.output
