"""The agent's small pure parts: instances, settings, reports, the admission of senders."""

import os
from pathlib import Path

import msgspec
import pytest
from agent_process import SMALL_LAYOUT
from pydantic import ValidationError
from simple_layouts import hybrid

from kvmanager.agent.config import AgentConfig, load
from kvmanager.agent.engines.instances import EngineNotServed, InstanceBook, UnknownLayout
from kvmanager.agent.engines.protocol import EngineHello
from kvmanager.agent.reports import landing_report, outbox_report
from kvmanager.agent.sender_admission import AdmittedLanding, SenderAdmission
from kvmanager.agent.transfer_io import OutboxProgress
from kvmanager.arena import Arena, ArenaSpace
from kvmanager.config_files.problems import FileError
from kvmanager.pool.placement import StatePlacement
from kvmanager.pool.shape import CacheShape
from kvmanager.transfers.records import LandingRecord, LandingSpec, OutboxRecord, OutboxSpec, State
from transport import (
    Endpoint,
    Refused,
    TlsFiles,
    TransferProgress,
    TransferState,
    TransportError,
)

OTHER = msgspec.structs.replace(SMALL_LAYOUT, weights="files:1")
PAIR = msgspec.structs.replace(SMALL_LAYOUT, tp_size=2)
TID = bytes(16)


def hello(instance: str, layout: object = SMALL_LAYOUT, rank: int = 0) -> EngineHello:
    assert isinstance(layout, type(SMALL_LAYOUT))
    return EngineHello(instance, "worker", 1, layout.encode(), rank, layout.tp_size)


def staged(given: EngineHello, stage: int, num_stages: int) -> EngineHello:
    return msgspec.structs.replace(given, pp_rank=stage, pp_size=num_stages)


class TestInstances:
    def test_ranks_of_an_instance_must_agree(self) -> None:
        book = InstanceBook()
        book.join(1, hello("a", PAIR, 0))
        with pytest.raises(EngineNotServed, match="instance a"):
            book.join(2, hello("a", OTHER))
        peer = book.join(2, hello("a", PAIR, 1))
        assert (peer.rank, peer.world_size) == (1, 2)
        assert [(e.instance, e.num_connections) for e in book.describe()] == [("a", 2)]
        assert book.describe()[0].kv_block_bytes == PAIR.block_bytes

    def test_workers_of_all_pipeline_stages_are_counted(self) -> None:
        """Each has the layout of all stages, and a rank of its own."""
        book = InstanceBook()
        workers = [(stage, rank) for stage in range(3) for rank in range(2)]
        peers = [
            book.join(number, staged(hello("a", PAIR, rank), stage, 3))
            for number, (stage, rank) in enumerate(workers)
        ]
        assert [(peer.rank, peer.world_size) for peer in peers] == [(n, 6) for n in range(6)]
        (engine,) = book.describe()
        assert (engine.pp_size, engine.tp_size) == (3, 2)
        with pytest.raises(EngineNotServed, match="with 3 pipeline stages, this connection has 1"):
            book.join(9, hello("a", PAIR))
        assert engine.layout_fingerprint == PAIR.fingerprint().hex()

    def test_ranks_of_an_instance_are_cut_in_one_way(self) -> None:
        book = InstanceBook()
        short, long = (hybrid(tp_size=2, block=block) for block in (16, 32))
        book.join(1, hello("a", short, 0))
        with pytest.raises(EngineNotServed, match=r"in blocks of 16.* has .*in blocks of 32"):
            book.join(2, hello("a", long, 1))
        assert book.layout_of("a") == short

    def test_engines_of_one_layout_may_have_other_blocks(self) -> None:
        book = InstanceBook()
        short, long, ranks = hybrid(block=16), hybrid(block=528), hybrid(block=16, tp_size=2)
        assert len({cut.fingerprint() for cut in (short, long, ranks)}) == 1
        fingerprint = short.fingerprint()
        cuts = {"a": (short, b"s"), "b": (long, b"l"), "c": (ranks, b"s"), "d": (ranks, b"")}
        for conn_id, (name, (cut, namespace)) in enumerate(cuts.items()):
            book.join(conn_id, msgspec.structs.replace(hello(name, cut), namespace=namespace))
        assert {name: book.layout_of(name) for name in cuts} == {
            name: cut for name, (cut, _) in cuts.items()
        }
        known = {shape.block_tokens: cut for cut, shape in book.cached_layouts(fingerprint)}
        assert known.keys() == {16, 528}
        assert known[528] == long
        for namespace, cut in ((b"s", short), (b"l", long)):
            assert book.cached_layout(fingerprint, namespace) == (cut, CacheShape.of(cut))
        assert book.cached_layout(fingerprint, b"")[0].fingerprint() == fingerprint
        with pytest.raises(UnknownLayout, match="no connected engine has cache namespace 78"):
            book.cached_layout(fingerprint, b"x")
        with pytest.raises(UnknownLayout, match="no connected engine has KV layout"):
            book.cached_layout(bytes(32), b"s")

    def test_the_last_one_takes_the_layout_along(self) -> None:
        book = InstanceBook()
        peers = [book.join(i, hello("a")) for i in (1, 2)]
        assert book.layout(None) == (SMALL_LAYOUT.fingerprint(), SMALL_LAYOUT)
        book.leave(peers[0])
        book.leave(peers[1])
        with pytest.raises(UnknownLayout, match="0 KV layouts"):
            book.layout(None)
        book.join(3, hello("a", OTHER))

    def test_equal_layouts_of_two_instances_are_one(self) -> None:
        book = InstanceBook()
        book.join(1, hello("a"))
        book.join(2, hello("b"))
        assert book.layout(None)[1] == SMALL_LAYOUT
        book.join(3, hello("c", OTHER))
        with pytest.raises(UnknownLayout, match="2 KV layouts"):
            book.layout(None)
        assert book.layout(OTHER.fingerprint())[1] == OTHER
        with pytest.raises(UnknownLayout, match="no connected engine"):
            book.layout(bytes(32))

    def test_what_of_a_cache_must_agree(self) -> None:
        book = InstanceBook()
        book.join(1, hello("a"))
        assert book.cached_layouts(SMALL_LAYOUT.fingerprint()) == []
        assert book.describe()[0].cache is None
        mine = msgspec.structs.replace(hello("a"), namespace=b"n")
        book.join(2, mine)
        assert book.cached_layouts(SMALL_LAYOUT.fingerprint()) == [(SMALL_LAYOUT, book.shape("a"))]
        model = book.describe()[0].cache
        assert model is not None
        assert (model.namespace, model.block_tokens) == ("6e", 16)
        assert model.parts == [(0, 8192, 0), (2, 10_000, 0)]
        with pytest.raises(EngineNotServed, match="another cache namespace"):
            book.join(3, msgspec.structs.replace(mine, namespace=b"m"))
        with pytest.raises(EngineNotServed, match="another KV layout"):
            book.join(3, msgspec.structs.replace(hello("b", OTHER), namespace=b"n"))

    def test_adapters_are_those_of_the_scheduler(self) -> None:
        book = InstanceBook()
        book.join(1, hello("a"))
        assert book.describe()[0].adapters == {}
        book.join(2, msgspec.structs.replace(hello("a"), adapters={"poet": "files:1"}))
        book.join(3, hello("a"))
        assert book.describe()[0].adapters == {"poet": "files:1"}

    def test_an_engine_without_an_encoder_is_told_apart(self) -> None:
        book = InstanceBook()
        book.join(1, hello("a"))
        book.join(2, msgspec.structs.replace(hello("b"), text_only=True))
        assert [item.text_only for item in book.describe()] == [False, True]

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"version": 1}, "version 1"),
            ({"tp_rank": 1}, "tp_rank 1 of"),
            ({"pp_rank": 2, "pp_size": 2}, "pp_rank 2 of pp_size 2"),
            ({"tp_size": 2}, "2, but the layout is for 1"),
            ({"layout": b"x"}, "layout"),
        ],
    )
    def test_what_cannot_be(self, change: dict[str, object], words: str) -> None:
        book = InstanceBook()
        with pytest.raises(EngineNotServed, match=words):
            book.join(1, msgspec.structs.replace(hello("a"), **change))
        assert book.describe() == []


class TestConfig:
    def test_options_win_over_the_file(self, tmp_path: Path) -> None:
        path = tmp_path / "agent.yaml"
        path.write_text("arena_gib: 2\nlanding_gib: 1.5\ntransport: {num_connections: 3}\n")
        config = load(path, {"arena_gib": 4.0, "control": None})
        assert config.num_blocks == (4 << 30) // config.block_bytes
        assert config.limits.landing_bytes == 3 << 29
        assert config.transport_config.num_connections == 3
        assert config.tls is None

    @pytest.mark.parametrize(
        ("advertise", "expected"),
        [
            (None, Endpoint("127.0.0.1", 5)),
            ("host", Endpoint("host", 5)),
            ("host:9", Endpoint("host", 9)),
            ("[::1]:9", Endpoint("::1", 9)),
            ("::1", Endpoint("::1", 5)),
            ("[::1]", Endpoint("::1", 5)),
        ],
    )
    def test_advertised(self, advertise: str | None, expected: Endpoint) -> None:
        config = AgentConfig(advertise=advertise)
        assert config.advertised(Endpoint("127.0.0.1", 5)) == expected

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("[1]", "mapping"),
            ("{", "agent.yaml"),
            ("arena_gib: -1", "arena_gib"),
            ("listen: 10.0.0.1:7100", "TLS"),
            ("listen: '[::1]:7100'\ncontrol: localhost", "control"),
            ("transport: {num_connections: 0}", "num_connections"),
            (
                "transport: {tls: x}",
                r"transport.tls \(line 1\): unknown key; known",
            ),
            ("eviction: fifo", "'lru'"),
            ("placement: {at_end: true}", "placement.at_end .*did you mean"),
            ("placement: {every_tokens: often}", "is not a number of tokens"),
            ("placement: [ends]", "placement .*dictionary"),
            ("ssd_dir: /tmp/x", "give ssd_gib too"),
            ("cache_gib: 0\narena_name: a", "nothing to keep"),
            ("arena_name: ../a", "arena_name"),
            ("digest: true\ntransport: {codec: fp8}", "digest: it is of the original bytes"),
        ],
    )
    def test_mistakes_are_named(self, tmp_path: Path, text: str, words: str) -> None:
        path = tmp_path / "agent.yaml"
        path.write_text(text)
        with pytest.raises(FileError, match=words):
            load(path, {})

    def test_what_the_cache_is_told(self) -> None:
        assert AgentConfig().num_cache_blocks is None
        assert AgentConfig(cache_gib=0).num_cache_blocks == 0
        assert AgentConfig(cache_gib=1, block_bytes=1 << 20).num_cache_blocks == 1024
        config = load(None, {"placement": {"every_tokens": 64, "ends": False}})
        assert config.placement == StatePlacement(ends=False, every_tokens=64)

    def test_either_of_digest_and_fp8_alone_is_fine(self) -> None:
        assert AgentConfig(digest=True, transport={"codec": "zstd"}).digest
        assert AgentConfig(transport={"codec": "fp8"}).transport_config.codec == "fp8"

    def test_other_hosts_need_tls_or_trust(self) -> None:
        with pytest.raises(ValidationError, match="TLS"):
            AgentConfig(listen="10.0.0.1:7100")
        files = {"tls_cert": Path("c"), "tls_key": Path("k"), "tls_ca": Path("a")}
        for extra, tls in (
            ({"trusted_network": True}, None),
            (files, TlsFiles(Path("c"), Path("k"), Path("a"))),
            ({"tls_dir": Path("d")}, TlsFiles(*map(Path, ("d/tls.crt", "d/tls.key", "d/ca.crt")))),
        ):
            config = AgentConfig(listen="10.0.0.1:7100", **extra)
            assert (config.listen, config.transport_config.tls) == ("10.0.0.1:7100", tls)

    def test_tls_files_lie_in_the_directory_under_cert_managers_names(self) -> None:
        files = AgentConfig(tls_dir=Path("d")).transport_config.tls
        assert files == TlsFiles(Path("d/tls.crt"), Path("d/tls.key"), Path("d/ca.crt"))

    @pytest.mark.parametrize("name", ["tls_cert", "tls_key", "tls_ca"])
    def test_tls_directory_and_files_exclude_each_other(self, name: str) -> None:
        files = dict.fromkeys(("tls_cert", "tls_key", "tls_ca"), "x")
        for settings in ({name: "x"}, files):
            with pytest.raises(FileError, match="give tls_dir, or tls_cert"):
                load(None, {"tls_dir": "d", **settings})


class News:
    def __init__(self) -> None:
        self.seen: list[tuple[object, ...]] = []

    def landing_accepted(self, transfer_id: bytes) -> None:
        self.seen.append(("accepted", transfer_id))

    def landing_complete(self, transfer_id: bytes) -> None:
        self.seen.append(("complete", transfer_id))

    def landing_failed(self, transfer_id: bytes, reason: str) -> None:
        self.seen.append(("failed", transfer_id, reason))


class TestSenderAdmission:
    def test_only_the_right_sender_gets_in(self, tmp_path: Path) -> None:
        arena = Arena.create(tmp_path, 1, 4096)
        space = ArenaSpace(arena, [(0, 1)], 100)
        news, refused = News(), []
        admission = SenderAdmission(news, lambda call, *arguments: call(*arguments), refused.append)
        token, fingerprint = os.urandom(32), os.urandom(32)
        admission.admit(TID, AdmittedLanding(token, fingerprint, space))
        for arguments, code in (
            ((bytes(15) + b"x", token, fingerprint, 100), "no_landing"),
            ((TID, bytes(32), fingerprint, 100), "bad_token"),
            ((TID, token, bytes(32), 100), "bad_layout"),
            ((TID, token, fingerprint, 99), "bad_size"),
        ):
            with pytest.raises(Refused) as caught:
                admission.accept(*arguments)
            assert caught.value.code == code
        assert refused == ["no_landing", "bad_token", "bad_layout", "bad_size"]
        assert admission.accept(TID, token, fingerprint, 100) is space
        admission.on_failed(TID, TransportError("idle", "silent"))
        assert news.seen == [("accepted", TID), ("failed", TID, "idle: silent")]
        admission.revoke(TID)
        with pytest.raises(Refused):
            admission.accept(TID, token, fingerprint, 100)
        arena.close()

    def test_a_sender_without_the_drafter_fills_the_beginning_and_zeros_follow(
        self, tmp_path: Path
    ) -> None:
        arena = Arena.create(tmp_path, 1, 4096)
        space, short = ArenaSpace(arena, [(0, 1)], 100), ArenaSpace(arena, [(0, 1)], 60)
        admission = SenderAdmission(News(), lambda call, *args: call(*args), lambda code: None)
        token, fingerprint = os.urandom(32), os.urandom(32)
        for enter in (admission.accept, admission.take):
            arena.memory[:100] = b"x" * 100
            admission.admit(TID, AdmittedLanding(token, fingerprint, space, short))
            with pytest.raises(Refused, match="holds 100 bytes, not 61"):
                enter(TID, token, fingerprint, 61)
            assert enter(TID, token, fingerprint, 60) in (short, None)
            assert bytes(arena.memory[:100]) == b"x" * 60 + bytes(40)
            admission.revoke(TID)
        arena.close()

    def test_an_engine_here_is_checked_like_a_sender_and_comes_alone(self, tmp_path: Path) -> None:
        arena = Arena.create(tmp_path, 1, 4096)
        space = ArenaSpace(arena, [(0, 1)], 100)
        refused: list[str] = []
        admission = SenderAdmission(News(), lambda call, *args: call(*args), refused.append)
        token, fingerprint = os.urandom(32), os.urandom(32)
        admission.admit(TID, AdmittedLanding(token, fingerprint, space))
        for arguments in (
            (bytes(15) + b"x", token, fingerprint, 100),
            (TID, bytes(32), fingerprint, 100),
            (TID, token, bytes(32), 100),
            (TID, token, fingerprint, 99),
        ):
            with pytest.raises(Refused):
                admission.take(*arguments)
        admission.take(TID, token, fingerprint, 100)
        for enter in (admission.take, admission.accept):
            with pytest.raises(Refused, match="no landing"):
                enter(TID, token, fingerprint, 100)
        admission.admit(TID, AdmittedLanding(token, fingerprint, space))
        admission.accept(TID, token, fingerprint, 100)
        with pytest.raises(Refused, match="already"):
            admission.take(TID, token, fingerprint, 100)
        assert refused == [
            *("no_landing", "bad_token", "bad_layout", "bad_size"),
            *("no_landing", "no_landing", "busy"),
        ]
        arena.close()


def progress(sent: int, completed_s: float | None) -> TransferProgress:
    return TransferProgress(TransferState.OPEN, 100, 90, sent, 80, 5, 1.0, 2.0, completed_s, 4)


class TestReports:
    def outbox(self) -> OutboxRecord:
        return OutboxRecord(OutboxSpec(TID, 100, 3, bytes(32), 9.0), [], 1.0, 10.0)

    def test_open_outbox_has_no_durations_yet(self) -> None:
        report = outbox_report(self.outbox(), OutboxProgress(progress(85, None), None))
        assert (report.state, report.sent_bytes, report.acked_bytes) == ("open", 85, 80)
        assert report.sent_bytes_at_prefill_end == 0
        assert report.opened_to_complete_s == report.prefill_end_to_complete_s == 0

    def test_complete_outbox(self) -> None:
        outbox = self.outbox()
        outbox.state, outbox.prefill_end_s = State.COMPLETE, 3.0
        outbox.prefill_s, outbox.marks = 1.25, [(0.5, 10, 5)]
        report = outbox_report(outbox, OutboxProgress(progress(100, 4.5), 70))
        assert report.sent_bytes_at_prefill_end == 70
        assert report.prefill_end_to_complete_s == 1.5
        assert report.opened_to_complete_s == 3.5
        assert report.first_sent_to_complete_s == 2.5
        assert (report.prefill_s, report.progress) == (1.25, ((0.5, 10, 5),))

    def test_complete_before_the_prefill_ended_means_everything_was_sent(self) -> None:
        outbox = self.outbox()
        outbox.state = State.COMPLETE
        report = outbox_report(outbox, OutboxProgress(progress(100, 4.5), None))
        assert report.sent_bytes_at_prefill_end == 100
        assert report.prefill_end_to_complete_s == 0

    def test_landing(self) -> None:
        spec = LandingSpec(TID, bytes(32), 100, 3, bytes(32), b"", 9.0)
        landing = LandingRecord(spec, [], 1.0, 10.0)
        assert landing_report(landing, None).acked_bytes == 0
        assert landing_report(landing, progress(85, None)).acked_bytes == 80
        landing.state, landing.ended_s = State.CLAIMED, 4.0
        report = landing_report(landing, None)
        assert (report.state, report.acked_bytes) == ("complete", 100)
        assert report.opened_to_complete_s == 3.0
