"""Many transfers through small arenas, cancelled, expired and given up at random: what lands is
always what was sent, all that nobody disturbed lands, and every block comes back. Between two
agents, and inside one, where engines write into each other's landings."""

import hashlib
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_process import SMALL_LAYOUT, AgentProcess, DrivenEngine
from arena_bytes import put_bytes
from eventually import wait_until

from kvmanager.agent.engines.protocol import Landed
from kvmanager.agent.messages import Cancel, CancelReply, OpenOutboxReply
from kvmanager.arena import Arena
from transport.rpc import RpcError

NUM_TOKENS = 2000
NBYTES = SMALL_LAYOUT.transfer_bytes(NUM_TOKENS)
NUM_TRANSFERS = 60
LONG_S = 120.0
"""A lease that nothing here outlasts."""


@pytest.fixture(params=["between two agents", "inside one"])
def agents(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[list[AgentProcess]]:
    with AgentProcess(tmp_path / "s") as sender:
        if request.param == "inside one":
            yield [sender, sender]
        else:
            with AgentProcess(tmp_path / "r") as receiver:
                yield [sender, receiver]


def content_of(transfer_id: bytes) -> bytes:
    return random.Random(transfer_id).randbytes(NBYTES)


class Consumer(DrivenEngine):
    """Compares what landed, slowly, then lets it go."""

    def __init__(self, agent: AgentProcess) -> None:
        super().__init__(agent, "decode")
        self.wrong: set[str] = set()
        self.landed: set[str] = set()

    def on_landed(self, landed: Landed) -> None:
        transfer_id = landed.transfer_id
        self.heard[transfer_id.hex()] = landed
        expected = hashlib.sha256(content_of(transfer_id)).digest()
        time.sleep(0.005)
        if hashlib.sha256(self.read(transfer_id.hex(), NBYTES)).digest() != expected:
            self.wrong.add(transfer_id.hex())
        self.landed.add(transfer_id.hex())
        self.client.release(transfer_id)


class Producer(DrivenEngine):
    """Fills outboxes in a thread each; stops writing before it lets a failed one go."""

    def __init__(self, agent: AgentProcess) -> None:
        super().__init__(agent, "prefill")
        self.releases_failed = False
        self._writing = threading.Lock()
        self._failed: set[bytes] = set()

    def fill(
        self,
        transfer_id: bytes,
        outbox: OpenOutboxReply,
        rng: random.Random,
        *,
        gives_up: bool,
    ) -> None:
        arena = self.client.arena
        assert arena is not None
        if not self.client.attach(transfer_id, outbox.attempt):
            return
        size = 50_000
        pieces = list(range(0, NBYTES, size))
        rng.shuffle(pieces)
        for number, offset in enumerate(pieces):
            if gives_up and number == len(pieces) // 2:
                self.client.abort(transfer_id, outbox.attempt, "gave up")
                return
            if not self._write_piece(arena, transfer_id, outbox, (offset, size)):
                return
            time.sleep(rng.random() * 0.004)

    def _write_piece(
        self,
        arena: Arena,
        transfer_id: bytes,
        outbox: OpenOutboxReply,
        piece: tuple[int, int],
    ) -> bool:
        offset, size = piece
        data = content_of(transfer_id)[offset : offset + size]
        # Before the lock, for which `on_failed` may hold up what the agent says next.
        runs = self.place(outbox)
        with self._writing:
            if transfer_id in self._failed:
                return False
            put_bytes(arena, runs, data, offset)
        self.client.ready(transfer_id, outbox.attempt, [(offset, min(size, NBYTES - offset))])
        return True

    def on_failed(self, transfer_id: bytes, reason: str, attempt: int) -> None:
        with self._writing:
            self._failed.add(transfer_id)
        self.client.release(transfer_id, attempt)


@pytest.mark.slow
def test_what_lands_is_what_was_sent(agents: list[AgentProcess]) -> None:
    sender, receiver = agents
    rng = random.Random(7)
    threads: list[threading.Thread] = []
    with Producer(sender) as producer, Consumer(receiver) as consumer:
        began = 0
        undisturbed: set[str] = set()
        while began < NUM_TRANSFERS:
            leases_s = rng.choice([0.3, LONG_S, LONG_S]), rng.choice([0.2, LONG_S, LONG_S])
            gives_up, is_cancelled = rng.random() < 0.15, rng.random() < 0.3
            try:
                landing = receiver.reserve(NUM_TOKENS, lease_s=leases_s[0])
                transfer_id = bytes.fromhex(landing.transfer_id)
                consumer.client.watch(transfer_id)
                outbox = sender.open_outbox(landing, NUM_TOKENS, leases_s[1])
            except RpcError as error:
                if error.code != "NO_ROOM":
                    raise
                time.sleep(0.02)
                continue
            began += 1
            thread = threading.Thread(
                target=producer.fill,
                args=(transfer_id, outbox, random.Random(began)),
                kwargs={"gives_up": gives_up},
            )
            thread.start()
            threads.append(thread)
            if not gives_up and not is_cancelled and min(leases_s) == LONG_S:
                undisturbed.add(landing.transfer_id)
            if is_cancelled:
                agent = rng.choice(agents)
                agent.call("Cancel", Cancel(landing.transfer_id, "chaos"), CancelReply)
        for thread in threads:
            thread.join()
        wait_until(lambda: not {"open"} & set(sender.status().num_outboxes))
        wait_until(lambda: undisturbed <= consumer.landed)
        receiver.cancel_all()
        for agent in agents:
            wait_until(lambda agent=agent: agent.status().free_bytes == agent.status().arena_bytes)
        assert consumer.wrong == set()
        assert len(undisturbed) > NUM_TRANSFERS / 10
