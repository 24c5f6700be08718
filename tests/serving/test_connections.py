"""Requests that offer another protocol are answered over HTTP/1.1, however their bytes arrive."""

import asyncio
import contextlib
import gc
import json
import re
import socket
import time
import weakref
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from detcompile.errors import InvalidInput
from detcompile.serving.app import new_app
from detcompile.serving.connections import MOST_AHEAD, SLICE, bounded_protocol
from detcompile.serving.server import listen
from tests.serving.scripted_service import scripted

OFFERS = [  # Java's java.net.http.HttpClient makes the first one with every request
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n",
    b"Upgrade: TLS/1.0, HTTP/2.0\r\nConnection: keep-alive, upgrade\r\nX: y\r\n",
    b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eA==\r\n",
    b"",
]


def requests_with(offer: bytes) -> list[bytes]:
    return [
        b"POST /one?a=%20b HTTP/1.1\r\nHost: x\r\n" + offer + b"Content-Length: 5\r\nx-own: 1\r\n\r\nhello",
        b"GET /two HTTP/1.1\r\nHost: x\r\n" + offer + b"\r\n",
        b"POST /one HTTP/1.1\r\n" + offer + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n",
    ]


TOLD = [["POST", "/one", "a=%20b", "hello"], ["GET", "/two", "", ""], ["POST", "/one", "", "abc"]]


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the request that arrived."""
    body, more = b"", True
    while more:
        message = await receive()
        assert message["type"] == "http.request"
        body, more = body + message["body"], message.get("more_body", False)
    calls = [scope["method"], scope["path"], scope["query_string"].decode(), body.decode()]
    data = json.dumps(calls).encode() + b"\n"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(data))]})
    await send({"type": "http.response.body", "body": data})


connections: set[Any] = set()  # of the server of ``connected``


@contextlib.asynccontextmanager
async def connected(serves: Any = app) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    config = uvicorn.Config(serves, http=bounded_protocol(5), ws="none", lifespan="off", log_level="critical")
    config.load()
    make: Any = config.http_protocol_class
    loop, state = asyncio.get_running_loop(), ServerState()
    state.connections = connections
    server = await loop.create_server(lambda: make(config=config, server_state=state, app_state={}), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    try:
        async with asyncio.timeout(30):
            yield reader, writer
    finally:
        writer.close()
        server.close()
        connections.clear()


async def answers(parts: Sequence[bytes]) -> list[Any]:
    """Return the responses to requests whose bytes arrive in these parts."""
    actual: list[Any] = []
    async with connected() as (reader, writer):
        for part in parts:
            writer.write(part)
            for _ in range(4 if len(parts) > 1 else 0):  # so that a part is read alone
                await asyncio.sleep(0)
        while len(actual) < len(TOLD):
            line = await reader.readline()
            assert line and (b" 200 " in line or not line.startswith(b"HTTP")), (line, actual)
            actual += [json.loads(line)] if line.startswith(b"[") else []
    return actual


@pytest.mark.parametrize("offer", OFFERS, ids=["h2c", "TLS", "websocket", "none"])
async def test_protocol_upgrade_offer_is_ignored(offer: bytes) -> None:
    one, two, three = requests_with(offer)
    sent = one + two + three
    for parts in ([sent], [one, two, three], [one[:-5], b"hello" + two, three], [bytes([item]) for item in sent]):
        assert await answers(parts) == TOLD
    for cut in range(1, len(sent), 7):
        assert await answers([sent[:cut], sent[cut:]]) == TOLD, cut


async def test_many_upgrade_offers_in_one_packet() -> None:
    assert await answers([b"".join(requests_with(OFFERS[0])) * 400]) == TOLD


def read_ahead(count: int, request: bytes) -> tuple[float, int]:
    """Send requests at once; return the CPU seconds until all are answered, and the most that waited for answers."""
    most = 0

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        nonlocal most
        [connection] = connections
        most = max(most, len(connection.pipeline))
        await app(scope, receive, send)

    async def scenario() -> float:
        async with connected(slow) as (reader, writer):
            start, num_answers = time.process_time(), 0
            writer.write(request * count)
            while num_answers < count:
                num_answers += (await reader.read(1 << 16)).count(b"HTTP/1.1 200")
            return time.process_time() - start

    return asyncio.run(scenario()), most


@pytest.mark.parametrize(
    "request_bytes",
    [b"GET /a HTTP/1.1\r\n\r\n", b"POST /a HTTP/1.1\r\nContent-Length: 3000\r\n\r\n" + b"x" * 3000],
    ids=["heads", "bodies"],
)
def test_pipelined_requests_are_read_as_earlier_ones_finish(request_bytes: bytes) -> None:
    """The cost of a request does not grow with the number of earlier ones."""
    for _ in range(3):  # other processes may take the caches meanwhile
        seconds = [read_ahead(count, request_bytes) for count in (500, 1000, 4000)][1:]
        (first, _), (second, most) = seconds
        assert most <= MOST_AHEAD + 1 + SLICE // len(request_bytes)
        if second < 1.6 * 4 * first:
            return
    pytest.fail(f"1000 requests take {first:.2f} s of CPU time, and 4000 {second:.2f} s")


async def test_disconnect_cancels_pipelined_requests() -> None:
    begun, ended = asyncio.Event(), []

    async def waits(scope: Any, receive: Any, send: Any) -> None:
        begun.set()
        while (await receive())["type"] != "http.disconnect":
            continue
        ended.append(scope["path"])

    async with connected(waits) as (_, writer):
        writer.write(b"GET /a HTTP/1.1\r\n\r\n" * 5)
        await begun.wait()
        writer.close()
        while not ended:
            await asyncio.sleep(0.01)


def test_closed_connection_is_freed_without_gc() -> None:
    async def scenario() -> None:
        async with connected() as (reader, writer):
            writer.write(requests_with(OFFERS[0])[0])
            await reader.readline()
            [connection] = [weakref.ref(item) for item in connections]
            writer.close()
            while connections:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert connection() is None

    gc.disable()
    try:
        asyncio.run(scenario())
    finally:
        gc.enable()


def test_garbage_after_upgrade_offer_gets_one_400() -> None:
    async def scenario() -> bytes:
        async with connected() as (reader, writer):
            writer.write(requests_with(OFFERS[0])[1] + b"nothing\r\n\r\n")
            return await reader.read()

    assert asyncio.run(scenario()).count(b"HTTP/1.1 400") == 1


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6")
def test_unspecified_address_accepts_ipv4_and_ipv6() -> None:
    for host, clients in (("::", ["127.0.0.1", "::1"]), ("0.0.0.0", ["127.0.0.1"]), ("::1", ["::1"])):
        with listen(host, 0) as sock:
            for client in clients:
                socket.create_connection((client, sock.getsockname()[1]), 5).close()


@pytest.mark.parametrize(
    "place", [("a" * 70 + ".x", 0), ("é" * 70, 0), ("[::]", 0), ("::1", 1 << 16), ("::1", -1), ("", 0)]
)
def test_unusable_address_error_gives_advice(place: tuple[str, int]) -> None:
    with pytest.raises(InvalidInput, match=r"cannot listen on .* Give another --host or --port"):
        listen(*place)


async def test_health_routes_accept_head() -> None:
    """HEAD returns GET's status without a body, so the next answer on the connection parses."""

    async with connected(new_app(scripted(), "test")) as (reader, writer):
        probes = {"/health": 200, "/ready": 503, "/": 200, "/version": 200}
        others = {"/dashboard/state": 200, "/v1/models/x": 503, "/v1/receipts/x": 404, "/v1/responses/x": 404}
        for path, status in (probes | others).items():
            for method in ("HEAD", "GET"):
                writer.write(f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                assert head.startswith(f"HTTP/1.1 {status} "), (method, path, head)
                (length,) = re.findall(r"content-length: (\d+)", head)
                assert int(length) and (method == "HEAD" or await reader.readexactly(int(length)))
