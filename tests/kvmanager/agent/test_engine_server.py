"""How messages of one engine connection share the event loop with others. No sockets."""

import asyncio
import os
import struct
from pathlib import Path
from typing import Any, cast

from kvmanager.agent.engines.protocol import (
    AgentMessage,
    CacheFree,
    EngineHello,
    EngineMessage,
    HelloRefused,
    Welcome,
    decode_agent_message,
    encode_frame,
)
from kvmanager.agent.engines.server import EngineServer, _EngineConnection

HELLO = EngineHello(
    instance="d0", role="scheduler", pid=os.getpid(), layout=b"", tp_rank=0, tp_size=1
)
WELCOME = Welcome(arena_path="", arena_epoch="", arena_bytes=1, block_bytes=1)


class Handler:
    def __init__(self) -> None:
        self.heard: list[EngineMessage | str] = []

    def hello(self, conn_id: int, hello: EngineHello) -> AgentMessage:
        return WELCOME

    def message(self, conn_id: int, message: EngineMessage) -> None:
        self.heard.append(message)

    def connection_lost(self, conn_id: int) -> None:
        self.heard.append("lost")

    def process_gone(self, conn_id: int) -> None:
        raise AssertionError("this process lives")


class Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.is_closed = self.is_paused = False
        self.said: list[AgentMessage] = []

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return NoSocket()

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def write(self, data: Any) -> None:
        self.said.append(decode_agent_message(data[4:]))

    def get_write_buffer_size(self) -> int:
        return 0


class NoSocket:
    def getsockopt(self, *_: object) -> bytes:
        return struct.pack("iII", 0, os.geteuid(), 0)


async def connected(tmp_path: Path) -> tuple[_EngineConnection, Handler, Transport]:
    handler, transport = Handler(), Transport()
    server = EngineServer(tmp_path / "s", cast(Any, handler), linger_s=0.0)
    connection = _EngineConnection(1, server)
    connection.connection_made(transport)
    connection.data_received(encode_frame(HELLO))
    return connection, handler, transport


def frames(*handles: int) -> bytes:
    return b"".join(encode_frame(CacheFree(handle)) for handle in handles)


async def test_messages_that_come_together_are_taken_one_a_turn(tmp_path: Path) -> None:
    connection, handler, transport = await connected(tmp_path)
    connection.data_received(frames(1, 2, 3))
    assert handler.heard == [CacheFree(1)]
    assert transport.is_paused
    await asyncio.sleep(0)
    assert handler.heard == [CacheFree(1), CacheFree(2)]
    await asyncio.sleep(0)
    assert handler.heard == [CacheFree(1), CacheFree(2), CacheFree(3)]
    assert not transport.is_paused


async def test_what_an_engine_said_before_it_was_lost_comes_before_the_loss(tmp_path: Path) -> None:
    connection, handler, transport = await connected(tmp_path)
    connection.data_received(frames(1, 2))
    transport.close()
    connection.connection_lost(None)
    assert handler.heard == [CacheFree(1), CacheFree(2), "lost"]
    await asyncio.sleep(0)
    assert handler.heard == [CacheFree(1), CacheFree(2), "lost"]


async def test_nothing_is_taken_behind_what_makes_no_sense(tmp_path: Path) -> None:
    connection, handler, transport = await connected(tmp_path)
    connection.data_received(frames(1) + encode_frame(HELLO) + frames(2))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert handler.heard == [CacheFree(1)]
    assert isinstance(transport.said[-1], HelloRefused)
    assert transport.is_closed
