"""The RPC layer over loopback gRPC: replies, error codes, deadlines, cancellation, bad input."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc
import grpc.aio
import msgspec
import pytest

from transport.rpc import Method, RpcClient, RpcError, RpcServer
from transport.rpc_versions import VERSIONS, announced
from transport.versions import Versions


class Ask(msgspec.Struct):
    kind: str
    token_ids: list[int] = []


class Answer(msgspec.Struct):
    text: str


@dataclass
class Service:
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    started: asyncio.Event = field(default_factory=asyncio.Event)

    async def ask(self, request: Ask) -> Answer:
        if request.kind == "no room":
            raise RpcError("NO_ROOM", "the landing is full")
        if request.kind == "bug":
            raise ValueError("surprise")
        if request.kind == "hang":
            self.started.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        return Answer(f"{request.kind} {len(request.token_ids)}")


@dataclass
class Rig:
    service: Service
    server: RpcServer
    client: RpcClient
    port: int


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    service = Service()
    server = RpcServer("127.0.0.1:0", {"test.S": {"Ask": Method(Ask, Answer, service.ask)}})
    port = await server.start()
    client = RpcClient(f"127.0.0.1:{port}", "test.S")
    yield Rig(service, server, client, port)
    await client.close()
    await server.stop(grace_s=0)


async def test_reply_carries_a_large_prompt(rig: Rig) -> None:
    ids = list(range(1_000_000))
    reply = await rig.client.call("Ask", Ask("count", ids), Answer, timeout_s=20)
    assert reply.text == "count 1000000"


@pytest.mark.parametrize(
    ("kind", "code", "words"),
    [("no room", "NO_ROOM", "the landing is full"), ("bug", "INTERNAL", "surprise")],
)
async def test_handler_errors_keep_code_and_message(
    rig: Rig, kind: str, code: str, words: str
) -> None:
    with pytest.raises(RpcError) as caught:
        await rig.client.call("Ask", Ask(kind), Answer, timeout_s=5)
    assert caught.value.code == code
    assert words in caught.value.message


async def test_deadline_is_timeout_and_cancels_the_handler(rig: Rig) -> None:
    with pytest.raises(RpcError) as caught:
        await rig.client.call("Ask", Ask("hang"), Answer, timeout_s=0.2)
    assert caught.value.code == "TIMEOUT"
    await asyncio.wait_for(rig.service.cancelled.wait(), 5)


async def test_cancelling_the_caller_cancels_the_handler(rig: Rig) -> None:
    task = asyncio.create_task(rig.client.call("Ask", Ask("hang"), Answer, timeout_s=30))
    await asyncio.wait_for(rig.service.started.wait(), 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(rig.service.cancelled.wait(), 5)


async def test_unknown_method_is_invalid(rig: Rig) -> None:
    with pytest.raises(RpcError) as caught:
        await rig.client.call("Nope", Ask("x"), Answer, timeout_s=5)
    assert caught.value.code == "INVALID"


@pytest.mark.parametrize("raw", [b"", b"\xc1", msgspec.msgpack.encode({"kind": 3}), b"\xa1\xff"])
async def test_hostile_bytes_are_invalid_and_hurt_nobody(rig: Rig, raw: bytes) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{rig.port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/test.S/Ask")(raw, timeout=30)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert (await rig.client.call("Ask", Ask("still"), Answer, timeout_s=30)).text == "still 0"


async def test_reply_of_another_shape_is_internal(rig: Rig) -> None:
    with pytest.raises(RpcError) as caught:
        await rig.client.call("Ask", Ask("x"), Ask, timeout_s=5)
    assert caught.value.code == "INTERNAL"


async def test_dead_target_is_unavailable_and_a_restart_is_found(rig: Rig) -> None:
    assert (await rig.client.call("Ask", Ask("a"), Answer, timeout_s=5)).text == "a 0"
    await rig.server.stop(grace_s=0)
    with pytest.raises(RpcError) as caught:
        await rig.client.call("Ask", Ask("a"), Answer, timeout_s=5)
    assert caught.value.code == "UNAVAILABLE"
    rig.server = RpcServer(
        f"127.0.0.1:{rig.port}", {"test.S": {"Ask": Method(Ask, Answer, rig.service.ask)}}
    )
    await rig.server.start()
    for _ in range(50):
        try:
            await rig.client.call("Ask", Ask("b"), Answer, timeout_s=1)
            break
        except RpcError:
            await asyncio.sleep(0.1)
    else:
        pytest.fail("client did not find the restarted server")
    await rig.server.stop(grace_s=0)


async def test_taken_port_is_said(rig: Rig) -> None:
    second = RpcServer(f"127.0.0.1:{rig.port}", {})
    with pytest.raises(RpcError) as caught:
        await second.start()
    assert caught.value.code == "UNAVAILABLE"
    assert "cannot bind" in caught.value.message


async def called_with(rig: Rig, metadata: tuple[tuple[str, str], ...]) -> grpc.aio.Call:
    """A call as a process of another release makes it, when it has ended."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{rig.port}") as channel:
        body = msgspec.msgpack.encode(Ask("x"))
        call = channel.unary_unary("/test.S/Ask")(body, timeout=10, metadata=metadata)
        await call.code()
        return call


@pytest.mark.parametrize("metadata", [(), (announced(Versions(1, 9)),)])
async def test_a_caller_of_another_release_is_answered(
    rig: Rig, metadata: tuple[tuple[str, str], ...]
) -> None:
    call = await called_with(rig, metadata)
    assert await call.code() is grpc.StatusCode.OK
    assert announced() in tuple(await call.trailing_metadata())


async def test_a_caller_without_a_common_version_is_told_both_ranges(rig: Rig) -> None:
    call = await called_with(rig, (announced(Versions(8, 9)),))
    assert await call.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert f"the caller speaks version 8 to 9, this side speaks {VERSIONS}" in await call.details()
    assert announced() in tuple(await call.trailing_metadata())


@pytest.mark.parametrize("theirs", [None, Versions(1, 9), Versions(8, 9)])
async def test_a_server_of_another_release(theirs: Versions | None) -> None:
    async def answer(_: bytes, context: grpc.aio.ServicerContext) -> bytes:
        if theirs is not None:
            context.set_trailing_metadata((announced(theirs),))
        return msgspec.msgpack.encode({"text": "yes", "later": 1})

    server = grpc.aio.server()
    handlers = {"Ask": grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.S", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = RpcClient(f"127.0.0.1:{port}", "test.S")
    try:
        if theirs == Versions(8, 9):
            with pytest.raises(RpcError, match="the server speaks version 8 to 9") as caught:
                await client.call("Ask", Ask("x"), Answer, 10)
            assert caught.value.code == "REFUSED"
        else:
            assert (await client.call("Ask", Ask("x"), Answer, 10)).text == "yes"
    finally:
        await client.close()
        await server.stop(0)
