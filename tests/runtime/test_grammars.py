"""Answers match their grammar and have the bits of a run alone, with any drafts and cuts."""

import importlib
import importlib.metadata
import json
import threading
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from detcompile import MirrorDrafter, NGramDrafter
from detcompile.errors import EngineError, GenerationError, InvalidInput
from detcompile.reasoning.formats import Thinking
from detcompile.reasoning.grammars import within_budget
from detcompile.runtime.engine import Engine
from detcompile.runtime.grammars import compiler
from detcompile.runtime.grammars.grammar import Grammar
from detcompile.runtime.requests.outputs import RequestOutput
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.runtime.sampling.sampler import Sampler, SampleRow, sample
from detcompile.runtime.speculation.draft_tree import DraftTree
from detcompile.runtime.speculation.speculator import SpeculationConfig
from tests.model_cases import VOCAB_SIZE
from tests.runtime.engine_cases import (
    GREEDY,
    LetterTokenizer,
    assert_logprobs_equal,
    config_of,
    engine_configs,
    engine_of,
    prompt_of,
    run,
    tiny_model,
)
from tests.runtime.grammar_cases import EOS, GRAMMARS, allowed, matcher_of, matches, small_tokenizer
from tests.runtime.speculation.test_drafters import random_heads
from tests.runtime.speculation.test_speculator import Oracle, drafting_model

DRAWN = SamplingParams(temperature=1.0, seed=5, max_tokens=40, logprobs=2)


def serving(config=None, eos_token_ids: tuple[int, ...] = (EOS,), **how) -> Engine:
    config = config or config_of()
    return engine_of(tiny_model("cpu"), config, eos_token_ids=eos_token_ids, tokenizer=small_tokenizer(), **how)


def assert_matches(output: RequestOutput, params: SamplingParams) -> None:
    """Fail unless every sample is what the plain forward draws among the tokens that the grammar lets follow."""
    assert output.error is None, output.error
    prompt = output.prompt_token_ids
    for completion in output.outputs:
        tokens = completion.token_ids
        logits = tiny_model("cpu")(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        matcher = matcher_of(params.grammar, () if params.ignore_eos else (EOS,))
        for place, token in enumerate(tokens):
            assert not matcher.complete
            item = replace(params, grammar=None, logprobs=None, seed=output.seed, allowed_token_ids=allowed(matcher))
            here = {"num_prompt_tokens": [len(prompt)], "token_ids": [prompt + tokens[:place]]}
            drawn = sample(
                logits[place : place + 1], [item], [len(prompt) + place], sample_indices=[completion.index],
                eos_token_ids=(EOS,), **here,
            )  # fmt: skip
            assert drawn.tolist() == [token]
            if token != EOS:
                matcher.append(token)
        if params.logprobs is not None:
            assert_logprobs_equal(completion.logprobs, logits, tokens, params.logprobs)
        if completion.finish_reason == "stop":
            assert tokens[-1] == EOS or matcher.complete
            assert matches(params.grammar, completion.text), completion.text
        else:
            assert completion.finish_reason == "length" and len(tokens) == params.max_tokens


KINDS = st.sampled_from(
    [{}, {"temperature": 0.0}, {"top_p": 0.7}, {"top_k": 3}, {"repetition_penalty": 1.3}, {"logit_bias": {EOS: 3.0}}]
)


@settings(max_examples=8)
@given(config=engine_configs(161, 40), seed=st.integers(0, 99), grammar=st.sampled_from(GRAMMARS), kind=KINDS)
def test_answers_match_grammar_with_bits_of_a_run_alone(config, seed, grammar, kind) -> None:
    engine = serving(config)
    params = replace(DRAWN, seed=seed, grammar=grammar, n=2, **kind)
    free = replace(DRAWN, seed=seed)
    neighbor = engine.add_request(prompt_of(20, seed), free)
    requested = {engine.add_request(prompt_of(length, seed), params): params for length in (5, 17)}
    outputs = {output.request_id: output for output in run(engine)}
    for name, item in requested.items():
        assert_matches(outputs[name], item)
    [alone] = serving().generate([prompt_of(20, seed)], free, progress=False)
    assert outputs[neighbor].outputs == alone.outputs


def workload(kind: dict) -> tuple[list[list[int]], list[SamplingParams], list[RequestOutput]]:
    prompts = [prompt_of(length, 3) for length in (5, 15, 16, 17, 31, 9)]
    params = [
        replace(DRAWN, seed=seed, grammar=grammar, n=1 + (seed == 2), **kind) for seed, grammar in enumerate(GRAMMARS)
    ]
    return prompts, params, serving().generate(prompts, params, progress=False)


def drafting(drafter, acceptance: str = "exact") -> Engine:
    speculation = SpeculationConfig(drafter=drafter, switch="always", acceptance=acceptance)
    model = tiny_model("cpu")
    engine = model.engine(config_of(num_blocks=400), tokenizer=small_tokenizer(), speculation=speculation)
    return engine


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["right", "half", "free", "layers", "model", "mirror", "heads", "ngrams"])
def test_no_draft_moves_a_bit(kind, temperature) -> None:
    prompts, params, expected = workload({"temperature": temperature, "stop_token_ids": (EOS,)})
    known = expected
    if kind == "free":  # what would come without the grammars, which forbid most of it
        known = serving().generate(prompts, [replace(item, grammar=None) for item in params], progress=False)
    model = tiny_model("cpu")
    drafter = {
        "right": lambda: Oracle(known, 1.0, 1),
        "half": lambda: Oracle(known, 0.5, 1),
        "free": lambda: Oracle(known, 0.9, 1),
        "layers": lambda: model.drafter(3, layers=2),
        "model": lambda: drafting_model("cpu").drafter(3),
        "mirror": lambda: MirrorDrafter(model.drafter(3, layers=4)),
        "heads": lambda: model.medusa_drafter(random_heads(0, 2)),
        "ngrams": lambda: NGramDrafter(),
    }[kind]()
    engine = drafting(drafter)
    actual = engine.generate(prompts, params, progress=False)
    engine.check()
    assert [output.outputs for output in actual] == [output.outputs for output in expected]
    assert engine.speculator.error is None
    if kind in ("right", "half"):
        assert engine.speculator.num_accepted > 0


def test_guesses_by_rejection_match_as_well() -> None:
    prompts, params, _ = workload({"stop_token_ids": (EOS,)})
    engine = drafting(tiny_model("cpu").drafter(3, layers=4), "rejection")
    actual = engine.generate(prompts, params, progress=False)
    assert engine.speculator.num_drafted > 0
    for output, item in zip(actual, params):
        for completion in output.outputs:
            assert completion.finish_reason == "length" or matches(item.grammar, completion.text)


@settings(max_examples=10)
@given(data=st.data(), seed=st.integers(0, 99), grammar=st.sampled_from(GRAMMARS))
def test_resumed_answer_continues_grammar(data, seed, grammar) -> None:
    params = replace(DRAWN, seed=seed, grammar=grammar, n=2)
    [whole] = serving().generate([prompt_of(9)], params, progress=False)
    cuts = {item.index: data.draw(st.integers(0, len(item.token_ids) - 1)) for item in whole.outputs}
    engine = serving()
    resume = {item.index: item.token_ids[: cuts[item.index]] for item in whole.outputs}
    engine.add_request(prompt_of(9), params, resume=resume)
    [actual] = run(engine)
    for item, rest in zip(whole.outputs, actual.outputs):
        assert rest == replace(item, logprobs=item.logprobs[cuts[item.index] :])


@settings(max_examples=20)
@given(data=st.data(), grammar=st.sampled_from(GRAMMARS))
def test_a_mask_is_a_function_of_the_tokens(data, grammar) -> None:
    walker, tokens, masks = matcher_of(grammar), [], []
    while not walker.complete and len(tokens) < 12:
        masks.append(walker.mask().tobytes())
        for _ in range(data.draw(st.integers(0, 3))):  # drafts, that are right, wrong or nothing
            walker.mask(tuple(data.draw(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=3))))
        text = [token for token in allowed(walker) if token != EOS]
        tokens.append(data.draw(st.sampled_from(text)))
        walker.mask((tokens[-1],))
        walker.append(tokens[-1])
    again = matcher_of(grammar)
    assert [again.mask(tokens[:place]).tobytes() for place in range(len(masks))] == masks
    other = again.copy()
    for token, mask in zip(tokens, masks):
        assert other.mask().tobytes() == mask
        other.append(token)
    assert other.complete == walker.complete and other.mask().tobytes() == walker.mask().tobytes()
    assert again.mask().tobytes() == masks[0]


def test_end_token_is_allowed_only_at_complete_text() -> None:
    matcher = matcher_of(Grammar.regex("[ab]{2,3}"))
    one = small_tokenizer().convert_tokens_to_ids("a")
    assert EOS not in allowed(matcher)
    matcher.append(one)
    assert EOS not in allowed(matcher) and allowed(matcher, (one, EOS)) is None
    assert allowed(matcher, (one, one)) == [EOS]
    matcher.append(one)
    assert EOS in allowed(matcher) and not matcher.complete
    assert EOS not in allowed(matcher_of(Grammar.regex("[ab]*"), ends=()))
    matcher.append(one)
    assert matcher.complete and allowed(matcher) == [EOS]
    with pytest.raises(EngineError, match="does not take token"):
        matcher.append(one)


@pytest.mark.parametrize(
    ("changes", "eos"),
    [
        ({}, (EOS,)),
        ({"ignore_eos": True}, (EOS,)),
        ({"min_tokens": 30}, (EOS,)),
        ({"logit_bias": {EOS: -float("inf")}}, (EOS,)),
        ({}, ()),
    ],
)
def test_an_answer_ends_with_its_grammar_whatever_forbids_the_end(changes, eos) -> None:
    params = replace(DRAWN, grammar=Grammar.regex("(ab){2}"), **changes)
    [output] = serving(eos_token_ids=eos).generate([prompt_of(4)], params, progress=False)
    item = output.outputs[0]
    assert (item.text, item.finish_reason, item.stop_reason) == ("abab", "stop", None)


def test_min_tokens_delays_end_if_grammar_allows_more() -> None:
    params = replace(DRAWN, grammar=Grammar.regex("[abc]*"), min_tokens=12, logit_bias={EOS: 100.0})
    [output] = serving().generate([prompt_of(4)], params, progress=False)
    assert len(output.outputs[0].token_ids) == 13 and output.outputs[0].stop_reason == EOS
    [output] = serving().generate([prompt_of(4)], replace(params, min_tokens=0), progress=False)
    assert output.outputs[0].token_ids == [EOS] and output.outputs[0].text == ""


def test_a_stop_string_and_the_length_cut_the_text() -> None:
    params = replace(DRAWN, grammar=Grammar.regex("(ab){9}"), stop="aba")
    [output] = serving().generate([prompt_of(4)], params, progress=False)
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("", "aba")
    [output] = serving().generate([prompt_of(4)], replace(params, stop=(), max_tokens=2), progress=False)
    assert output.outputs[0].finish_reason == "length"


def test_grammar_without_next_token_ends_only_its_request() -> None:
    params = replace(DRAWN, grammar=Grammar.regex("ab"), bad_words_ids=[[token] for token in range(1, VOCAB_SIZE)])
    broken, fine = serving().generate([prompt_of(4)] * 2, [params, replace(DRAWN, max_tokens=3)], progress=False)
    assert isinstance(broken.error, GenerationError) and fine.error is None
    assert "the grammar leave no token" in str(broken.error)


def test_masked_rows_are_drawn_as_those_of_allowed_tokens(device) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(12, VOCAB_SIZE, generator=generator).to(device)
    kinds = [{"temperature": 0.0}, {"temperature": 1.0}, {"top_p": 0.5}, {"presence_penalty": 1.0}]
    masked, plain = [], []
    for index in range(12):
        ids = torch.randperm(VOCAB_SIZE, generator=generator)[: 1 + index * 9].sort().values.tolist()
        mask = None if index == 7 else compiler.token_bits(ids, -(-VOCAB_SIZE // 32))
        params = SamplingParams(seed=index, logit_bias={ids[0]: 2.0} if index % 3 else None, **kinds[index % 4])
        row = SampleRow(params, 5 + index, 1, 0, index, [3] * (5 + index))
        masked.append(row._replace(mask=mask))
        plain.append(row._replace(params=params if mask is None else replace(params, allowed_token_ids=ids)))
    drawn = [
        (item := Sampler(VOCAB_SIZE, device))(logits, item.prepare(rows)).drawn.tolist() for rows in (masked, plain)
    ]
    assert drawn[0] == drawn[1]


class Endless:
    """A drafter that guesses the end token after everything."""

    def propose(self, sequences, max_depth):
        return [DraftTree.chain([EOS] * min(2, depth)) for depth in max_depth]

    def forget(self, sequence):
        pass


def test_a_drafted_end_is_cut() -> None:
    prompts, params, expected = workload({"stop_token_ids": (EOS,)})
    engine = drafting(Endless())
    actual = engine.generate(prompts, params, progress=False)
    assert [output.outputs for output in actual] == [output.outputs for output in expected]
    assert engine.speculator.num_drafted == 0


@pytest.mark.parametrize(
    ("grammar", "expected_text"),
    [
        (Grammar.regex("(ab"), "regex cannot be served"),
        (Grammar.json_schema("{"), "json_schema cannot be read"),
        (Grammar.json_schema({"type": "nothing"}), "json_schema cannot be served"),
        (Grammar.json_schema({"oneOf": [{"minimum": 1}, {"maximum": 3}]}), "json_schema cannot be served"),
        (Grammar.lark("start: missing"), "lark cannot be served"),
        (Grammar.lark("start: " + "(" * 30000), "lark cannot be"),
        (Grammar.json_schema('{"items":' * 300 + "{}" + "}" * 300), "json_schema cannot be served"),
    ],
)
def test_grammar_that_cannot_compile_is_rejected(grammar, expected_text) -> None:
    engine = serving()
    with pytest.raises(InvalidInput, match=expected_text):
        engine.add_request([1], replace(DRAWN, grammar=grammar))
    assert not engine.has_unfinished_requests


@pytest.mark.parametrize(
    ("make", "expected_text"),
    [
        (lambda: Grammar("yaml", "a"), "must be one of json_schema"),
        (lambda: Grammar.regex(""), "regex needs a source"),
        (lambda: Grammar.regex(3), "regex needs a source"),
        (lambda: Grammar("json_object", "{}"), "json_object needs no source"),
        (lambda: Grammar.regex("a" * 65537), "65537 bytes, of 65536"),
        (lambda: Grammar.regex("\ud800"), "surrogate"),
        (lambda: Grammar.choice([]), "none of them empty"),
        (lambda: Grammar.choice(["a", ""]), "none of them empty"),
        (lambda: Grammar.choice("ab"), "none of them empty"),
        (lambda: Grammar("choice", "["), "JSON list"),
        (lambda: Grammar.json_schema({1, 2}), "not JSON"),
        (lambda: Grammar.json_schema(float("nan")), "not JSON"),
        (lambda: SamplingParams(grammar="a"), "give a Grammar"),
        (lambda: SamplingParams(grammar={}), "not none"),
        (lambda: SamplingParams(grammar={"regex": "a", "json": {}}), "one of json, regex"),
        (lambda: SamplingParams(grammar={"yaml": "a"}), "one of json, regex"),
    ],
)
def test_invalid_grammar_arguments_are_rejected(make, expected_text) -> None:
    with pytest.raises(InvalidInput, match=expected_text):
        make()


def test_every_spelling_of_a_grammar_is_one() -> None:
    class Structured:
        json = None
        regex = "a+"
        whitespace_pattern = None

    expected = Grammar.regex("a+")
    spellings = [expected, {"kind": "regex", "source": "a+"}, {"regex": "a+", "json": None}, Structured()]
    assert {SamplingParams(grammar=item).grammar for item in spellings} == {expected}
    assert {Grammar.regex("a+").digest, expected.digest} == {expected.digest} != {Grammar.lark("a+").digest}
    assert Grammar.of({"json_object": True}) == Grammar.json_object()
    assert Grammar.of({"json": '{"type": "null"}'}) == Grammar.json_schema({"type": "null"})
    assert Grammar.of({"choice": ["a"]}) == Grammar.choice(("a",)) and Grammar.of({"grammar": "x"}).kind == "lark"


def test_rules_that_nest_as_deep_as_the_source_end_no_process() -> None:
    chain = "\n".join(f"r{place:x}:r{place + 1:x}" for place in range(5500))
    deep = Grammar.lark(f'start: r0\n{chain}\nr{5500:x}:"ab"')
    [output] = serving().generate([[1]], replace(GREEDY, grammar=deep), progress=False)
    assert output.outputs[0].text == "ab"


def test_a_grammar_that_takes_too_long_is_refused_in_time(monkeypatch) -> None:
    monkeypatch.setattr(compiler, "definition_of", lambda _: time.sleep(3))
    start = time.monotonic()
    with pytest.raises(InvalidInput, match="takes over 1 s"):
        serving().add_request([1], replace(GREEDY, grammar=Grammar.regex("a")))
    assert time.monotonic() - start < 2.5


def test_grammars_that_were_given_up_cannot_take_all_cores_and_memory(monkeypatch) -> None:
    goes_on, real = threading.Event(), compiler.definition_of

    def slow(_grammar: Grammar) -> str:
        goes_on.wait()
        raise InvalidInput("after all")

    monkeypatch.setattr(compiler, "definition_of", slow)
    monkeypatch.setattr(compiler, "_left", type(compiler._left)())  # without those of other tests
    try:
        for number in range(6):
            expected_text = (
                "takes over" if number < compiler.MOST_LEFT else "4 grammars that took over 0.01 s still compile"
            )
            with pytest.raises(InvalidInput, match=expected_text):
                compiler.compiled_within(Grammar.regex("a"), None, 0.01)  # nothing asks the tokenizer
    finally:
        goes_on.set()
    for thread in compiler._left:
        thread.join()
    monkeypatch.setattr(compiler, "definition_of", real)
    assert matches(Grammar.regex("ab"), "ab")


def test_missing_tokenizer_for_grammar_is_named(monkeypatch) -> None:
    params = replace(GREEDY, grammar=Grammar.regex("a"))
    for tokenizer in (None, LetterTokenizer()):
        with pytest.raises(InvalidInput, match="tokenizer of the tokenizers library"):
            engine_of(tiny_model("cpu"), config_of(), tokenizer=tokenizer).add_request([1], params)
    with pytest.raises(InvalidInput, match="need a tokenizer"):
        sample(torch.zeros(1, 4), [params], [1])

    def absent(name):
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", absent)
    compiler._llguidance.cache_clear()
    with pytest.raises(InvalidInput, match=r"pip install '\.\[serve\]'"):
        serving().add_request([1], params)


def test_tokens_that_break_the_grammar_cannot_be_gone_on_with() -> None:
    params = replace(DRAWN, grammar=Grammar.regex("abc"))
    ids = small_tokenizer()("abc")["input_ids"]
    ended = "has already ended with its grammar"
    for drawn, message in (([5], "does not take token 5"), (ids, ended), ([*ids, 5], ended)):
        with pytest.raises(InvalidInput, match=message):
            serving().add_request([1], params, resume={0: drawn})


def test_a_narrow_head_draws_no_token_that_it_has_not() -> None:
    grammar = Grammar.choice(["yes", "no"])
    narrow = compiler.GrammarCompiler(small_tokenizer(), 60, [EOS]).matcher(grammar, (EOS,))
    actual = [token for token in range(64) if int(narrow.mask()[token // 32]) >> token % 32 & 1]
    assert not actual  # y and n stand behind it
    wide = compiler.GrammarCompiler(small_tokenizer(), 1000, [EOS]).matcher(grammar, (EOS,))
    assert len(wide.mask()) == 32 and wide.mask()[:5].tobytes() == matcher_of(grammar).mask()[:5].tobytes()


def test_json_of_a_class_with_a_schema() -> None:
    class Model:
        @staticmethod
        def model_json_schema():
            return {"type": "boolean"}

    assert json.loads(Grammar.json_schema(Model).source) == {"type": "boolean"}


def test_an_old_llguidance_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.6.1")
    compiler._llguidance.cache_clear()
    with pytest.raises(InvalidInput, match=r"grammars need llguidance 1\.9 or later, not 1\.6\.1: pip install"):
        compiler.definition_of(Grammar.regex("a"))


@pytest.mark.parametrize("begun", [True, False])
def test_budget_moves_no_other_token(begun: bool) -> None:
    marks = {"<think>": 3, "</think>": 4, "<|end|>": EOS}
    thinking, free = Thinking("qwen3", begun), SamplingParams(temperature=1.5, seed=5, max_tokens=40, logprobs=1)
    opened, engine = replace(free, logit_bias={3: 9.0, 4: -3.0}), serving()
    for params in (free, opened):
        [plain] = engine.generate([prompt_of(9)], params)
        expected = plain.outputs[0]
        wide = replace(params, grammar=within_budget(thinking, marks.get, 99))
        assert engine.generate([prompt_of(9)], wide)[0].outputs[0] == expected
        narrow = replace(params, grammar=within_budget(thinking, marks.get, 2))
        [bounded] = engine.generate([prompt_of(9)], narrow)
        tokens = bounded.outputs[0].token_ids
        start = 0 if begun else tokens.index(3) + 1 if 3 in tokens else len(tokens)
        assert 4 in [*tokens[start : start + 3], *([4] if start + 3 > len(tokens) else [])]
        assert params is free or tokens != expected.token_ids
        for cut in {1, 2, 3, len(tokens) - 1} - {len(tokens)}:
            engine.add_request(prompt_of(9), narrow, resume={0: tokens[:cut]})
            assert run(engine)[0].outputs[0].token_ids == tokens
