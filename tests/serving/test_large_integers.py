"""Integers beyond 64 bits, wherever a request or a receipt has one, are refused or harmless: none reaches an engine."""

import asyncio
import base64
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import inspect

from detcompile.errors import InvalidInput
from detcompile.serving.app import JOURNALED, POSTS
from detcompile.serving.engines import engine_verifications
from detcompile.serving.engines.engine_verifications import Verifications
from detcompile.serving.engines.protocol import Tokens, Verified, Verify, frame
from detcompile.serving.openai.response_schema import ResponsesRequest
from detcompile.serving.openai.responses import RESPONSES
from detcompile.serving.receipts.receipt import LogPlace, decode_receipt
from detcompile.serving.receipts.verdict import Verdict
from tests.serving.test_slots import CHAT, Kind, serving, settle
from tests.serving.test_waiting import envelope_of

LARGE = 10**30
TYPES = {path: kind for path, (kind, _) in JOURNALED.items()} | {RESPONSES: ResponsesRequest}
TYPES |= {paths[0]: kind for paths, kind, _ in POSTS}
TEXT = {"input": "a"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [5]},
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
    RESPONSES: TEXT,
    "/v1/embeddings": TEXT,
    "/classify": TEXT,
    "/score": {"text_1": "a", "text_2": "b"},
    "/rerank": {"query": "a", "documents": ["b"]},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
    "/inference/v1/generate": {"token_ids": [5], "sampling_params": {}},
    "/v1/chat/completions/tokens": CHAT | {"tokens": [5]},
    "/generate": {"input_ids": [5]},
    "/v1/messages/count_tokens": {"messages": CHAT["messages"]},
}


def large_values(kind: inspect.Type, depth: int = 0) -> Iterator[Any]:
    """Values of a type that hold one integer, which is large."""
    if depth > 6:
        return
    if isinstance(kind, (inspect.IntType, inspect.AnyType)):
        yield LARGE
        yield -LARGE
    elif isinstance(kind, inspect.UnionType):
        for one in kind.types:
            yield from large_values(one, depth + 1)
    elif isinstance(kind, inspect.ListType):
        yield from ([value] for value in large_values(kind.item_type, depth + 1))
    elif isinstance(kind, inspect.DictType):
        yield from ({"5": value} for value in large_values(kind.value_type, depth + 1))
    elif isinstance(kind, inspect.StructType):
        for field in kind.fields:
            yield from ({field.encode_name: value} for value in large_values(field.type, depth + 1))


@pytest.mark.parametrize("path", TYPES)
def test_large_integers_in_requests_are_harmless(path: str, tmp_path: Path) -> None:
    """The engines of ``serving`` encode each request as real ones would."""
    actual = inspect.type_info(TYPES[path])
    assert isinstance(actual, inspect.StructType)
    changes = [{field.encode_name: value} for field in actual.fields for value in large_values(field.type)]

    async def scenario() -> None:
        async with serving(Kind(path, {}, embeds="input" in BODIES[path] and path != RESPONSES), tmp_path) as (
            service,
            requests,
        ):
            for change in changes:
                await requests.ask(BODIES[path] | change)
                assert requests.status in (200, 400), (change, requests.content)
                await settle(service)

    asyncio.run(scenario())


def integers(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) of an integer."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        if isinstance(inner, int):
            yield value, key
        yield from integers(inner)


def test_large_integers_in_receipts_are_harmless(tmp_path: Path) -> None:
    envelope = envelope_of(log=LogPlace(index=3, previous=None), params={"max_tokens": 4})
    payload = json.loads(base64.b64decode(envelope["payload"]))
    payload["prompts"][0]["samples"][0]["stop_reason"] = 5
    decode_receipt(json.dumps(payload).encode())
    count = len(list(integers(payload)))
    assert count >= 7, "the receipt lacks some of its integers"

    async def scenario() -> None:
        async with serving(Kind("/v1/verify", {}), tmp_path) as (service, requests):
            for place in range(count):
                for large in (LARGE, -LARGE, 1 << 63):
                    changed = copy.deepcopy(payload)
                    container, key = list(integers(changed))[place]
                    container[key] = large
                    data = json.dumps(changed).encode()
                    await requests.ask(envelope | {"payload": base64.b64encode(data).decode()})
                    assert requests.status == 400, (key, requests.content)
                    await settle(service)

    asyncio.run(scenario())


@pytest.mark.parametrize("fault", [Verdict(outcome="differs", expected=LARGE), InvalidInput("no"), ValueError("fault")])
def test_unsendable_verdict_fails_only_its_receipt(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def steps(receipt: Any) -> Iterator[str]:
        yield "waits"
        if receipt.id == "bad" and isinstance(fault, Exception):
            raise fault
        return fault if receipt.id == "bad" else Verdict(outcome="equal")

    forcing = SimpleNamespace(step=lambda: None, free=lambda: None, has_room=True)
    monkeypatch.setattr(
        engine_verifications, "Replayer", lambda *_, **__: SimpleNamespace(steps=steps, forcing=forcing)
    )
    sent: list[Any] = []

    def send(report: Any) -> None:
        frame(report)
        sent.append(report)

    verifications = Verifications(None, {}, send)  # type: ignore[arg-type]
    for name in ("bad", "good"):
        verifications.add(Verify(name, base64.b64decode(envelope_of(id=name)["payload"])))
    while verifications.step():
        continue
    failed, verified = sent
    assert isinstance(verified, Verified) and verified.request_id == "good" and verified.verdict.outcome == "equal"
    if isinstance(fault, InvalidInput):
        assert failed.request_id == "bad" and failed.message == "no"
    else:
        assert isinstance(failed, Tokens) and failed.deltas[0].request_id == "bad" and failed.deltas[0].error
