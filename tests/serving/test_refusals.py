"""What a client does wrong is a 4xx in OpenAI's form, whatever it sends, and moves nobody else's bits."""

import json
import socket
import time

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.serving.conftest import Server

GOOD = {"model": "tiny", "prompt": "x = 1", "max_tokens": 3, "seed": 1}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def canary(http: httpx.Client) -> str:
    answer = http.post("/v1/completions", json=GOOD | {"logprobs": 2})
    assert answer.status_code == 200, answer.text
    return json.dumps(answer.json()["choices"])


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/completions", {"max_tokens": 3}, 400, "prompt"),
        ("/v1/completions", GOOD | {"prompt": []}, 400, "prompt"),
        ("/v1/completions", GOOD | {"prompt": ""}, 400, None),
        ("/v1/completions", GOOD | {"prompt": [[1], 2]}, 400, "prompt"),
        ("/v1/completions", GOOD | {"prompt": [10**6]}, 400, None),
        ("/v1/completions", GOOD | {"prompt": [1] * 5000}, 400, "prompt"),
        ("/v1/completions", GOOD | {"model": "gpt-9"}, 404, "model"),
        ("/v1/completions", GOOD | {"max_tokens": -1}, 400, "max_tokens"),
        ("/v1/completions", GOOD | {"max_tokens": "3"}, 400, "max_tokens"),
        ("/v1/completions", GOOD | {"temperature": -1}, 400, "temperature"),
        ("/v1/completions", GOOD | {"top_p": 0}, 400, "top_p"),
        ("/v1/completions", GOOD | {"n": 0}, 400, "n"),
        ("/v1/completions", GOOD | {"n": 10**9}, 400, "n"),
        ("/v1/completions", GOOD | {"n": 300, "prompt": ["a", "b"]}, 400, None),
        ("/v1/completions", GOOD | {"seed": 1 << 70}, 400, "seed"),
        ("/v1/completions", GOOD | {"logprobs": 21}, 400, "logprobs"),
        ("/v1/completions", GOOD | {"best_of": 2}, 400, "best_of"),
        ("/v1/completions", GOOD | {"suffix": "end"}, 400, "suffix"),
        ("/v1/completions", GOOD | {"logit_bias": {"a": 1}}, 400, "logit_bias"),
        ("/v1/completions", GOOD | {"logit_bias": {"99999999": 1}}, 400, None),
        ("/v1/completions", GOOD | {"stop": [""]}, 400, "stop"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages"),
        ("/v1/chat/completions", CHAT | {"tools": [{"type": "function"}]}, 400, "tools[0]"),
        (
            "/v1/chat/completions",
            CHAT | {"response_format": {"type": "json_schema"}},
            400,
            "response_format.json_schema",
        ),
        ("/v1/chat/completions", CHAT | {"response_format": {"type": "xml"}}, 400, "response_format.type"),
        ("/v1/completions", GOOD | {"tools": [{}]}, 400, "tools"),
        ("/v1/completions", GOOD | {"guided_regex": ""}, 400, "guided_regex"),
        ("/v1/completions", GOOD | {"guided_regex": "a", "guided_choice": ["a"]}, 400, "guided_regex"),
        ("/v1/completions", GOOD | {"structured_outputs": {}}, 400, "structured_outputs"),
        ("/v1/completions", GOOD | {"guided_grammar": "start: missing"}, 400, None),
        ("/v1/chat/completions", CHAT | {"top_logprobs": 2}, 400, "top_logprobs"),
        ("/v1/chat/completions", CHAT | {"echo": True}, 400, "echo"),
        ("/v1/completions", GOOD | {"prompt_logprobs": 21}, 400, "prompt_logprobs"),
        ("/v1/completions", GOOD | {"prompt_logprobs": -1}, 400, "prompt_logprobs"),
        ("/v1/completions", GOOD | {"return_sampling_logprobs": True}, 400, "return_sampling_logprobs"),
        ("/v1/chat/completions", CHAT | {"return_sampling_mask": True}, 400, "return_sampling_mask"),
        (
            "/v1/completions",
            GOOD | {"return_sampling_mask": True, "logprobs": 0, "temperature": 1, "top_k": 2049},
            400,
            "return_sampling_mask",
        ),
        ("/v1/responses", {"input": "x", "prompt_logprobs": 1}, 400, "prompt_logprobs"),
        ("/v1/completions", GOOD | {"length_penalty": 2.0}, 400, "length_penalty"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            400,
            "messages[0].content[0]",
        ),
        ("/v1/images/generations", {"input": "x"}, 404, None),
        ("/v1/completions/", GOOD, 404, None),  # a redirect would go to the host that the client names
        ("/tokenize", {}, 400, "prompt"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
    ],
)
def test_unsupported_fields_are_named(http: httpx.Client, path: str, body: dict, status: int, param: str) -> None:
    for sent in (body, body | {"stream": True}):
        answer = http.post(path, json=sent)
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error" and error["message"] and error["param"] == param


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b"", "application/json", 400),
        (b"\xff\xfe", "application/json", 400),
        (b'{"prompt": "\\ud800"}', "application/json", 400),
        (b'{"prompt": "x", "temperature": NaN}', "application/json", 400),
        (b'{"prompt": "x", "temperature": 1e999}', "application/json", 400),
        (b'{"prompt": "x", "user": ' + b"[" * 100 + b"]" * 100 + b"}", "application/json", 400),
        (b'{"prompt": [' + b"1," * 1_100_000 + b"1]}", "application/json", 400),
        (b'{"prompt": [' + b"[]" * 1_500_000 + b"]}", "application/json", 400),
        (b'{"prompt": "' + b'\\"' * 1_500_000, "application/json", 400),
        (b'{"prompt": "' + b"x" * (5 << 20) + b'"}', "application/json", 413),
        (b'{"prompt": "x"}', "text/plain", 415),
    ],
)
def test_invalid_bodies_are_refused(http: httpx.Client, body: bytes, kind: str, status: int) -> None:
    start = time.monotonic()
    answer = http.post("/v1/completions", content=body, headers={"Content-Type": kind})
    assert answer.status_code == status and answer.json()["error"]["message"]
    assert time.monotonic() - start < 10  # reading it takes a time that grows with its length alone


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = ("prompt", "messages", "n", "stop", "seed", "temperature", "top_p", "logit_bias", "logprobs", "max_tokens",
          "stream", "stream_options", "echo", "min_tokens", "top_k", "priority", "stop_token_ids", "tools")  # fmt: skip


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3), chat=st.booleans())
def test_no_body_causes_a_server_error(http: httpx.Client, changes: dict, chat: bool) -> None:
    path, good = ("/v1/chat/completions", CHAT) if chat else ("/v1/completions", GOOD)
    body = good | changes
    if isinstance(body.get("n"), int) and body["n"] > 4:
        body["n"] = 4
    if body.get("max_tokens") is None or (isinstance(body["max_tokens"], int) and body["max_tokens"] > 8):
        body["max_tokens"] = 8
    sent = json.dumps(body)  # with NaN and infinities as Python writes them
    answer = http.post(path, content=sent, headers={"Content-Type": "application/json"})
    assert answer.status_code in (200, 400, 404), (body, answer.text)


@pytest.mark.parametrize(
    "changes",
    [
        {"allowed_token_ids": [0], "min_tokens": 3},
        {"allowed_token_ids": [5], "guided_regex": "a"},
        {"allowed_token_ids": [7], "stop_token_ids": [7], "min_tokens": 3},
        {"stop_token_ids": list(range(4096)), "min_tokens": 3},
        {"logit_bias": {"5": 3e38}, "temperature": 1e-4},
        {"repetition_penalty": 1.2e-38},
        {"repetition_penalty": 1.2e-38, "temperature": 0},
        {"repetition_penalty": 1.2e-38, "frequency_penalty": 2, "temperature": 1e-4, "n": 2},
    ],
)
def test_parameters_that_exclude_all_tokens_are_a_400(http: httpx.Client, changes: dict) -> None:
    for path, body in (("/v1/completions", GOOD), ("/v1/chat/completions", CHAT | {"max_tokens": 3})):
        for sent in (body | changes, body | changes | {"stream": True}):
            answer = http.post(path, json=sent)
            assert answer.status_code == 400, answer.text
            assert "no token left to draw" in answer.json()["error"]["message"]


def test_disconnect_cancels_request(http: httpx.Client, server: Server) -> None:
    before = canary(http)
    host, port = server.url.removeprefix("http://").split(":")
    for stream in (True, False):
        body = json.dumps(GOOD | {"max_tokens": 1900, "ignore_eos": True, "stream": stream}).encode()
        with socket.create_connection((host, int(port))) as sock:
            fields = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\n" + fields.encode() + body)
            await_metric(http, "vllm:num_requests_running", 1)
        await_metric(http, "vllm:num_requests_running", 0)
    cancelled = metric(http, "detcompile:requests_cancelled_total")
    assert cancelled >= 2 and canary(http) == before


def metric(http: httpx.Client, name: str) -> float:
    line = next(line for line in http.get("/metrics").text.splitlines() if line.startswith(name + " "))
    return float(line.split()[1])


def await_metric(http: httpx.Client, name: str, value: float) -> None:
    end = time.monotonic() + 30
    while metric(http, name) != value:
        assert time.monotonic() < end, f"{name} never was {value}"
        time.sleep(0.05)
