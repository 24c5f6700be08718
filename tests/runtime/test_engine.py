"""The engine: bad requests, failures, ends, samples, cancellation, statistics; bits equal those of a plain forward."""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch

from detcompile.errors import EngineError, InvalidInput
from detcompile.runtime.requests.outputs import RequestOutput
from detcompile.runtime.requests.sampling_params import SamplingParams
from tests.model_cases import VOCAB_SIZE
from tests.runtime.engine_cases import (
    GREEDY,
    MARK,
    OVERLAP,
    LetterTokenizer,
    assert_as_alone,
    config_of,
    engine_of,
    letters,
    prompt_of,
    run,
    tiny_model,
)


def poisoned(model):
    """NaN logits in the rows of MARK."""

    def forward(input_ids, position_ids, step, logits_to_keep):
        logits = model.executor.forwards.plain(input_ids, position_ids, step, logits_to_keep)
        marked = input_ids[0, logits_to_keep] == MARK
        return torch.where(marked[:, None], torch.full_like(logits, float("nan")), logits)

    return forward


# Requests that cannot be served

BAD_REQUESTS = {
    "prompt is empty": ([], GREEDY),
    "compiled for 100": (prompt_of(100), GREEDY),
    "min_tokens=60 exceed": (prompt_of(50), SamplingParams(max_tokens=60, min_tokens=60)),
    "KV blocks of 16 tokens": (prompt_of(90), GREEDY),
    "holds token 160": ([1, 160, 2], GREEDY),
    "holds token -1": ([1, -1], GREEDY),
    "logit_bias holds token": ([1], SamplingParams(logit_bias={VOCAB_SIZE: 1.0})),
    "stop_token_ids holds token": ([1], SamplingParams(stop_token_ids=(VOCAB_SIZE,))),
    "more than the model's": ([1], SamplingParams(prompt_logprobs=VOCAB_SIZE + 1)),
    "has no tokenizer: give token ids": ("text", GREEDY),
    "no tokenizer: use stop_token_ids": ([1], SamplingParams(stop="a")),
    "prompt is neither text nor token ids": ([1.5, 2.0], GREEDY),
    "is neither text nor token ids": (None, GREEDY),
}


@pytest.mark.parametrize("message", BAD_REQUESTS)
def test_a_bad_request_is_refused_and_the_others_are_served(message, device) -> None:
    model = tiny_model(device)
    engine = engine_of(model, config_of(num_blocks=22), max_context=100, tokenizer=None)
    prompt, params = BAD_REQUESTS[message]
    with pytest.raises(InvalidInput, match=message):
        engine.add_request(prompt, params)
    assert not engine.has_unfinished_requests
    good = [prompt_of(9), prompt_of(20, 1)]
    outputs = engine.generate([good[0], prompt, good[1]], [GREEDY, params, GREEDY], progress=False)
    assert outputs[1].finished and isinstance(outputs[1].error, InvalidInput) and message in str(outputs[1].error)
    assert [outputs[0].prompt_token_ids, outputs[2].prompt_token_ids] == good
    assert all(outputs[i].error is None and len(outputs[i].outputs[0].token_ids) == 6 for i in (0, 2))


@pytest.mark.parametrize("name", [5, None, b"x", ["x"], RequestOutput("x", None, [], None, [])])
def test_cancel_rejects_invalid_request_id(name) -> None:
    model = tiny_model("cpu")
    engine = engine_of(model, config_of())
    engine.add_request(prompt_of(5), GREEDY)
    with pytest.raises(InvalidInput, match=r"request_id .* give a string"):
        engine.cancel(name)
    [output] = run(engine)
    assert not engine.failed
    assert_as_alone(model, output, GREEDY)


def test_rejected_prefix_allocates_no_block() -> None:
    engine, prompt = engine_of(tiny_model("cpu"), config_of()), prompt_of(40)
    for wrong in (None, b"x", prompt):
        with pytest.raises(InvalidInput, match="give what an engine's export"):
            engine.prefixes.take(wrong)
    with pytest.raises(InvalidInput, match=r"token_ids.* give"):
        engine.prefixes.export(5)
    engine.generate(prompt, GREEDY, progress=False)
    actual = engine.prefixes.export(prompt)
    other = engine_of(tiny_model("cpu"), config_of())
    hollow = tuple((keys.to("meta"), values.to("meta")) for keys, values in actual.layers)
    for changed, expected_text in (
        ({"layers": hollow}, "tensors on the CPU"),
        ({"layers": None}, "tensors on the CPU"),
        ({"layers": ((actual.layers[0][0], None), *actual.layers[1:])}, "tensors on the CPU"),
        ({"layers": ((-actual.layers[0][0], actual.layers[0][1]), *actual.layers[1:])}, "changed since export"),
        ({"token_ids": (*actual.token_ids[:-1], 1)}, "changed since export"),
        ({"token_ids": actual.token_ids[::-1]}, "changed since export"),
        ({"token_ids": None}, "give a list of integers"),
        ({"token_ids": (*actual.token_ids[:-1], 1 << 70)}, "is not a token id"),
        ({"token_ids": (*actual.token_ids[:-1], 0.5)}, "token_ids: entry"),
    ):
        with pytest.raises(InvalidInput, match=expected_text):
            other.prefixes.take(replace(actual, **changed))
    with pytest.raises(InvalidInput, match="not a token id"):
        engine.prefixes.export([-1] * 40)
    actual.layers[-1][1][-1].neg_()
    with pytest.raises(InvalidInput, match="changed since export"):
        other.prefixes.take(actual)
    actual.layers[-1][1][-1].neg_()
    full = mock.patch.object(type(other.prefixes._reader), "write_blocks", side_effect=MemoryError)
    with full, pytest.raises(MemoryError):
        other.prefixes.take(actual)
    other.check()
    assert other.stats.num_free_blocks == engine.stats.num_free_blocks


def test_an_id_in_use_is_refused_and_may_be_used_again_afterwards(device) -> None:
    model = tiny_model(device)
    engine = engine_of(model, config_of())
    engine.cancel("mine")  # nobody's yet: it must not make the name free
    engine.add_request(prompt_of(5), GREEDY, request_id="mine")
    for _ in range(2):
        with pytest.raises(InvalidInput, match="'mine' is in use"):
            engine.add_request(prompt_of(6), GREEDY, request_id="mine")
        engine.step()
    [output] = run(engine)
    assert_as_alone(model, output, GREEDY)
    engine.add_request(prompt_of(6), GREEDY, request_id="mine")
    engine.cancel("mine")
    [output] = run(engine)
    assert output.outputs[0].finish_reason == "abort" and output.outputs[0].token_ids == []
    assert engine.add_request(prompt_of(6), GREEDY, request_id="mine") == "mine"
    assert_as_alone(model, run(engine)[0], GREEDY)


def test_generate_takes_one_prompt_or_a_list(device) -> None:
    model = tiny_model(device)
    engine = engine_of(model, config_of())
    prompt = prompt_of(7)
    as_text = letters([token % 5 for token in prompt])
    spellings = [prompt, tuple(prompt), [prompt], np.array(prompt), torch.tensor(prompt), [np.array(prompt)]]
    for given in spellings:
        [output] = engine.generate(given, GREEDY, progress=False)
        assert output.prompt is None and output.prompt_token_ids == prompt
        assert_as_alone(model, output, GREEDY)
    for text in (as_text, [as_text]):
        [output] = engine.generate(text, GREEDY, progress=False)
        assert output.prompt == as_text and output.prompt_token_ids == [token % 5 for token in prompt]
        assert_as_alone(model, output, GREEDY)
    assert engine.generate([], GREEDY) == []
    with pytest.raises(InvalidInput, match="2 prompts and 1 SamplingParams"):
        engine.generate([prompt, prompt], [GREEDY])
    assert not engine.has_unfinished_requests


def test_the_engine_of_a_compiled_model(device) -> None:
    model = tiny_model(device)
    [output] = model.engine(config_of(), tokenizer=LetterTokenizer()).generate("abcdea", GREEDY, progress=False)
    assert_as_alone(model, output, GREEDY)
    [output] = model.engine(config_of()).generate(prompt_of(5), GREEDY, progress=False)
    assert output.outputs[0].text == "" and len(output.outputs[0].token_ids) == 6


def test_the_cache_is_no_larger_than_all_seats_can_use(device) -> None:
    model = tiny_model(device)
    engine = engine_of(model, config_of(num_blocks=None, max_num_seqs=2), max_context=40)
    assert engine.stats.num_blocks == 2 * 3 * 4  # two sequences of three blocks, four groups
    with pytest.raises(InvalidInput, match="memory_fraction=1e-12 leaves"):
        engine_of(model, config_of(num_blocks=None, memory_fraction=1e-12))


# Failures while they run


@OVERLAP
@pytest.mark.parametrize("later", [False, True])
def test_nan_logits_end_only_their_request(later, overlap, device) -> None:
    model = tiny_model(device)
    engine = engine_of(model, config_of(overlap=overlap), forward=poisoned(model))
    params = [
        SamplingParams(max_tokens=12, seed=1, logprobs=2),
        SamplingParams(max_tokens=12, temperature=0.0, logit_bias={MARK: 1e4} if later else None),
        SamplingParams(max_tokens=12, seed=2, repetition_penalty=1.2),
    ]
    prompts = [prompt_of(30), prompt_of(30)[:25] if later else [*prompt_of(30)[:25], MARK], prompt_of(20, 2)]
    for prompt, item in zip(prompts, params):
        engine.add_request(prompt, item)
    good, bad, other = sorted(run(engine), key=lambda output: int(output.request_id.split("-")[-1]))
    assert isinstance(bad.error, EngineError) and "NaN or infinite" in str(bad.error)
    assert bad.finished and bad.outputs[0].finish_reason == "error"
    assert bad.outputs[0].token_ids == [MARK] * later
    assert_as_alone(model, good, params[0])
    assert_as_alone(model, other, params[2])
    assert engine.stats.num_free_blocks == engine.stats.num_blocks


@OVERLAP
@pytest.mark.parametrize("good_calls", [0, 1, 3])
def test_a_forward_that_raises_ends_everything_and_says_why(good_calls, overlap, device) -> None:
    model = tiny_model(device)
    serving, calls = False, []

    def forward(*inputs):
        calls.extend([None] * serving)  # an engine on a GPU tries its steps before it serves
        if len(calls) > good_calls:
            raise RuntimeError("the device is on fire")
        return model.executor.forwards.plain(*inputs)

    engine = engine_of(model, config_of(overlap=overlap, cuda_graphs=False), forward=forward)
    serving = True
    for seed in range(3):
        engine.add_request(prompt_of(40, seed), GREEDY)
    outputs = []
    with pytest.raises(EngineError, match="on fire") as caught:
        for _ in range(10):
            outputs += engine.step()
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert not any(output.finished for output in outputs)  # what was given before stays as it was
    assert engine.failed and engine.has_unfinished_requests
    for call in (
        engine.step,
        lambda: engine.add_request(prompt_of(3), GREEDY),
        lambda: engine.generate(prompt_of(3), GREEDY, progress=False),
    ):
        with pytest.raises(EngineError, match="on fire"):
            call()


@OVERLAP
@pytest.mark.parametrize("streams", [False, True])
def test_unknown_token_ends_only_its_request(streams, overlap, device) -> None:
    class Knows(LetterTokenizer):
        def decode(self, token_ids, **options):
            if MARK in token_ids:
                raise IndexError("piece id is out of range")
            return super().decode(token_ids, **options)

    model = tiny_model(device)
    engine = engine_of(model, config_of(overlap=overlap), tokenizer=Knows())
    marked = SamplingParams(n=2, max_tokens=3, temperature=0.0, logit_bias={MARK: 1e4})
    cancelled = replace(marked, n=1, max_tokens=9)
    for name, params in [("good", GREEDY), ("marked", marked), ("cancelled", cancelled)]:
        engine.add_request(prompt_of(20), params, request_id=name, stream_text=streams)
    early = [output for _ in range(3) for output in engine.step() if output.finished]
    engine.cancel("cancelled")
    finished = {output.request_id: output for output in [*early, *run(engine)]}
    assert_as_alone(model, finished["good"], GREEDY)
    for name in ("marked", "cancelled"):
        output = finished[name]
        assert isinstance(output.error, EngineError) and "out of range" in str(output.error)
        assert output.outputs[0].finish_reason == "error" and output.outputs[0].token_ids[0] == MARK
    assert engine.stats.num_free_blocks == engine.stats.num_blocks


# Ends


@OVERLAP
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_the_models_end_token(ignore_eos, overlap, device) -> None:
    model = tiny_model(device)
    free = engine_of(model, config_of()).generate(prompt_of(9), SamplingParams(max_tokens=30, seed=5), progress=False)
    tokens = free[0].outputs[0].token_ids
    eos = tokens[10]
    engine = engine_of(model, config_of(overlap=overlap), eos_token_ids=(eos, MARK))
    params = SamplingParams(max_tokens=30, seed=5, ignore_eos=ignore_eos)
    [output] = engine.generate(prompt_of(9), params, progress=False)
    assert output.outputs[0].token_ids == tokens[: None if ignore_eos else tokens.index(eos) + 1]
    assert output.outputs[0].stop_reason == (None if ignore_eos else eos)
    assert_as_alone(model, output, params, eos_token_ids=(eos, MARK))
    assert engine.stats.num_free_blocks == engine.stats.num_blocks


def test_end_tokens_that_change_while_an_engine_lives_end_its_next_requests(monkeypatch) -> None:
    model = tiny_model("cpu")
    engine, params = model.engine(config_of()), SamplingParams(max_tokens=30, seed=5)
    tokens = engine.generate(prompt_of(9), params, progress=False)[0].outputs[0].token_ids
    before = model.fingerprint
    monkeypatch.setattr(model.generation_config, "eos_token_id", tokens[10])
    assert model.fingerprint != before
    for changed in (engine, model.engine(config_of())):
        [output] = changed.generate(prompt_of(9), params, progress=False)
        assert output.outputs[0].token_ids == tokens[: tokens.index(tokens[10]) + 1]


@OVERLAP
@pytest.mark.parametrize("min_tokens", [0, 20])
def test_a_stop_string_ends_a_sample_at_its_last_letter(overlap, min_tokens, device) -> None:
    """With overlap the sample's next token is being computed by then."""
    model = tiny_model(device)
    engine = engine_of(model, config_of(overlap=overlap))
    params = SamplingParams(max_tokens=60, min_tokens=min_tokens, seed=1, n=3, stop=["ab", "dd"], logprobs=1)
    outputs = engine.generate([prompt_of(20, seed) for seed in range(6)], params, progress=False)
    for output in outputs:
        assert_as_alone(model, output, params)
    reasons = {sample.stop_reason for output in outputs for sample in output.outputs}
    assert {"ab", "dd"} <= reasons


@OVERLAP
def test_the_context_ends_a_sample_without_max_tokens(overlap, device) -> None:
    model = tiny_model(device)
    engine = engine_of(model, config_of(overlap=overlap), max_context=40)
    params = SamplingParams(max_tokens=None, temperature=0.0)
    for length in (1, 20, 39):
        [output] = engine.generate(prompt_of(length), params, progress=False)
        assert len(output.outputs[0].token_ids) == 40 - length
        assert output.outputs[0].finish_reason == "length"


@OVERLAP
def test_text_is_up_to_date_while_it_streams(overlap, device) -> None:
    model = tiny_model(device)
    engine = engine_of(model, config_of(overlap=overlap))
    engine.add_request(prompt_of(20), GREEDY, stream_text=True)
    seen = []
    while engine.has_unfinished_requests:
        for output in engine.step():
            assert output.outputs[0].text == letters(output.outputs[0].token_ids)
            seen.append(len(output.outputs[0].token_ids))
    assert seen == [1, 2, 3, 4, 5, 6]


# Samples and seeds


@OVERLAP
@pytest.mark.parametrize("caching", [False, True])
def test_samples_have_streams_of_their_own_and_repeat_from_the_seed(caching, overlap, device) -> None:
    model = tiny_model(device)
    engine = engine_of(model, config_of(overlap=overlap, prefix_caching=caching))
    prompt = prompt_of(40)
    params = SamplingParams(n=4, max_tokens=10, logprobs=1, prompt_logprobs=2)
    [output] = engine.generate(prompt, params, progress=False)
    assert_as_alone(model, output, params)
    assert len({tuple(sample.token_ids) for sample in output.outputs}) == 4
    again = SamplingParams(n=1, max_tokens=10, logprobs=1, prompt_logprobs=2, seed=output.seed)
    [first] = engine.generate(prompt, again, progress=False)
    assert first.outputs == output.outputs[:1] and first.prompt_logprobs == output.prompt_logprobs
    [other] = engine.generate(prompt, params, progress=False)
    assert other.seed != output.seed and other.outputs != output.outputs


def test_samples_find_their_prompt_in_the_cache(device) -> None:
    model = tiny_model(device)
    for params in (SamplingParams(n=3, seed=1), SamplingParams(n=3, seed=1, prompt_logprobs=0)):
        engine = engine_of(model, config_of(max_num_batched_tokens=4096))
        [output] = engine.generate(prompt_of(50), params, progress=False)
        assert_as_alone(model, output, params)
        assert engine.stats.num_cached_tokens == 2 * 48


# Canceling


@OVERLAP
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 6])
def test_canceling_keeps_other_requests_and_frees_blocks(steps, overlap, device) -> None:
    """Canceled while queued, in its prompt, while its samples wait for the first one, and while it decodes."""
    model = tiny_model(device)
    engine = engine_of(model, config_of(overlap=overlap, max_num_batched_tokens=20))
    params = SamplingParams(n=3, max_tokens=30, seed=3, logprobs=0, prompt_logprobs=1, frequency_penalty=0.5)
    for name, seed in [("first", 1), ("second", 2), ("third", 3)]:
        engine.add_request(prompt_of(25, seed), params, request_id=name)
    finished = [output for _ in range(steps) for output in engine.step() if output.finished]
    for _ in range(2):
        engine.cancel("first")
    engine.cancel("third")
    engine.cancel("nobody")
    finished += run(engine)
    assert sorted(output.request_id for output in finished) == ["first", "second", "third"]
    for output in finished:
        assert_as_alone(model, output, params)
        reason = "length" if output.request_id == "second" else "abort"
        assert [sample.finish_reason for sample in output.outputs] == [reason] * 3
    engine.cancel("second")
    assert run(engine) == []
    assert engine.stats.num_free_blocks == engine.stats.num_blocks
