"""Timeouts: answers, slow requests and slow readers; pages, and the log."""

import asyncio
import contextlib
import io
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from detcompile.serving.app import new_app
from tests.serving.scripted_engine import SILENT
from tests.serving.scripted_service import ROOT, SPEC, running, scripted

pytestmark = pytest.mark.usefixtures("in_the_root")
STALL = 1.2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("bounds", "requests", "status", "message"),
    [
        ({"queue_timeout": 0.4}, {"prompt": [SILENT]}, 503, "waited for its first token for over 0.4 s"),
        ({"timeout": 0.6}, {"prompt": [SILENT]}, 504, "took over 0.6 s"),
        ({"timeout": 0.6, "queue_timeout": 0.3}, {"prompt": [5], "max_tokens": 2000}, 504, "took over 0.6 s"),
    ],
    ids=["nothing drawn", "nothing drawn in all", "not all drawn"],
)
async def test_timed_out_request_gets_error_and_leaves_engine(
    bounds: dict, requests: dict, status: int, message: str, stream: bool
) -> None:
    service = scripted(**bounds)
    async with running(service) as client:
        answer = await client.post("/v1/completions", json=requests | {"stream": stream})
        if stream and requests["prompt"] == [5]:  # tokens had come
            assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")
            error = json.loads(answer.text.split("data: ")[-2])["error"]
        else:
            assert answer.status_code == status and answer.headers["retry-after"]
            error = answer.json()["error"]
        assert message in error["message"] and error["code"] == "timeout"
        assert "x-detcompile-receipt" not in answer.headers and "receipt" not in answer.text
        assert not service.open and not service.deadlines._timers
        while service.fleet.statistics.num_running:
            await asyncio.sleep(0.01)
        short = await client.post("/v1/completions", json={"prompt": [5], "max_tokens": 3})
        assert short.status_code == 200 and not service.deadlines._timers
        assert service.limiter.num_open == service.limiter.num_queued == 0  # what the bounds of the queue count


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    """Host and port of a server that closes connections after STALL seconds without progress."""
    command = [sys.executable, "-m", "tests.serving.scripted_server", "5", str(STALL)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stderr is not None
        host, port = process.stderr.readline().split()[3].rstrip(";").removeprefix("http://").split(":")
        yield host, int(port)
        process.terminate()
        assert process.wait(20) == 0
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.wait()


def read_to_end(connection: socket.socket) -> None:
    """Fail unless the server closes a connection long before the idle timeout."""
    connection.settimeout(30)
    with contextlib.suppress(ConnectionError):
        while connection.recv(1 << 16):
            continue


def num_cancelled(address: tuple[str, int]) -> int:
    text = httpx.get(f"http://{address[0]}:{address[1]}/metrics").text
    return int(float(re.search("^detcompile:requests_cancelled_total (.*)", text, re.M)[1]))  # type: ignore[index]


def require_cancelled(address: tuple[str, int], count: int) -> None:
    """Wait until so many requests were cancelled in all."""
    end = time.monotonic() + 30
    while num_cancelled(address) < count:
        assert time.monotonic() < end
        time.sleep(0.1)
    assert num_cancelled(address) == count


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def completion(**requests: Any) -> bytes:
    """A request with its head."""
    body = json.dumps(requests).encode()
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body


def test_stalled_requests_are_disconnected(address: tuple[str, int]) -> None:
    beginnings = (b"", b"POST /v1/compl", HEAD, HEAD + b'Content-Length: 90\r\n\r\n{"prompt": ')
    connections = [socket.create_connection(address) for _ in beginnings]
    for connection, beginning in zip(connections, beginnings):
        connection.sendall(beginning)
    for connection in connections:
        with connection:
            read_to_end(connection)
    end = time.monotonic() + 30
    with socket.create_connection(address) as connection, contextlib.suppress(ConnectionError):
        for letter in HEAD * 100:  # a byte from time to time is no progress
            assert time.monotonic() < end
            connection.sendall(bytes([letter]))
            time.sleep(0.05)
    assert httpx.get(f"http://{address[0]}:{address[1]}/ready").status_code == 200


def test_idle_connections_are_kept_open(address: tuple[str, int]) -> None:
    """Longer than clients keep them, or a request could be sent on a closing connection."""
    ask = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
    with socket.create_connection(address, timeout=10) as connection:
        for sent in (ask, ask + b"GET"):
            connection.sendall(sent)
            actual = b""
            while not actual.endswith(b"}"):
                actual += (new := connection.recv(1 << 16))
                assert new, "closed"
            time.sleep(5.5 if sent == ask else 0)  # httpx, and with it openai's client, keeps them for 5 s
        read_to_end(connection)  # a request has begun


CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
HEADS = [  # how one begins, what then comes again and again, and the status that it gets
    (b"GET /", b"a", b"400"),
    (HEAD + b"X: ", b"a", b"400"),
    (HEAD, b"X-one: 1\r\n", b"400"),
    (CHUNKED + b"1;", b"a", b""),
    (CHUNKED + b"1\r\na\r\n0\r\n", b"X-one: 1\r\n", b""),
]


def test_endless_request_heads_are_disconnected(address: tuple[str, int]) -> None:
    for start, part, status in HEADS:
        many, num_sent, actual = part * (10_000 // len(part)), 0, b""
        with socket.create_connection(address, timeout=10) as connection:
            connection.sendall(start)
            with contextlib.suppress(ConnectionError):
                while num_sent < 20 << 20:
                    connection.sendall(many)
                    num_sent += len(many)
            with contextlib.suppress(ConnectionError):
                actual = connection.recv(1 << 16)
        assert num_sent < 8 << 20, start  # what kernels take for a receiver that does not listen
        assert actual[9:12] in (status, b"")  # a reset of the connection may overtake the answer
    with socket.create_connection(address, timeout=10) as other:
        other.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 60_000 + b"\r\n\r\n")
        assert other.recv(100).startswith(b"HTTP/1.1 200")


def test_client_that_stops_reading_cancels_its_request(address: tuple[str, int]) -> None:
    before = num_cancelled(address)
    with socket.create_connection(address) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(completion(prompt=["x"] * 20, max_tokens=2000, stream=True))
        require_cancelled(address, before + 20)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("rest", [b"", b"no request\r\n\r\n"], ids=["leaves", "sends what is no request"])
def test_disconnect_cancels_first_of_pipelined_requests(rest: bytes, stream: bool, address: tuple[str, int]) -> None:
    """A client pipelines a second request and disconnects: nothing more is drawn or sent."""
    before = num_cancelled(address)
    with socket.create_connection(address) as connection:
        connection.sendall(completion(prompt="x", max_tokens=2000, stream=stream) * 2)
        time.sleep(0.5)
        if rest:
            connection.sendall(rest)
        else:
            connection.close()
        require_cancelled(address, before + 1)


def test_slow_or_waiting_clients_stay_connected(address: tuple[str, int]) -> None:
    """A stream that lasts longer than the stall timeout, and requests one after another."""
    url = f"http://{address[0]}:{address[1]}"
    requests = {"prompt": "x", "max_tokens": 150, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=requests, timeout=30) as answer:
        lines = []
        for line in answer.iter_lines():
            lines.append(line)
            time.sleep(0.01)
    assert lines[-2] == "data: [DONE]"
    with httpx.Client(base_url=url) as client:
        start = time.monotonic()
        while time.monotonic() - start < 3 * STALL:
            assert client.get("/version").status_code == 200
            time.sleep(0.3)


async def test_cors_allows_only_listed_origins() -> None:
    service = scripted()
    app = new_app(service, "test", [b"0" * 32], origins=["https://site.example"])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        for origin, allowed in (("https://site.example", True), ("https://other.example", False)):
            head = {"Origin": origin, "Access-Control-Request-Method": "POST"}
            requests = await client.options("/v1/completions", headers=head | {
                "Access-Control-Request-Headers": "authorization,content-type"})  # fmt: skip
            assert (requests.status_code == 200) == allowed
            answer = await client.get("/version", headers={"Origin": origin})
            assert answer.status_code == 401  # it still needs a key
            assert (answer.headers.get("access-control-allow-origin") == origin) == allowed
            assert "X-Detcompile-Seed" in answer.headers["access-control-expose-headers"]


async def test_request_log_line_contains_no_text() -> None:
    service, file = scripted(), io.StringIO()
    app = new_app(service, "test", request_log=file)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=30) as client:
        try:
            await service.start(SPEC)
            whole = await client.post("/v1/completions", json={"prompt": "a secret of mine", "max_tokens": 3})
            requests = {"messages": [{"role": "user", "content": "a secret of mine"}]}
            await client.post("/v1/completions", json={"prompt": "a secret", "max_tokens": 4, "stream": True})
            await client.post("/v1/chat/completions", json=requests | {"model": "a secret"})
            await client.get("/" + "long" * 1000)
        finally:
            await service.fleet.stop()
    lines = [json.loads(line) for line in file.getvalue().splitlines()]
    assert "secret" not in file.getvalue() and "text" not in file.getvalue()
    assert [line["status"] for line in lines] == [200, 200, 404, 404]
    assert lines[0]["id"] == whole.json()["id"] == whole.headers["x-request-id"]
    assert lines[0]["receipt"] == whole.headers["x-detcompile-receipt"]
    assert [line.get("generated_tokens") for line in lines] == [3, 4, None, None]
    assert lines[0]["finish_reasons"] == ["length"] and lines[0]["prompt_tokens"] > 0
    assert all(line["seconds"] >= 0 and line["time"] > 1e9 for line in lines) and len(lines[3]["path"]) == 100
