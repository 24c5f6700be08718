"""Almost valid requests and random bytes cause no 5xx, lose no engine and change no bit of others."""

import base64
import copy
import json
import random
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.draws import seed_of_run
from tests.exhaustive import EXHAUSTIVE
from tests.serving.conftest import Server
from tests.serving.receipts.receipt_cases import REQUESTS

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
FORMAT = {"name": "s", "schema": SCHEMA}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
CANARY = {"prompt": "x = 1", "max_tokens": 6, "seed": 1, "logprobs": 2, "temperature": 1.0}
SAID = [{"type": "text", "text": "hi"}]
RESULT = [{"type": "tool_result", "tool_use_id": "a", "content": SAID}]
CALLED = [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {"a": 1}}]}]
INPUT_TOOL = {"name": "f", "input_schema": SCHEMA}
TURNS = [{"role": "user", "content": SAID}, *CALLED, {"role": "user", "content": RESULT}]
MESSAGE = {"messages": TURNS, "max_tokens": 4}
BASES: list[tuple[str, dict[str, Any]]] = [
    *(("/v1/completions", {"prompt": "x", **given, "max_tokens": 4, "min_tokens": 0}) for given in REQUESTS.values()),
    ("/v1/completions", {"prompt": "x", "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 4, "structured_outputs": {"regex": "[a-z]+"}}),
    ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2, "stream": True}),
    ("/v1/chat/completions", CHAT | {"tools": [TOOL], "tool_choice": "auto"}),
    ("/v1/chat/completions", CHAT | {"response_format": {"type": "json_schema", "json_schema": FORMAT}}),
    ("/v1/messages", MESSAGE | {"system": SAID, "stream": True, "stop_sequences": ["e"]}),
    ("/v1/messages", MESSAGE | {"tools": [INPUT_TOOL], "tool_choice": {"type": "auto"}}),
    ("/v1/responses", {"input": [{"role": "user", "content": "hi"}], "max_output_tokens": 4, "store": False}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 4, "prompt_logprobs": 1, "echo": True, "logprobs": 0}),
    ("/v1/chat/completions/tokens", CHAT | {"tokens": [5, 6], "logprobs": True, "prompt_logprobs": 1}),
    ("/inference/v1/generate", {"token_ids": [5, 6], "stream": True, "cache_salt": "a", "priority": 1,
                                "sampling_params": {"max_tokens": 4, "logprobs": 1, "top_k": 3, "stop": ["e"]}}),
    ("/generate", {"input_ids": [[5, 6], [7]], "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1,
                   "sampling_params": {"max_new_tokens": 4, "top_k": 3}, "return_sampling_mask": True}),
    ("/tokenize", {"prompt": "some text"}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
    ("/v1/verify", {"payloadType": "application/vnd.detcompile.receipt+json", "payload": "e30=", "signatures": []}),
]  # fmt: skip
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 2**64, 1e308, -0.0, 1e-300, 0.5, "", "x", "\ud800", "\u0000",
    "NaN", "é" * 50, [], {}, [[]], [None], {"": None}, [1, "a"], float("nan"), float("inf"), "x" * 5000,
    list(range(300)),
]  # fmt: skip
FINE = {200, 400, 404, 405, 413, 415, 429}
LEAVES_SECONDS = 1.0  # a request that became a long one is left: that is a case as well


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a nest."""
    actual = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        actual += [(value, key), *places(inner)]
    return actual


def odd(draw: random.Random) -> Any:
    return copy.deepcopy(draw.choice(ODD))  # a later mutation may put something into it


def other_value(draw: random.Random, body: dict[str, Any], others: list[dict[str, Any]]) -> None:
    container, key = draw.choice(places(body))
    kind = draw.randrange(5)
    if kind == 0:
        del container[key]
    elif kind == 1 and isinstance(container, dict):
        container[draw.choice([name for other in others for name in other])] = odd(draw)
    elif kind == 2:
        source, name = draw.choice(places(draw.choice(others)))
        container[key] = copy.deepcopy(source[name])
    elif kind == 3:
        container[key] = [container[key]] * draw.choice([0, 1, 2, 70])
    else:
        container[key] = odd(draw)


def mutated(draw: random.Random) -> tuple[str, bytes]:
    """Draw a route and an almost valid body: changed values, changed bytes or both."""
    path, base = draw.choice(BASES)
    body = json.loads(json.dumps(base))
    for _ in range(draw.choice([0, 1, 1, 2, 3])):
        if places(body):
            other_value(draw, body, [json.loads(json.dumps(other)) for _, other in BASES])
    data = bytearray(json.dumps(body).encode())
    for _ in range(draw.choice([0, 0, 0, 1, 2, 8])):
        at = draw.randrange(len(data) + 1)
        data[at : at + draw.randrange(3)] = draw.randbytes(draw.randrange(3))
    return path, bytes(data[: draw.randrange(len(data) + 1)] if draw.random() < 0.05 else data)


def other_receipt(draw: random.Random, envelope: dict[str, Any]) -> bytes:
    """Draw an envelope with an almost valid receipt, or an almost valid envelope."""
    payload = json.loads(base64.b64decode(envelope["payload"]))
    for _ in range(draw.choice([1, 1, 2, 3])):
        other_value(draw, payload, [json.loads(json.dumps(payload))])
    sealed = envelope | {"payload": base64.b64encode(json.dumps(payload).encode()).decode()}
    if draw.random() < 0.3:
        sealed = json.loads(json.dumps(sealed))
        other_value(draw, sealed, [envelope])
    return json.dumps(sealed).encode()


def raw(draw: random.Random) -> bytes:
    """Draw bytes that are no request, or a request with bad framing."""
    path, body = mutated(draw)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n".encode()
    whole = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    return draw.choice([
        draw.randbytes(draw.randrange(200)),
        whole[: draw.randrange(len(whole))],
        head + b"Content-Length: -1\r\n\r\n" + body,
        head + b"Content-Length: 99999999999999999999\r\n\r\n" + body,
        head + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n" + body,
        head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + body,
        head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(body) + body,
        head + b"X: " + b"a" * draw.choice([100, 70_000]) + b"\r\n\r\n",
        head + b"X-%d: 1\r\n" * 3 % (1, 2, 3) + b"\r\n\r\n",
        whole * 3,
        whole.replace(b"HTTP/1.1", b"HTTP/9.9"),
        whole.replace(b"POST", bytes(draw.choices(range(33, 127), k=6))),
        head.replace(b"application/json", b"text/html") + b"Content-Length: %d\r\n\r\n" % len(body) + body,
        b"GET /" + draw.randbytes(20) + b" HTTP/1.1\r\n\r\n",
        b"GET /v1/receipts/" + b"%2e%2e/" * 5 + b"etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
        whole.replace(b"Host: x", b"Upgrade: websocket\r\nConnection: upgrade"),
    ])  # fmt: skip


def statuses(answer: bytes) -> list[int]:
    return [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:] if part[:3].isdigit()]


def send(address: tuple[str, int], data: bytes) -> list[int]:
    """Send bytes; return the statuses of responses that arrive within a short time."""
    actual = b""
    with socket.create_connection(address, timeout=0.3) as connection:
        try:
            connection.sendall(data)
            while part := connection.recv(1 << 16):
                actual += part
        except (TimeoutError, ConnectionError):
            pass
    return statuses(actual)


class Slow:
    """Clients that send a request a byte at a time, and never all of it."""

    def __init__(self, address: tuple[str, int], count: int) -> None:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9000\r\n"
        self._address = address
        self._data = head + b"\r\n" + b" " * 8000
        self._open = [self._connected() for _ in range(count)]

    def send(self) -> None:
        """Send one byte on each connection; replace connections that the server closed."""
        for place, (connection, sent) in enumerate(self._open):
            try:
                connection.sendall(self._data[sent : sent + 1])
                self._open[place] = connection, sent + 1
            except ConnectionError:
                connection.close()
                self._open[place] = self._connected()

    def close(self) -> None:
        """Close all connections."""
        for connection, _ in self._open:
            connection.close()

    def _connected(self) -> tuple[socket.socket, int]:
        return socket.create_connection(self._address, timeout=5), 0


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=EXHAUSTIVE)])
def test_no_input_causes_a_server_error(count: int, server: Server, http: httpx.Client) -> None:
    draw = random.Random(f"{seed_of_run()} fuzz {count}")
    host, port = server.url.removeprefix("http://").split(":")
    answer = http.post("/v1/completions", json=CANARY | {"receipt": True}).json()
    canary = answer["choices"]
    seen: dict[int, int] = {}
    slow = Slow((host, int(port)), 30)
    for number in range(count):
        if number % 20 == 0:
            slow.send()
        if number % 10 == 9:
            data = raw(draw)
            actual = send((host, int(port)), data)
        else:
            path, data = mutated(draw)
            if number % 10 == 8:
                path, data = "/v1/verify", other_receipt(draw, answer["receipt"])
            try:
                head = {"Content-Type": "application/json"}
                actual = [http.post(path, content=data, headers=head, timeout=LEAVES_SECONDS).status_code]
            except httpx.ReadTimeout:
                actual = []
        assert set(actual) <= FINE, (actual, data)
        for status in actual:
            seen[status] = seen.get(status, 0) + 1
        if number == count // 2:
            resident = resident_bytes(server.process.pid)
    slow.close()
    assert seen[200] > count // 20 and seen[400] > count // 4, seen
    end = time.monotonic() + 60  # what was left ends
    while (again := http.post("/v1/completions", json=CANARY)).status_code == 429 and time.monotonic() < end:
        time.sleep(0.5)
    assert again.json()["choices"] == canary
    assert "detcompile:engine_restarts_total 0.0" in http.get("/metrics").text
    after = resident_bytes(server.process.pid)
    print(f"statuses {seen}; front's memory {resident >> 10} KiB at half, {after >> 10} KiB in the end")
    assert after < 1.05 * resident if count >= 10_000 else after < resident + (64 << 20)
