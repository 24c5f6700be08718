"""Shared parts of the engine tests: engines of a tiny model, requests, and each request's answer when it runs alone."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from detcompile.models.compiled import CompiledModel
from detcompile.runtime.engine import Engine
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.engine_setup import EngineModel, Forwards, new_engine
from detcompile.runtime.requests.bad_words import BadWords
from detcompile.runtime.requests.outputs import CompletionOutput, Logprobs, RequestOutput
from detcompile.runtime.sampling.sampler import Sampler, SampleRow, SamplingParams, sample, token_logprobs
from detcompile.step import KVGroup
from tests.model_cases import VOCAB_SIZE, compiled

__all__ = [
    "GREEDY",
    "LetterTokenizer",
    "MARK",
    "OVERLAP",
    "assert_as_alone",
    "assert_serves_as_alone",
    "config_of",
    "engine_configs",
    "engine_of",
    "letters",
    "prompt_of",
    "run",
    "sampling_params",
    "tiny_model",
]

NUM_LETTERS = 5
OVERLAP = pytest.mark.parametrize("overlap", [False, True])
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
MARK = VOCAB_SIZE - 1  # a token that makes the forwards below fail


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(MARK), k=length)


def config_of(**changes) -> EngineConfig:
    return EngineConfig(**({"block_size": 16, "num_blocks": 161, "max_num_batched_tokens": 64} | changes))


def engine_configs(*num_blocks: int) -> st.SearchStrategy[EngineConfig]:
    """Return a strategy of settings that change steps, over pools of these sizes."""
    return st.builds(
        EngineConfig,
        scheduler=st.sampled_from(["stall_free", "prefill_first", "simple_chunking"]),
        num_blocks=st.sampled_from(num_blocks),
        block_size=st.sampled_from([16, 32]),
        max_num_batched_tokens=st.sampled_from([3, 16, 100, 4096]),
        max_num_seqs=st.integers(1, 8),
        prefix_caching=st.booleans(),
        overlap=st.booleans(),
    )


def tiny_model(device: str) -> CompiledModel:
    """Return a model of four layers: one sees all tokens, three see 70; each is a KV group."""
    return compiled("granite_swa", torch.bfloat16 if device == "cuda" else torch.float32, device)


class LetterTokenizer:
    """Decodes each token as one of a few letters, so stop strings occur. It also encodes text, one token per letter."""

    all_special_ids: tuple[int, ...] = ()

    def __call__(self, text: str, verbose: bool, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) - ord("a") for letter in text if letter != " "]}

    def convert_ids_to_tokens(self, token_id: int) -> str:
        return letters([token_id])

    def decode(self, token_ids: list[int], **_options: bool) -> str:
        return letters(token_ids)


LETTERS = LetterTokenizer()


def letters(token_ids: list[int]) -> str:
    """Return LetterTokenizer's text."""
    return "".join(chr(ord("a") + token % NUM_LETTERS) for token in token_ids)


def engine_of(
    model: CompiledModel,
    config: EngineConfig,
    *,
    one_group: bool = False,
    forward: Callable[..., Tensor] | None = None,
    max_context: int | None = None,
    eos_token_ids: tuple[int, ...] = (),
    tokenizer: LetterTokenizer | None = LETTERS,
) -> Engine:
    """Return ``model.engine(...)`` with replaced parts.

    Args:
        one_group: all layers share a block table and no block is freed before the end, as in a model without windows.
        forward: replaces the model's forward.
    """
    run_model = forward or model.executor.forwards.plain
    groups, num_groups = model.facts.kv_groups, len(model.facts.kv_groups)
    if one_group:
        groups = (KVGroup(tuple(range(len(model.facts.kv_shapes))), 0),)
        inner = run_model

        def run_model(input_ids, position_ids, step, logits_to_keep):
            step = step._replace(
                slot_mappings=step.slot_mappings * num_groups, block_tables=step.block_tables * num_groups
            )
            return inner(input_ids, position_ids, step, logits_to_keep)

    facts = replace(model.facts, kv_groups=groups, max_context=max_context or model.max_context)
    return new_engine(EngineModel(facts, lambda: eos_token_ids), Forwards(run_model), config, tokenizer)


def run(engine: Engine, most_steps: int = 100_000) -> list[RequestOutput]:
    """Step until nothing is left; return the finished outputs, in that order."""
    finished = []
    for _ in range(most_steps):
        if not engine.has_unfinished_requests:
            return finished
        finished += [output for output in engine.step() if output.finished]
        engine.check()
    raise AssertionError(f"requests are left after {most_steps} steps")


@st.composite
def sampling_params(draw, most_tokens: int = 24, vocab_size: int = VOCAB_SIZE) -> SamplingParams:
    """Draw seeded parameters: half of the requests plain and greedy, the others with a few settings each."""
    seed = draw(st.integers(0, 3) | st.integers(0, (1 << 64) - 1))
    max_tokens = draw(st.sampled_from([most_tokens, most_tokens, 1, 2]) | st.integers(1, most_tokens))
    num_samples = draw(st.sampled_from([1, 1, 1, 2, 3]))
    if draw(st.booleans()):
        return SamplingParams(n=num_samples, temperature=0.0, seed=seed, max_tokens=max_tokens)
    tokens = st.integers(0, vocab_size - 1)
    choices = {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 1.7]),
        "top_p": st.floats(0.1, 1.0),
        "top_k": st.integers(1, vocab_size),
        "min_p": st.floats(0.0, 0.5),
        "repetition_penalty": st.sampled_from([0.7, 1.3]),
        "presence_penalty": st.sampled_from([-1.0, 1.5]),
        "frequency_penalty": st.sampled_from([-0.5, 0.7]),
        "logit_bias": st.dictionaries(tokens, st.sampled_from([-float("inf"), -3.0, 4.0]), max_size=5),
        "stop_token_ids": st.lists(tokens, min_size=5, max_size=9).map(tuple),
        "stop": st.lists(st.text("abcde", min_size=2, max_size=4), min_size=1, max_size=2),
        "include_stop_str_in_output": st.just(True),
        "min_tokens": st.integers(0, max_tokens),
        "logprobs": st.sampled_from([-1, 0, 1, 5, min(VOCAB_SIZE, vocab_size)]),
        "prompt_logprobs": st.sampled_from([-1, 0, 3]),
        "sampling_logprobs": st.sampled_from([-1, 0, 2]),
        "allowed_token_ids": st.lists(tokens, min_size=12, max_size=40),
        "bad_words_ids": st.lists(st.lists(tokens, min_size=1, max_size=3), min_size=1, max_size=30),
    }
    names = draw(st.lists(st.sampled_from(sorted(choices)), max_size=5, unique=True))
    chosen = {name: draw(choices[name]) for name in names}
    if "sampling_logprobs" in chosen:
        chosen.setdefault("logprobs", 0)
    return SamplingParams(n=num_samples, seed=seed, max_tokens=max_tokens, **chosen)


def assert_as_alone(
    model: CompiledModel, output: RequestOutput, params: SamplingParams, eos_token_ids: tuple[int, ...] = ()
) -> None:
    """Fail unless a finished request has the bits of the plain forward.

    Row t of the plain forward depends only on tokens 0 … t, so one forward over a sample's final tokens has the logits
    that each of them had to be drawn from. A canceled request has the beginning of that.
    """
    assert output.finished and output.error is None, output
    params = replace(params, seed=output.seed)
    if not params.ignore_eos:
        params = replace(params, stop_token_ids=(*params.stop_token_ids, *eos_token_ids))
    assert [sample.index for sample in output.outputs] == list(range(params.n))
    prompt = output.prompt_token_ids
    for completion in output.outputs:
        tokens = prompt + completion.token_ids
        logits = _plain_logits(model, tokens)
        _assert_drawn_from(logits[len(prompt) - 1 : -1], completion, params, prompt)
        _assert_ended_in_time(completion, params)
    _assert_prompt_logprobs(logits[: len(prompt) - 1], output, params)


def assert_serves_as_alone(
    model: CompiledModel, configs: st.SearchStrategy[EngineConfig], prompt_lengths: tuple[int, ...]
) -> None:
    """Fail unless engines of drawn settings give each of these requests, one with two samples, its answer alone."""

    @settings(max_examples=6)
    @given(config=configs, seed=st.integers(0, 10**6))
    def serves(config: EngineConfig, seed: int) -> None:
        engine = engine_of(model, config, max_context=120)
        requests = {}
        for index, length in enumerate(prompt_lengths):
            params = SamplingParams(temperature=float(index % 2), seed=seed + index, max_tokens=12, n=1 + (index == 3))
            requests[engine.add_request(prompt_of(length, seed + index), params)] = params
        outputs = {output.request_id: output for output in run(engine)}
        for request_id, params in requests.items():
            assert_as_alone(model, outputs[request_id], params)

    serves()


def _plain_logits(model: CompiledModel, token_ids: list[int]) -> Tensor:
    return model(torch.tensor([token_ids], device=model.device)).logits[0]


def _assert_drawn_from(logits: Tensor, completion: CompletionOutput, params: SamplingParams, prompt: list[int]) -> None:
    tokens = completion.token_ids
    count = len(tokens)
    if count:
        places = range(len(prompt), len(prompt) + count)
        expected = sample(
            logits,
            [replace(params, logprobs=None, sampling_logprobs=None)] * count,
            places,
            sample_indices=[completion.index] * count,
            num_prompt_tokens=[len(prompt)] * count,
            token_ids=[(prompt + tokens)[:place] for place in places],
        )
        assert tokens == expected.tolist()
    if params.logprobs is None:
        assert completion.logprobs is None
    else:
        assert_logprobs_equal(completion.logprobs, logits, tokens, params.logprobs)
        _assert_sampling_logprobs(logits, completion, params, prompt)


def _assert_sampling_logprobs(
    logits: Tensor, completion: CompletionOutput, params: SamplingParams, prompt: list[int]
) -> None:
    """Fail unless each token has log-probabilities of the logits that it was drawn from."""
    assert completion.logprobs is not None
    for place, (token, entry) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
        if params.sampling_logprobs is None:
            assert entry.sampling is None
        elif params.greedy:
            assert entry.sampling == (0.0, {} if params.sampling_logprobs == 0 else {token: 0.0}, 1)
        else:
            _assert_sampling_entry(logits[place : place + 1], entry, completion, params, prompt)


def _assert_sampling_entry(
    logits: Tensor, entry: Logprobs, completion: CompletionOutput, params: SamplingParams, prompt: list[int]
) -> None:
    place = next(place for place, single in enumerate(completion.logprobs or ()) if single is entry)
    before = prompt + completion.token_ids[:place]
    words = BadWords.of(params.bad_words_ids, ())
    row = SampleRow(
        replace(params, logprobs=None, sampling_logprobs=None),
        len(before),
        place,
        completion.index,
        "alone",
        before,
        words[1] + words[0].completions(before, 0),
    )
    sampler, scores = Sampler(logits.shape[1], logits.device), torch.empty(logits.shape, device=logits.device)
    sampler(logits, sampler.prepare([row]), scores=scores)
    token = torch.tensor([entry.token_id], device=logits.device)
    expected = token_logprobs(scores, token, logits.shape[1])
    kept = {token: value for token, value in zip(expected.top_ids[0].tolist(), expected.top[0].tolist())}
    kept = {token: value for token, value in kept.items() if value > -float("inf")}
    most = len(kept) if params.sampling_logprobs == -1 else params.sampling_logprobs
    assert entry.sampling == (expected.chosen.item(), dict(list(kept.items())[:most]), expected.rank.item())


def _assert_prompt_logprobs(logits: Tensor, output: RequestOutput, params: SamplingParams) -> None:
    actual, targets = output.prompt_logprobs, output.prompt_token_ids[1:]
    if params.prompt_logprobs is None:
        assert actual is None
        return
    assert actual[0] is None
    known = len(actual) - 1
    assert known == len(targets) or output.outputs[0].finish_reason == "abort"
    assert_logprobs_equal(actual[1:], logits[:known], targets[:known], params.prompt_logprobs)


def assert_logprobs_equal(actual: list[Logprobs], logits: Tensor, tokens: list[int], num_top: int) -> None:
    """Fail unless ``actual`` are the logprobs of ``tokens`` under ``logits``, alternatives in order."""
    num_top = logits.shape[1] if num_top == -1 else num_top
    assert len(actual) == len(tokens)
    if not tokens:
        return
    expected = token_logprobs(logits, torch.tensor(tokens, device=logits.device), num_top)
    assert [entry.token_id for entry in actual] == tokens
    assert [entry.logprob for entry in actual] == expected.chosen.tolist()
    assert [list(entry.top) for entry in actual] == expected.top_ids.tolist()
    assert [list(entry.top.values()) for entry in actual] == expected.top.tolist()


def _assert_ended_in_time(completion: CompletionOutput, params: SamplingParams) -> None:
    """Fail unless a sample ends at its first reason to end, with the right text."""
    tokens = completion.token_ids
    reasons = [_reason(tokens[: count + 1], params) for count in range(len(tokens))]
    assert all(reason is None for reason in reasons[:-1]), f"went on after {reasons}"
    ended = reasons[-1] if reasons else None
    if completion.finish_reason == "abort":
        assert ended is None
    else:
        assert (completion.finish_reason, completion.stop_reason) == ended
    text = letters(tokens[:-1] if isinstance(completion.stop_reason, int) else tokens)
    if isinstance(completion.stop_reason, str):
        text = text[: text.index(completion.stop_reason, params.min_tokens)]
        text += completion.stop_reason if params.include_stop_str_in_output else ""
    assert completion.text == text


def _reason(tokens: list[int], params: SamplingParams) -> tuple[str, int | str | None] | None:
    """Return why a sample ends with the last of these tokens; None if it does not."""
    if tokens[-1] in params.stop_token_ids:
        return "stop", tokens[-1]
    text = letters(tokens[params.min_tokens :])  # one letter per token; earlier text is ignored
    actual = [(text.index(stop) + len(stop), text.index(stop), stop) for stop in params.stop if stop in text]
    if actual:
        return "stop", min(actual)[2]
    if len(tokens) == params.max_tokens:
        return "length", None
    return None
