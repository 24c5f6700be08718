"""Embeddings, classes and scores by HTTP: the bytes that the compiled model gives, whoever else asks beside."""

import asyncio
import decimal
import functools
import math
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import mpmath
import numpy as np
import openai
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

import detcompile
from detcompile.models.hub import TINY_FOLDER
from detcompile.serving.engines.engine_verifications import Verifications
from detcompile.serving.engines.pooling_server import PoolingServer
from detcompile.serving.engines.protocol import Cancel, Pool, Pooled, PoolingFacts, Tokens, Verify
from detcompile.serving.http_errors import HTTPError
from detcompile.serving.journal.jobs import Call
from detcompile.serving.pooling import routes as pooling_routes
from detcompile.serving.pooling.routes import ScoreRequest
from tests.bits import assert_bitwise_equal
from tests.exhaustive import EXHAUSTIVE
from tests.serving.conftest import Server, started

TEXTS = ["def add(a, b):", "x = 1", "import os\nimport sys\n" * 9, "Ünïcode 東京"]
LABELS = {0: "relevant"}


def reranker_of(folder: Path) -> Path:
    """A cross-encoder of random weights over the embedded model's tokenizer, with one label."""
    model = folder / "reranker"
    if not model.exists():
        sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
        known = {"vocab_size": 4096, "max_position_embeddings": 300, "pad_token_id": 1, "id2label": LABELS}
        config = AutoConfig.for_model("roberta", **sizes, **known)
        torch.manual_seed(0)
        made = AutoModelForSequenceClassification.from_config(config)
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.mul_(4.0) if parameter.dim() > 1 else parameter.add_(torch.randn_like(parameter) * 0.1)
        made.save_pretrained(model)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(Path(TINY_FOLDER) / name, model / name)
    return model


def served(folder: Path, *options: str, model: Path | None = None) -> Iterator[Server]:
    actual = started(folder, *options, model=model)
    yield actual
    assert actual.stop() == 0
    assert not any("Traceback" in line for line in actual.lines), "".join(actual.lines)


@pytest.fixture(scope="module")
def embedder(folder: Path) -> Iterator[Server]:
    yield from served(folder, "--task", "embed")


@pytest.fixture(scope="module")
def reranker(folder: Path) -> Iterator[Server]:
    yield from served(folder, model=reranker_of(folder))


@functools.cache
def embedding_model() -> Any:
    return detcompile.compile("tiny", task="embed")


@functools.cache
def scoring_model(path: Path) -> Any:
    return detcompile.compile(path)


def test_openai_client_gets_model_bytes(embedder: Server) -> None:
    client = openai.OpenAI(base_url=f"{embedder.url}/v1", api_key="none", timeout=120, max_retries=0)
    model = embedding_model()
    expected = model.embed(TEXTS)
    answer = client.embeddings.create(model="tiny", input=TEXTS)  # it asks for base64
    assert_bitwise_equal(torch.tensor([item.embedding for item in answer.data]), expected)
    assert [item.index for item in answer.data] == [0, 1, 2, 3] and answer.system_fingerprint == model.fingerprint
    ids = model.tokenizer(TEXTS)["input_ids"]
    assert answer.usage.total_tokens == sum(map(len, ids))
    for given in (ids, [TEXTS[3]], ids[3]):
        rows = client.embeddings.create(model="tiny", input=given, encoding_format="float").data
        assert_bitwise_equal(torch.tensor([rows[-1].embedding]), expected[3:])
    item = {"pooling": "mean", "normalize": False}
    plain = client.embeddings.create(model="tiny", input=TEXTS, extra_body=item, dimensions=expected.shape[1])
    assert_bitwise_equal(
        torch.tensor([row.embedding for row in plain.data]), model.embed(TEXTS, pooling="mean", normalize=False)
    )

    async def many() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{embedder.url}/v1", api_key="none") as many_at_once:
            requests = [many_at_once.embeddings.create(model="tiny", input=TEXTS[i % 4]) for i in range(24)]
            return await asyncio.gather(*requests)

    for index, one in enumerate(asyncio.run(many())):
        assert one.data[0].embedding == answer.data[index % 4].embedding


def test_embedding_model_scores_by_cosine(embedder: Server) -> None:
    with httpx.Client(base_url=embedder.url, timeout=120) as http:
        answer = http.post("/v1/score", json={"text_1": TEXTS[0], "text_2": TEXTS}).json()
        vectors = [[float(value) for value in row] for row in embedding_model().embed(TEXTS)]
        cosines = [math.fsum(x * y for x, y in zip(vectors[0], row)) for row in vectors]
        assert [row["score"] for row in answer["data"]] == cosines and cosines[0] == pytest.approx(1)
        pairs = http.post("/score", json={"text_1": [TEXTS[0]] * 4, "text_2": TEXTS}).json()
        assert pairs["data"] == answer["data"]
        actual = http.post("/v1/rerank", json={"query": TEXTS[0], "documents": TEXTS, "top_n": 2}).json()["results"]
        order = sorted(range(4), key=lambda index: -cosines[index])[:2]
        assert [(row["index"], row["relevance_score"]) for row in actual] == [(i, cosines[i]) for i in order]
        assert actual[0]["document"]["text"] == TEXTS[order[0]]


@EXHAUSTIVE  # another server, and another model
def test_reranker_gives_model_scores(reranker: Server, folder: Path) -> None:
    model = scoring_model(reranker_of(folder))
    encode = model.tokenizer.backend_tokenizer.encode
    values = [float(row[0]) for row in model.score([encode(TEXTS[0], text).ids for text in TEXTS])]
    with httpx.Client(base_url=reranker.url, timeout=120) as http:
        assert http.get("/v1/fingerprint").json()["fingerprint"] == model.fingerprint
        requests = {"text_1": TEXTS[0], "text_2": TEXTS}
        raw = http.post("/v1/score", json=requests | {"use_activation": False}).json()["data"]
        assert [row["score"] for row in raw] == values and len(set(values)) == 4
        sigmoids = [row["score"] for row in http.post("/v1/score", json=requests).json()["data"]]
        assert sigmoids == pytest.approx(torch.tensor(values, dtype=torch.float64).sigmoid().tolist(), rel=1e-12)
        actual = http.post("/v1/rerank", json={"query": TEXTS[0], "documents": TEXTS}).json()["results"]
        assert [row["index"] for row in actual] == sorted(range(4), key=lambda index: -values[index])
        classes = http.post("/classify", json={"input": TEXTS, "use_activation": False}).json()["data"]
        assert [row["probs"] for row in classes] == model.score(TEXTS).tolist()
        assert {row["label"] for row in classes} == {"relevant"}

        def one(index: int) -> float:
            item = {"text_1": TEXTS[0], "text_2": TEXTS[index % 4], "use_activation": False}
            return http.post("/v1/score", json=item).json()["data"][0]["score"]

        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(one, range(24))) == values * 6


CAUSAL = [
    ("/v1/completions", {"prompt": "x"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ("/v1/responses", {"input": "x"}),
]
POOLED = [
    ("/v1/embeddings", {"input": "x"}),
    ("/classify", {"input": "x"}),
    ("/v1/score", {"text_1": "x", "text_2": "y"}),
    ("/v1/rerank", {"query": "x", "documents": ["y"]}),
]


def test_unsupported_task_error_names_supported_task(server: Server, embedder: Server) -> None:
    for url, routes, message in (
        (server.url, POOLED, "generates text"),
        (embedder.url, [*CAUSAL, ("/classify", {"input": "x"})], "gives embeddings"),
    ):
        for path, body in routes:
            answer = httpx.post(url + path, json=body)
            assert answer.status_code == 400, (path, answer.text)
            assert answer.json()["error"]["code"] == "unsupported_task" and message in answer.text
    assert httpx.get(f"{embedder.url}/v1/models").json()["data"][0]["id"] == "tiny"
    assert httpx.get(f"{embedder.url}/ready").status_code == 200
    counted = httpx.get(f"{embedder.url}/metrics").text
    assert "vllm:prompt_tokens_total" in counted


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": ""}, "input"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": ["x", 3]}, "input"),
        ("/v1/embeddings", {"input": ["x"] * 2049}, "input"),
        ("/v1/embeddings", {"input": [5000]}, "input"),
        ("/v1/embeddings", {"input": [[5] * 5000]}, "input"),
        ("/v1/embeddings", {"input": "x", "dimensions": 3}, "dimensions"),
        ("/v1/embeddings", {"input": "x", "encoding_format": "int"}, "encoding_format"),
        ("/v1/embeddings", {"input": "x", "truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ("/v1/score", {"text_1": ["x", "y"], "text_2": ["x"] * 3}, "text_1"),
        ("/v1/score", {"text_1": "x", "text_2": []}, "text_2"),
        ("/v1/rerank", {"query": "x", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "x", "documents": ["y"], "top_n": -1}, "top_n"),
    ],
)
def test_unsupported_pooling_requests_are_named(embedder: Server, path: str, body: dict, param: str) -> None:
    answer = httpx.post(embedder.url + path, json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_classes_of_a_row() -> None:
    facts = PoolingFacts(task="classify", num_columns=3, labels=["a", "b", "c"], each_alone=False,
                         reads_token_types=False)  # fmt: skip
    row = [0.5, 2.0, -1000.0]
    actual = pooling_routes._classes(0, row, facts, True)
    assert actual["label"] == "b" and actual["num_classes"] == 3
    assert actual["probs"] == pytest.approx(torch.tensor(row, dtype=torch.float64).softmax(0).tolist(), rel=1e-12)
    facts.each_alone = True
    assert pooling_routes._classes(0, row, facts, True)["probs"] == pytest.approx(
        torch.tensor(row, dtype=torch.float64).sigmoid().tolist(), rel=1e-12
    )
    assert pooling_routes._classes(0, row, facts, False)["probs"] == row


def test_probabilities_do_not_depend_on_libc() -> None:
    values = torch.linspace(-40, 0, 2000, dtype=torch.float64).tolist()
    with mpmath.workprec(200):
        exps = [float(mpmath.exp(value)) for value in values]
    assert [pooling_routes._exp(value) for value in values] == exps
    with decimal.localcontext(prec=3, traps=[decimal.Inexact]):  # as a program around the server may set it
        assert [pooling_routes._exp(value) for value in values[:9]] == exps[:9]
    row = pooling_routes._softmax([0.0, -1e30, -math.inf])
    assert row == [1.0, 0.0, 0.0] and pooling_routes._sigmoid(-1e30) == 0.0


def test_models_with_token_types_for_pairs_are_refused() -> None:
    class TokenizerPool:
        async def encode_pair(self, first: str, second: str, *, param: str, owner: str) -> tuple[list[int], list[int]]:
            return [2, 5, 3, 6, 3], [0, 0, 0, 1, 1]

    class Service:
        texts, name = TokenizerPool(), "bert"

        def require_ready(self) -> None:
            pass

        def require_model(self, name: str | None) -> None:
            pass

        def require_pooling(self, *tasks: str) -> PoolingFacts:
            return self.facts

    service: Any = Service()
    requests = ScoreRequest(text_1="a", text_2="b")
    for labels, message in ((["one"], "token_type_ids"), (["one", "two"], "2: use POST /classify")):
        service.facts = PoolingFacts(task="classify", num_columns=len(labels), labels=labels, each_alone=True,
                                     reads_token_types=True)  # fmt: skip
        with pytest.raises(HTTPError, match=message):
            asyncio.run(pooling_routes.score(service, requests, Call("/score", b"")))


class Model:
    """Says of each prompt its length, and notes how many tokens each step had."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []

    def embed(self, prompts: list[list[int]], *, pooling: Any, normalize: bool) -> torch.Tensor:
        self.steps.append([len(prompt) for prompt in prompts])
        if any(7 in prompt for prompt in prompts):
            raise MemoryError("none is left")
        if any(8 in prompt for prompt in prompts):
            raise torch.AcceleratorError("an illegal memory access")
        return torch.tensor([[float(len(prompt)), float(pooling == "mean")] for prompt in prompts])


class Wire:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, report: Any) -> None:
        self.sent.append(report)


def test_requests_take_turns_and_share_steps() -> None:
    model: Any = Model()
    wire: Any = Wire()
    server = PoolingServer(model, wire)
    requests = {"long": [[5] * 3000] * 3, "short": [[5], [5, 5]], "mean": [[5]], "gone": [[5]], "huge": [[5] * 9000]}
    for name, prompts in requests.items():
        server.take(Pool(name, prompts, "mean" if name == "mean" else None, True))
    server.take(Cancel("gone"))
    while server.step():
        assert server.statistics.num_running <= 4
    assert model.steps == [[3000, 1, 2], [1], [9000], [3000], [3000]]
    rows = {report.request_id: np.frombuffer(report.values, "<f4").reshape(-1, report.num_columns).tolist()
            for report in wire.sent}  # fmt: skip
    assert list(rows) == ["short", "mean", "huge", "long"] and all(isinstance(item, Pooled) for item in wire.sent)
    assert rows == {"long": [[3000, 0]] * 3, "short": [[1, 0], [2, 0]], "mean": [[1, 1]], "huge": [[9000, 0]]}


@pytest.mark.parametrize("pooling", [None, "mean"], ids=["in one step", "in two"])
def test_failed_request_fails_alone(pooling: Any) -> None:
    wire: Any = Wire()
    model: Any = Model()
    server = PoolingServer(model, wire)
    for name, prompts, how in (("first", [[5, 5]], pooling), ("bad", [[5], [7]], None), ("good", [[5]], pooling)):
        server.take(Pool(name, prompts, how, True))
    while server.step():
        pass
    calls = {report.deltas[0].request_id if isinstance(report, Tokens) else report.request_id: report
            for report in wire.sent}  # fmt: skip
    assert len(wire.sent) == len(calls) == 3 and "none is left" in calls["bad"].deltas[0].error
    assert all(isinstance(calls[name], Pooled) for name in ("first", "good"))


def test_engine_ends_when_its_device_is_lost() -> None:
    """Every further step would fail there, so another process serves the open requests."""
    model: Any = Model()
    wire: Any = Wire()
    server = PoolingServer(model, wire)
    server.take(Pool("1", [[8]], None, True))
    with pytest.raises(torch.AcceleratorError):
        server.step()
    verifications = Verifications(model, {}, wire.send)
    verifications._steps = lambda receipt: iter(server._run(server._shares()) for _ in range(1))  # type: ignore
    verifications.add(Verify("2", b"{}"))
    with pytest.raises(torch.AcceleratorError):
        verifications.step()
    assert not wire.sent
