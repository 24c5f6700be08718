"""Engines, compilations and checkpoints share no tokenizer, folder or patched module with their caller."""

import concurrent.futures
import contextlib
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch._dynamo.convert_frame import compile_lock
from transformers import AttentionInterface, AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

import detcompile
from detcompile import LLM, CompiledEmbedder, EngineConfig, InvalidInput, Numerics, SamplingParams, UnsupportedModel
from detcompile.models.hub import TINY_FOLDER
from detcompile.models.loading import tokenizer_of
from detcompile.passes import capture
from detcompile.passes.lowering import lower, lower_view, lower_with_states
from detcompile.passes.packaging import package
from detcompile.passes.training import regions
from detcompile.passes.training.tracing import trace_regions
from tests.model_cases import MAX_CONTEXT, VOCAB_SIZE, compiled, random_model
from tests.runtime.grammar_cases import small_tokenizer

TEXT = "a return of values"
CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
CONFIG = EngineConfig(num_blocks=24, block_size=16, max_num_seqs=2, max_num_batched_tokens=64)
ONE = SamplingParams(temperature=0, max_tokens=1)
CHANGES: dict[str, Callable[[PreTrainedTokenizerFast], object]] = {
    "a call that truncates and pads": lambda t: t(["a b c d"], truncation=True, max_length=2, padding="max_length"),
    "truncation of the backend": lambda t: t.backend_tokenizer.enable_truncation(2),
    "padding of the backend": lambda t: t.backend_tokenizer.enable_padding(length=40, pad_id=0, pad_token="<end>"),
    "a token": lambda t: t.add_tokens([TEXT[:4]]),
    "a special token": lambda t: t.add_special_tokens({"additional_special_tokens": [TEXT[2:6]]}),
}


def engine_ids(tokenizer: Any) -> Callable[[], list[int]]:
    engine = compiled("qwen3", torch.float32).engine(CONFIG, tokenizer=tokenizer)
    return lambda: list(engine.generate(TEXT, ONE, progress=False)[0].prompt_token_ids)


def chat_ids(tokenizer: Any) -> Callable[[], list[int]]:
    options = {"num_gpu_blocks_override": 24, "block_size": 16, "max_num_batched_tokens": 64, "max_num_seqs": 2}
    llm = LLM(compiled("qwen3", torch.float32), tokenizer=tokenizer, **options)
    message = {"role": "user", "content": TEXT}
    return lambda: list(llm.chat([message], ONE, use_tqdm=False, chat_template=CHAT)[0].prompt_token_ids)


def embedder_ids(tokenizer: Any) -> Callable[[], list[int]]:
    embedder: Any = object.__new__(CompiledEmbedder)
    embedder.tokenizer, embedder.vocab_size = tokenizer, VOCAB_SIZE
    embedder._token_ids(TEXT)
    return lambda: list(embedder._token_ids(TEXT)[0])


@pytest.mark.parametrize("door", [engine_ids, chat_ids, embedder_ids])
def test_no_tokenizer_is_shared(door: Callable[[Any], Callable[[], list[int]]]) -> None:
    whole = small_tokenizer()(TEXT)["input_ids"]
    given = deepcopy(small_tokenizer())
    given.pad_token = "<end>"
    given.backend_tokenizer.enable_truncation(3)
    ids = door(given)
    for change, apply in CHANGES.items():
        apply(given)
        backend = given.backend_tokenizer
        before = backend.truncation, backend.padding
        assert ids() == whole, change
        assert (backend.truncation, backend.padding) == before, change


def test_a_tokenizer_that_cannot_be_copied_is_refused() -> None:
    class Held(PreTrainedTokenizerFast):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("cannot pickle a lock")

    given = Held(tokenizer_object=small_tokenizer().backend_tokenizer)
    with pytest.raises(InvalidInput, match=r"Held cannot be copied.*copy\.deepcopy"):
        engine_ids(given)


def test_tokenizer_is_of_the_compiled_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder, token in ((here, "<end>"), (there, "<other>")):
        random_model("qwen3", torch.float32).save_pretrained(folder / "model")
        other = deepcopy(small_tokenizer())
        other.add_special_tokens({"pad_token": token})
        other.save_pretrained(folder / "model")
    monkeypatch.chdir(here)
    loaded, given = detcompile.load_model("model", device="cpu"), random_model("qwen3", torch.float32)
    given.name_or_path = "model"
    model = detcompile.compile(given, max_context=MAX_CONTEXT)
    monkeypatch.chdir(there)
    assert tokenizer_of(loaded).pad_token == "<end>" and loaded.name_or_path == str(here / "model")
    for file in (here / "model").iterdir():
        file.unlink()
    assert model.tokenizer.pad_token == "<end>"


DOORS: dict[str, Callable[[], object]] = {
    "load_model": lambda: detcompile.load_model("tiny", device="cpu"),
    "load_model of random weights": lambda: detcompile.load_model("tiny", random=True, device="cpu"),
    "compile": lambda: detcompile.compile(random_model("qwen3", torch.float32), max_context=MAX_CONTEXT),
    "trainer": lambda: detcompile.trainer(random_model("qwen3", torch.float32, num_hidden_layers=1), max_context=64),
    "tokenizer": lambda: tokenizer_of(SimpleNamespace(config=SimpleNamespace(), name_or_path=str(TINY_FOLDER))),
}


@pytest.mark.parametrize("door", DOORS)
def test_loading_and_capture_hold_one_lock(door: str) -> None:
    held: dict[str, list[bool]] = {}

    def watched(name: str, function: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            held.setdefault(name, []).append(compile_lock._is_owned())
            return function(*args, **kwargs)

        return run

    patched = [(AttentionInterface, "register"), (AutoConfig, "from_pretrained"), (AutoTokenizer, "from_pretrained")]
    patched += [(regions, "compile_fx")]
    with contextlib.ExitStack() as patches:
        for kind, name in patched:
            patches.enter_context(mock.patch.object(kind, name, watched(name, getattr(kind, name))))
        DOORS[door]()
    assert held and all(all(calls) for calls in held.values()), held


@pytest.mark.parametrize("function", [lower, lower_view, lower_with_states, package, trace_regions])
def test_every_capture_takes_the_lock(function: Callable[..., object], monkeypatch: pytest.MonkeyPatch) -> None:
    lock = mock.MagicMock()
    monkeypatch.setattr(capture, "compile_lock", lock)
    with pytest.raises(TypeError, match="argument"):
        function()
    assert lock.__enter__.called and lock.__exit__.called


def test_a_refusal_releases_the_lock() -> None:
    def refuse() -> None:
        with pytest.raises(UnsupportedModel, match="training mode"):
            lower(random_model("qwen3", torch.float32).train(), Numerics(), 64)

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        thread.submit(refuse).result()
    assert compile_lock.acquire(blocking=False)
    compile_lock.release()


@pytest.mark.exhaustive
def test_threads_that_load_and_compile_get_what_one_gets() -> None:
    expected = detcompile.compile("tiny", device="cpu").fingerprint
    works: list[Callable[[], Any]] = [
        lambda: detcompile.compile("tiny", device="cpu").fingerprint,
        lambda: detcompile.compile(detcompile.load_model("tiny", device="cpu")).fingerprint,
        lambda: detcompile.trainer("tiny", device="cpu") and expected,
        lambda: detcompile.compile(TINY_FOLDER, device="cpu").fingerprint,
    ]
    with concurrent.futures.ThreadPoolExecutor(len(works)) as threads:
        actual = [thread.result() for thread in [threads.submit(work) for work in works * 2]]
    assert actual == [expected] * len(actual)
    assert detcompile.compile("tiny", device="cpu").fingerprint == expected
