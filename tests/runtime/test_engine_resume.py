"""Resumed requests have the bits of one run, and deltas add up to the whole output."""

import copy
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from detcompile.errors import InvalidInput
from detcompile.runtime.engine import Engine
from detcompile.runtime.requests.outputs import CompletionOutput, RequestOutput
from detcompile.runtime.requests.sampling_params import SamplingParams
from tests.runtime.engine_cases import OVERLAP, config_of, engine_configs, engine_of, prompt_of, run, sampling_params
from tests.runtime.engine_cases import tiny_model as model_on

PROMPT = prompt_of(20)
DRAWN = SamplingParams(temperature=1.0, seed=3, max_tokens=12)


def undisturbed(engine: Engine, prompt: list[int], params: SamplingParams) -> RequestOutput:
    engine.add_request(prompt, params)
    (output,) = run(engine)
    assert output.error is None
    return output


def cuts_of(draw, output: RequestOutput, params: SamplingParams) -> dict[int, int]:
    """Tokens after which a sample is cut, of those that are resumed; none is cut at its last token."""
    chosen = draw(st.lists(st.sampled_from(output.outputs), min_size=1, unique_by=lambda sample: sample.index))
    return {sample.index: draw(st.integers(0, len(sample.token_ids) - 1)) for sample in chosen}


def assert_the_rest(actual: CompletionOutput, whole: CompletionOutput, cut: int) -> None:
    """Fail unless a resumed sample is the whole one, with the logprobs of what was drawn since the cut."""
    rest = None if whole.logprobs is None else whole.logprobs[cut:]
    assert actual == replace(whole, logprobs=rest)


@settings(max_examples=8)
@given(data=st.data(), params=sampling_params(), config=engine_configs(161, 61), length=st.integers(1, 90))
def test_a_resumed_request_has_the_bits_of_one_run(data, params, config, length):
    model, prompt = model_on("cpu"), prompt_of(length, length)
    whole = undisturbed(engine_of(model, config_of()), prompt, params)
    cuts = cuts_of(data.draw, whole, params)
    engine = engine_of(model, config)
    engine.add_request(prompt_of(length + 7, 5), SamplingParams(temperature=0.0, max_tokens=9))  # a neighbor
    name = engine.add_request(
        prompt, params, resume={index: whole.outputs[index].token_ids[:cut] for index, cut in cuts.items()}
    )
    output = next(output for output in run(engine) if output.request_id == name)
    assert [sample.index for sample in output.outputs] == sorted(cuts)
    for sample in output.outputs:
        assert_the_rest(sample, whole.outputs[sample.index], cuts[sample.index])
    if 0 in cuts:
        assert output.prompt_logprobs == whole.prompt_logprobs


def test_a_stop_string_is_found_across_the_cut():
    engine = engine_of(model_on("cpu"), config_of())
    text = undisturbed(engine, PROMPT, DRAWN).outputs[0].text
    params = replace(DRAWN, stop=text[4:8])
    whole = undisturbed(engine, PROMPT, params)
    assert whole.outputs[0].stop_reason == text[4:8]
    cut = len(whole.outputs[0].token_ids) - 2  # within the stop string: a token a letter
    engine.add_request(PROMPT, params, resume={0: whole.outputs[0].token_ids[:cut]})
    assert run(engine)[0].outputs == whole.outputs


@pytest.mark.parametrize(
    ("resume", "params", "message"),
    [
        ([[1]], DRAWN, "give a non-empty dict"),
        ({}, DRAWN, "give a non-empty dict"),
        ({1: [1]}, DRAWN, "names sample 1"),
        ({True: [1]}, DRAWN, "sample True"),
        ({0: [1000]}, DRAWN, "holds token 1000"),
        ({0: [-1]}, DRAWN, "holds token -1"),
        ({0: [1.5]}, DRAWN, "1.5"),
        ({0: 5}, DRAWN, "give a list of integers"),
        ({0: [1] * 12}, DRAWN, "after 12 tokens, of 12"),
        ({0: [4, 5]}, replace(DRAWN, stop_token_ids=(5,)), "ended at token 5"),
        ({0: [0, 1]}, replace(DRAWN, stop="ab"), "has already ended at 'ab'"),
        ({0: [1]}, replace(DRAWN, seed=None), "needs its original seed"),
    ],
)
def test_invalid_resume_is_rejected(resume, params, message):
    engine = engine_of(model_on("cpu"), config_of())
    with pytest.raises(InvalidInput, match=message):
        engine.add_request(PROMPT, params, resume=resume)
    assert not engine.has_unfinished_requests


def test_a_kind_of_output_that_there_is_not_is_refused():
    with pytest.raises(InvalidInput, match="one of cumulative, delta, final_only"):
        engine_of(model_on("cpu"), config_of()).add_request(PROMPT, DRAWN, output_kind="last")


def added_up(deltas: list[RequestOutput]) -> RequestOutput:
    """The output that deltas are the parts of."""
    whole = copy.deepcopy(deltas[0])
    parts = {sample.index: sample for sample in whole.outputs}
    for delta in deltas[1:]:
        for sample in delta.outputs:
            logprobs = None if sample.logprobs is None else []
            known = parts.setdefault(sample.index, replace(sample, text="", token_ids=[], logprobs=logprobs))
            known.text += sample.text
            known.token_ids += sample.token_ids
            if known.logprobs is not None:
                known.logprobs += sample.logprobs
            known.finish_reason, known.stop_reason = sample.finish_reason, sample.stop_reason
        if whole.prompt_logprobs is not None:
            whole.prompt_logprobs += delta.prompt_logprobs
    return replace(deltas[-1], outputs=[parts[i] for i in sorted(parts)], prompt_logprobs=whole.prompt_logprobs)


@OVERLAP
@settings(max_examples=5)
@given(params=sampling_params(), every=st.integers(1, 3))
def test_deltas_add_up_to_the_output(overlap, params, every):
    engine = engine_of(model_on("cpu"), config_of(overlap=overlap))
    whole = undisturbed(engine, PROMPT, params)
    name, deltas = engine.add_request(PROMPT, params, output_kind="delta", stream_text=True), []
    while engine.has_unfinished_requests:
        for _ in range(every - 1):  # outputs that nobody has taken yet are joined
            engine._steps.step() if engine._steps.has_work else None
        deltas += engine.step()
    output = added_up(deltas)
    assert output.outputs == whole.outputs and output.prompt_logprobs == whole.prompt_logprobs
    assert output.request_id == name and output.seed == whole.seed and output.finished
    assert sum(len(sample.token_ids) for delta in deltas for sample in delta.outputs) == sum(
        len(sample.token_ids) for sample in whole.outputs
    )


def test_deltas_without_text_still_end_at_stop_strings():
    engine = engine_of(model_on("cpu"), config_of())
    text = undisturbed(engine, PROMPT, DRAWN).outputs[0].text
    whole = undisturbed(engine, PROMPT, replace(DRAWN, stop=text[4:6]))
    engine.add_request(PROMPT, replace(DRAWN, stop=text[4:6]), output_kind="delta")
    deltas = []
    while engine.has_unfinished_requests:
        deltas += engine.step()
    assert added_up(deltas).outputs[0].token_ids == whole.outputs[0].token_ids
    assert deltas[-1].outputs[0].stop_reason == text[4:6]
    engine.add_request(PROMPT, DRAWN, output_kind="delta")
    assert not any(sample.text for output in run(engine) for sample in output.outputs)


def test_final_only_delivers_one_output():
    engine, actual = engine_of(model_on("cpu"), config_of()), []
    engine.add_request(PROMPT, DRAWN, output_kind="final_only")
    while engine.has_unfinished_requests:
        actual += engine.step()
    assert len(actual) == 1 and actual[0].outputs == undisturbed(engine, PROMPT, DRAWN).outputs
