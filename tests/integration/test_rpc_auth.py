"""Who may call and who may answer, with real gRPC servers, certificates and key files."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import msgspec
import pytest
from certificates import make_authority, make_node

from kvmanager.agent.messages import SERVICE
from transport import Credentials, Identity, RegionKey, Role, TlsFiles
from transport.region_key import new_key
from transport.rpc import Method, RpcClient, RpcError, RpcServer
from transport.rpc_auth import PROOF, channel_credentials

Maker = Callable[[str], Credentials]
"""The credentials of the process with this URI."""


class Ask(msgspec.Struct):
    text: str = ""


class Answer(msgspec.Struct):
    text: str


async def say(request: Ask) -> Answer:
    if request.text == "no room":
        raise RpcError("NO_ROOM", "full: é")
    return Answer(f"heard {request.text}")


@asynccontextmanager
async def serving(
    credentials: Credentials | None, service: str = SERVICE, bind: str = "127.0.0.1:0"
) -> AsyncIterator[str]:
    """A server of methods of real names, one of which is in no table; its address."""
    methods = {name: Method(Ask, Answer, say) for name in ("Status", "SendCacheMove", "Unlisted")}
    server = RpcServer(bind, {service: methods}, credentials)
    port = await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def call(
    target: str, credentials: Credentials | None, method: str = "SendCacheMove", text: str = "x"
) -> str:
    client = RpcClient(target, SERVICE, credentials)
    try:
        return (await client.call(method, Ask(text), Answer, 10)).text
    finally:
        await client.close()


async def refused(target: str, credentials: Credentials | None, method: str = "Status") -> str:
    with pytest.raises(RpcError) as caught:
        await call(target, credentials, method)
    assert caught.value.code == "REFUSED", caught.value
    return caught.value.message


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_authority(tmp_path_factory.mktemp("certs"), "ca")


@pytest.fixture(params=["tls", "key"])
def shown_by(request: pytest.FixtureRequest, tmp_path: Path, authority: Path) -> Maker:
    """Makes credentials, as certificates of one authority or with one key file."""
    if request.param == "tls":
        made: dict[str, TlsFiles] = {}

        def certificate(uri: str) -> TlsFiles:
            if uri not in made:
                made[uri] = make_node(tmp_path, f"node{len(made)}", authority, uris=(uri,))
            return made[uri]

        return certificate
    path = write_keys(tmp_path / "region.key", new_key())
    return lambda uri: RegionKey(path, Identity.parse(uri))


def write_keys(path: Path, *keys: str) -> Path:
    path.write_text("\n".join(keys))
    path.chmod(0o600)
    return path


def named(path: Path, role: Role = "gateway", region: str = "r") -> RegionKey:
    return RegionKey(path, Identity(region, role, "x"))


async def test_a_role_may_call_what_the_table_says(shown_by: Maker) -> None:
    async with serving(shown_by("spiffe://r/agent/a")) as target:
        assert await call(target, shown_by("spiffe://r/gateway/g")) == "heard x"
        assert await call(target, shown_by("spiffe://r/operator/o"), "Status") == "heard x"
        for uri in ("spiffe://r/operator/o", "spiffe://r/agent/b", "spiffe://r/pd-front/p"):
            assert await refused(target, shown_by(uri), "SendCacheMove") == (
                "calling prfaas.NodeAgent/SendCacheMove needs role gateway of region r; "
                f"the other side shows {uri}"
            )


async def test_another_region_is_refused_by_the_server(tmp_path: Path) -> None:
    path = write_keys(tmp_path / "key", new_key())
    async with serving(named(path, "agent")) as target:
        message = await refused(target, named(path, region="other"))
        assert "region r; the other side shows spiffe://other/gateway/x" in message


async def test_a_method_outside_the_table_is_for_nobody(shown_by: Maker) -> None:
    async with serving(shown_by("spiffe://r/agent/a")) as target:
        message = await refused(target, shown_by("spiffe://r/gateway/g"), "Unlisted")
        assert "needs role nobody" in message


async def test_a_server_of_another_role_is_refused_by_its_caller(shown_by: Maker) -> None:
    async with serving(shown_by("spiffe://r/directory/d")) as target:
        message = await refused(target, shown_by("spiffe://r/gateway/g"))
        assert message == (
            f"{target}: serving prfaas.NodeAgent needs role agent of region r; "
            "the other side shows spiffe://r/directory/d"
        )


async def test_a_server_of_another_region_is_refused_by_its_caller(
    tmp_path: Path, authority: Path
) -> None:
    shown = make_node(tmp_path, "far", authority, uris=("spiffe://other/agent/a",))
    ours = make_node(tmp_path, "near", authority, uris=("spiffe://r/gateway/g",))
    async with serving(shown) as target:
        message = await refused(target, ours)
        assert "needs role agent of region r; the other side shows spiffe://other/" in message


async def test_a_caller_that_shows_nothing_is_refused(shown_by: Maker) -> None:
    credentials = shown_by("spiffe://r/agent/a")
    async with serving(credentials) as target:
        with pytest.raises(RpcError) as caught:
            await call(target, None)
        if isinstance(credentials, RegionKey):
            assert caught.value.code == "REFUSED"
            assert "shows no name" in caught.value.message
        else:
            assert caught.value.code == "UNAVAILABLE"


async def test_a_certificate_without_a_name_cannot_be_used(tmp_path: Path, authority: Path) -> None:
    unnamed = make_node(tmp_path, "plain", authority, uris=())
    with pytest.raises(RpcError, match=r"spiffe://REGION/ROLE/NAME") as caught:
        async with serving(unnamed):
            pass
    assert caught.value.code == "INVALID"


@pytest.mark.parametrize(
    ("uris", "shown"),
    [
        ((), "no name"),
        (("spiffe://other/gateway/g",), "spiffe://other/gateway/g"),
        (("https://r/gateway/g", "spiffe://r/agent/a"), "spiffe://r/agent/a"),
    ],
)
async def test_others_of_the_same_authority_are_refused(
    tmp_path: Path, authority: Path, uris: tuple[str, ...], shown: str
) -> None:
    """Callers that do not look at the server first."""
    stub = channel_credentials(make_node(tmp_path, "other", authority, uris=uris))
    async with serving(make_node(tmp_path, "agent", authority)) as target:
        async with grpc.aio.secure_channel(target, stub) as channel:
            invoke = channel.unary_unary(f"/{SERVICE}/SendCacheMove")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await invoke(msgspec.msgpack.encode(Ask()))
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert f"needs role gateway of region r; the other side shows {shown}" in str(
        caught.value.details()
    )


async def test_a_call_is_refused_before_a_byte_of_its_body_is_there(shown_by: Maker) -> None:
    """Bodies have up to 64 MiB each: nobody else may fill memory with them, or hold calls open."""

    async def no_body() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    shown = shown_by("spiffe://r/operator/o")
    async with serving(shown_by("spiffe://r/agent/a")) as target:
        channel = (
            grpc.aio.secure_channel(target, channel_credentials(shown))
            if isinstance(shown, TlsFiles)
            else grpc.aio.insecure_channel(target)
        )
        async with channel:
            invoke = channel.stream_unary(f"/{SERVICE}/SendCacheMove")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await asyncio.wait_for(invoke(no_body()), 60)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_the_first_call_may_be_a_large_one(shown_by: Maker) -> None:
    """With a region's key its first try is refused while its body is still on the way."""
    async with serving(shown_by("spiffe://r/agent/a")) as target:
        text = "x" * (4 << 20)
        assert await call(target, shown_by("spiffe://r/gateway/g"), text=text) == f"heard {text}"


async def test_a_call_without_a_body_is_invalid() -> None:
    async def no_body() -> AsyncIterator[bytes]:
        for body in ():
            yield body

    async with serving(None) as target, grpc.aio.insecure_channel(target) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.stream_unary(f"/{SERVICE}/Status")(no_body())
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_errors_of_handlers_come_through(shown_by: Maker) -> None:
    async with serving(shown_by("spiffe://r/agent/a")) as target:
        with pytest.raises(RpcError) as caught:
            await call(target, shown_by("spiffe://r/gateway/g"), text="no room")
        assert (caught.value.code, caught.value.message) == ("NO_ROOM", "full: é")


async def test_calls_do_not_wait_for_each_others_looks_beyond_their_time(
    tmp_path: Path, authority: Path
) -> None:
    client_files = make_node(tmp_path, "waiting", authority, uris=("spiffe://r/gateway/g",))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = RpcClient(f"127.0.0.1:{silent.getsockname()[1]}", SERVICE, client_files)
        try:
            async with asyncio.timeout(30):  # one after the other they would take two minutes
                calls = (client.call("Status", Ask(), Answer, 1.0) for _ in range(120))
                ended = await asyncio.gather(*calls, return_exceptions=True)
        finally:
            await client.close()
    assert {error.code for error in ended if isinstance(error, RpcError)} == {"UNAVAILABLE"}
    assert len(ended) == 120


# ---- the region's key


async def test_another_key_is_refused(tmp_path: Path) -> None:
    ours = named(write_keys(tmp_path / "ours", new_key()), "agent")
    theirs = named(write_keys(tmp_path / "theirs", new_key()))
    async with serving(ours) as target:
        assert "not signed with a key of region r" in await refused(target, theirs)


async def test_a_server_without_the_key_is_not_believed(tmp_path: Path) -> None:
    ours = named(write_keys(tmp_path / "ours", new_key()))
    async with serving(None) as target:
        assert "the answer is not signed with a key of region r" in await refused(target, ours)


@pytest.mark.parametrize(
    ("status", "trailers", "code"),
    [
        (grpc.StatusCode.UNAUTHENTICATED, (("prfaas-code", "NOT_FOUND"),), "REFUSED"),
        (grpc.StatusCode.NOT_FOUND, (("prfaas-code", "NOT_FOUND"),), "REFUSED"),
        (grpc.StatusCode.NOT_FOUND, (), "INTERNAL"),
    ],
)
async def test_an_error_that_nobody_signed_is_not_taken_for_an_answer(
    tmp_path: Path, status: grpc.StatusCode, trailers: tuple[tuple[str, str], ...], code: str
) -> None:
    """Somebody without the key, at the address of an agent, says that a transfer is gone."""

    async def lie(_: bytes, context: grpc.aio.ServicerContext) -> bytes:
        await context.abort(status, "gone", trailing_metadata=trailers)

    server = grpc.aio.server()
    handlers = {"Status": grpc.unary_unary_rpc_method_handler(lie)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    ours = named(write_keys(tmp_path / "key", new_key()))
    try:
        with pytest.raises(RpcError) as caught:
            await call(f"127.0.0.1:{port}", ours, "Status")
    finally:
        await server.stop(0)
    assert caught.value.code == code


async def test_keys_are_rotated_without_restart(tmp_path: Path) -> None:
    old, new = new_key(), new_key()
    server_file = write_keys(tmp_path / "server", old)
    client_file = write_keys(tmp_path / "client", old)
    async with serving(named(server_file, "agent")) as target:
        client = RpcClient(target, SERVICE, named(client_file))
        try:
            await client.call("Status", Ask(), Answer, 10)
            # First all know both, then the new one signs, then the old one goes.
            for server_keys, client_keys in (
                ((old, new), (old, new)),
                ((new, old), (new, old)),
                ((new,), (new,)),
            ):
                write_keys(server_file, *server_keys)
                write_keys(client_file, *client_keys)
                await asyncio.sleep(1.1)  # files are looked at once a second
                await client.call("Status", Ask(), Answer, 10)
        finally:
            await client.close()
        assert "not signed" in await refused(target, named(write_keys(tmp_path / "late", old)))


async def test_a_client_follows_a_server_that_was_restarted(tmp_path: Path) -> None:
    path = write_keys(tmp_path / "key", new_key())
    async with serving(named(path, "agent")) as target:
        client = RpcClient(target, SERVICE, named(path))
        await client.call("Status", Ask(), Answer, 10)
    try:
        async with serving(named(path, "agent"), bind=target):
            codes = set()
            for _ in range(100):  # until the channel has noticed
                try:
                    await client.call("Status", Ask("y"), Answer, 10)
                    break
                except RpcError as error:
                    codes.add(error.code)
                    await asyncio.sleep(0.1)
            assert codes <= {"UNAVAILABLE"}
            assert (await client.call("Status", Ask("y"), Answer, 10)).text == "heard y"
    finally:
        await client.close()


async def test_an_overheard_call_cannot_be_played_again(tmp_path: Path) -> None:
    path = write_keys(tmp_path / "key", new_key())
    heard: list[tuple[str, bytes]] = []
    async with serving(named(path, "agent")) as target, serving(named(path, "agent")) as other:
        client = RpcClient(target, SERVICE, named(path))
        await client.call("Status", Ask("first"), Answer, 10)
        signer = client._signer
        assert signer is not None
        body = msgspec.msgpack.encode(Ask("again"))
        heard.append((str(signer.sign("Status", body)), body))
        await client.close()
        proof, body = heard[0]

        async def play(at: str, method: str, proof: str, body: bytes) -> str:
            async with grpc.aio.insecure_channel(at) as channel:
                invoke = channel.unary_unary(f"/{SERVICE}/{method}")
                try:
                    await invoke(body, metadata=((PROOF, proof),))
                except grpc.aio.AioRpcError as error:
                    return str(error.details())
                return ""

        forged = msgspec.msgpack.encode(Ask("forged"))
        assert "not signed" in await play(target, "Status", proof, forged)
        assert "not signed" in await play(target, "SendCacheMove", proof, body)
        assert "not signed" in await play(target, "Status", proof.replace("gateway", "agent"), body)
        assert "challenge" in await play(other, "Status", proof, body)
        assert await play(target, "Status", proof, body) == ""
        assert "has been made before" in await play(target, "Status", proof, body)
        assert "shows no name" in await play(target, "Status", "nonsense", body)


async def test_a_key_that_others_may_read_is_not_used(tmp_path: Path) -> None:
    path = write_keys(tmp_path / "key", new_key())
    path.chmod(0o644)
    with pytest.raises(RpcError, match="chmod 600") as caught:
        async with serving(named(path, "agent")):
            pass
    assert caught.value.code == "INVALID"
    with pytest.raises(RpcError, match="chmod 600"):
        await call("127.0.0.1:1", named(path))
