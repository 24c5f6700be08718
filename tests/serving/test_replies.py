"""From a request to its parameters, and from tokens to chunks, without a server."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.serving.engines.answers import Answer
from detcompile.serving.engines.notices import Bell
from detcompile.serving.engines.protocol import Delta, SampleDelta, Statistics
from detcompile.serving.http_errors import HTTPError
from detcompile.serving.metrics import Metrics
from detcompile.serving.openai.chat import _Chat
from detcompile.serving.openai.completions import _Completion
from detcompile.serving.openai.parameters import chat_params, completion_params
from detcompile.serving.openai.schema import ChatRequest, CompletionRequest, Message
from detcompile.serving.receipts.issuer import Issuer
from detcompile.serving.texts import Texts
from tests.serving.scripted_engine import HELLO

DEFAULTS = {"temperature": 0.6, "top_k": 20, "max_tokens": 10}
MESSAGES = [Message(role="user", content="x")]


def test_defaults_hold_where_a_request_says_nothing() -> None:
    asked = CompletionRequest(prompt="x"), ChatRequest(messages=MESSAGES)
    for params in (completion_params(asked[0], DEFAULTS), chat_params(asked[1], DEFAULTS)):
        assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.6, 20, 1.0, 10)
    params = completion_params(CompletionRequest(prompt="x", temperature=0.0, top_k=0, max_tokens=7), DEFAULTS)
    assert (params.temperature, params.top_k, params.max_tokens) == (0.0, 0, 7)
    assert completion_params(CompletionRequest(prompt="x"), {}).max_tokens == 16
    assert chat_params(ChatRequest(messages=MESSAGES), {}).max_tokens is None
    with pytest.raises(HTTPError, match="min_tokens 12"):
        completion_params(CompletionRequest(prompt="x", max_tokens=20, min_tokens=12), DEFAULTS)


@pytest.mark.parametrize("stop", [None, [], "a", ["a", "b"]])
def test_stop_strings_in_every_form(stop: Any) -> None:
    params = completion_params(CompletionRequest(prompt="x", stop=stop), {})
    assert list(params.stop) == ([stop] if isinstance(stop, str) else stop or [])


@pytest.mark.parametrize("kind", [_Completion, _Chat])
@pytest.mark.parametrize("with_ids", [True, False])
def test_token_ids_whose_text_is_not_complete_are_not_lost(kind: type, with_ids: bool) -> None:
    """A character may take several tokens: the first of them have no text, and still are in some chunk."""
    texts = Texts(HELLO)
    ids = texts._encode("x東京🎉y", False)
    assert len(ids) > 5

    answer = Answer("1", [5], SamplingParams(seed=1, max_tokens=len(ids)), Bell())

    async def draw() -> None:
        for place, token in enumerate(ids, 1):
            sample = SampleDelta(0, [token], None, "length" if place == len(ids) else None, None)
            answer.extend(Delta("1", [sample], place == len(ids), None, None, 0, None))
            answer.changed.ring()
            await asyncio.sleep(0.01)

    async def chunks() -> list[dict]:
        service: Any = SimpleNamespace(texts=texts, name="scripted", hello=HELLO, receipts=Issuer())
        drawing, found = asyncio.create_task(draw()), b""
        async for data in kind(service, [answer], with_ids=with_ids).events():
            found += data
        await drawing
        return [json.loads(line.removeprefix("data: ")) for line in found.decode().split("\n\n") if line]

    choices = [choice for chunk in asyncio.run(chunks()) for choice in chunk["choices"]]
    texts_of = [choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices]
    assert "".join(texts_of) == "x東京🎉y" and len(choices) > 2
    shown = [token for choice in choices for token in choice.get("token_ids", [])]
    assert shown == (ids if with_ids else [])


def test_retry_after_counts_the_time_of_steps_alone() -> None:
    fleet: Any = SimpleNamespace(statistics=Statistics(), hello=None)
    metrics = Metrics(fleet, 1, 1)
    assert metrics.prefill_rate() == 1000.0
    fleet.statistics = Statistics(num_prefill_tokens=5000, busy_seconds=2.0)
    assert metrics.prefill_rate() == 2500.0
