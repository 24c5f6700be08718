"""generate() gives Hugging Face's greedy tokens, outputs and side effects under its arguments."""

import hashlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, TextIteratorStreamer, TextStreamer
from transformers.generation import logits_process
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

import detcompile
from detcompile import SamplingParams
from detcompile.runtime.dense.padded_batch import seed_of_row
from detcompile.runtime.requests import admission
from tests.bits import assert_bitwise_equal
from tests.exhaustive import EXHAUSTIVE_BY_CASE, exhaustive_unless
from tests.model_cases import VOCAB_SIZE
from tests.models.generation_cases import (
    LENGTHS,
    OTHERS,
    PAD,
    QUICK,
    Recorder,
    model_of,
    new_tokens,
    padded_batch,
    plain_model,
    tokenizer,
)


@pytest.fixture(params=exhaustive_unless(lambda name: name in QUICK, [*QUICK, *OTHERS], EXHAUSTIVE_BY_CASE))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def words_of(rows: tuple[tuple[int, ...], ...]) -> list[list[int]]:
    return [list(rows[0][2:4]), list(rows[1][4:7]), [rows[2][1]]]


# Arguments of a case from the greedy answers; None of the prompts' width stands for itself.
CASES: dict[str, Callable[[tuple[tuple[int, ...], ...]], dict[str, Any]]] = {
    "max_length": lambda rows: {"max_length": max(LENGTHS) + 7},
    "default length": lambda rows: {},
    "eos": lambda rows: {"eos_token_id": rows[1][3]},
    "several eos": lambda rows: {"eos_token_id": [rows[0][2], rows[2][5]], "max_new_tokens": 12},
    "min_new_tokens": lambda rows: {"eos_token_id": [row[1] for row in rows], "min_new_tokens": 6},
    "min_length": lambda rows: {"eos_token_id": [row[1] for row in rows], "min_length": max(LENGTHS) + 4},
    "bad_words_ids": lambda rows: {"bad_words_ids": words_of(rows), "eos_token_id": rows[2][1]},
    "suppress_tokens": lambda rows: {"suppress_tokens": [rows[0][0], rows[1][2], rows[2][4]]},
    "stop_strings": lambda rows: {"stop_strings": tokenizer().decode(rows[1][4:6]), "eos_token_id": VOCAB_SIZE - 1},
    "stop_strings without eos": lambda rows: {"stop_strings": [tokenizer().decode([row[3]]) for row in rows[:2]]},
    "all of them": lambda rows: {
        "bad_words_ids": words_of(rows),
        "suppress_tokens": [rows[0][5]],
        "eos_token_id": [row[2] for row in rows],
        "min_new_tokens": 4,
        "max_new_tokens": 15,
        "stop_strings": [tokenizer().decode([row[7]]) for row in rows],
    },
}


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_hugging_face_s(name: str, case: str) -> None:
    ids, mask = padded_batch()
    arguments = {"pad_token_id": PAD} | CASES[case](new_tokens(name))
    if "stop_strings" in arguments:
        arguments["tokenizer"] = tokenizer()
    expected = plain_model(name).generate(ids, attention_mask=mask, do_sample=False, **arguments)
    assert torch.equal(model_of(name).generate(ids, attention_mask=mask, **arguments), expected)
    assert torch.equal(model_of(name).generate(inputs=ids, **arguments), expected)  # the mask is inferred from PAD
    config = GenerationConfig(**{key: value for key, value in arguments.items() if key != "tokenizer"})
    rest = {"tokenizer": tokenizer(), "generation_config": config}
    assert torch.equal(model_of(name).generate(ids, mask, **rest), expected)
    if case != "default length":
        assert not torch.equal(expected[:, ids.shape[1] :], torch.tensor(new_tokens(name)))


def test_a_penalty_counts_a_row_s_own_tokens(name: str) -> None:
    """Hugging Face's counts the pad token as one that was seen: its rows are taken alone here."""
    ids, mask = padded_batch()
    arguments = {"repetition_penalty": 9.0, "max_new_tokens": 12, "do_sample": False}
    actual = model_of(name).generate(ids, mask, **arguments)
    for row, length in enumerate(LENGTHS):
        alone = plain_model(name).generate(ids[row : row + 1, -length:], **arguments)
        assert torch.equal(actual[row, -length - 12 :], alone[0])
    assert not torch.equal(actual[:, ids.shape[1] :], torch.tensor(new_tokens(name)))


# What the caller sees meanwhile


class After(StoppingCriteria):
    """Ends a row with its first token of some; keeps what it was shown."""

    def __init__(self, tokens: set[int]) -> None:
        self.tokens = torch.tensor(sorted(tokens))
        self.seen: list[tuple[list[list[int]], int | None]] = []

    def __call__(self, input_ids: Tensor, scores: tuple[Tensor, ...] | None, **_: Any) -> Tensor:
        self.seen.append((input_ids.tolist(), None if scores is None else len(scores)))
        return torch.isin(input_ids[:, -1], self.tokens)


@pytest.mark.parametrize("eos", [{}, {"eos_token_id": VOCAB_SIZE - 1}])
@pytest.mark.parametrize("outputs", [{}, {"return_dict_in_generate": True, "output_scores": True}])
def test_streamers_and_criteria_see_what_hugging_face_shows_them(eos: dict, outputs: dict) -> None:
    ids, mask = padded_batch()
    rows = new_tokens("qwen3")
    seen = []
    for model in (plain_model("qwen3"), model_of("qwen3")):
        streamer, criterion = Recorder(), After({rows[0][5], rows[1][2], rows[2][8]})
        actual = model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            pad_token_id=PAD,
            max_new_tokens=20,
            streamer=streamer,
            stopping_criteria=[criterion],
            **eos,
            **outputs,
        )
        seen.append((streamer.seen, criterion.seen, (actual.sequences if outputs else actual).tolist()))
    assert seen[0] == seen[1]
    assert seen[0][0][-1] == ["end"] and len(seen[0][1]) > 4


def test_a_criterion_takes_the_place_of_the_one_of_its_class() -> None:
    ids, mask = padded_batch()
    rows = new_tokens("qwen3")
    for criteria in ([MaxLengthCriteria(max(LENGTHS) + 15)], [EosTokenCriteria(rows[0][2]), MaxLengthCriteria(4)]):
        arguments = {"stopping_criteria": criteria, "eos_token_id": rows[1][4], "max_new_tokens": 6}
        arguments |= {"pad_token_id": PAD, "do_sample": False}
        expected = plain_model("qwen3").generate(ids, attention_mask=mask, **arguments)
        assert torch.equal(model_of("qwen3").generate(ids, attention_mask=mask, **arguments), expected)


def test_text_streams_as_from_hugging_face(capsys: pytest.CaptureFixture) -> None:
    ids = padded_batch((9,))[0]
    texts = []
    for model in (plain_model("qwen3"), model_of("qwen3")):
        streamer = TextIteratorStreamer(tokenizer(), skip_prompt=True)
        model.generate(ids, do_sample=False, max_new_tokens=12, streamer=streamer, pad_token_id=PAD)
        model.generate(ids, do_sample=False, max_new_tokens=12, streamer=TextStreamer(tokenizer()), pad_token_id=PAD)
        texts.append((list(streamer), capsys.readouterr().out))
    assert texts[0] == texts[1] and "".join(texts[0][0])


@pytest.mark.parametrize("seen_by", ["streamer", "stopping_criteria"])
def test_streams_warn_of_end_tokens_too(seen_by: str, caplog: pytest.LogCaptureFixture) -> None:
    admission._warn_of_end.cache_clear()
    model, ids = model_of("qwen3"), padded_batch((9,))[0]
    ending = SimpleNamespace(eos_token="<end>", eos_token_id=7)
    seen = {"streamer": Recorder()} if seen_by == "streamer" else {"stopping_criteria": [After({PAD})]}
    with mock.patch.dict(model.__dict__, tokenizer=ending), caplog.at_level("WARNING", "detcompile"):
        model.generate(ids, max_new_tokens=2, eos_token_id=[7], pad_token_id=PAD, **seen)
        assert not caplog.records
        model.generate(ids, max_new_tokens=2, pad_token_id=PAD, **seen)
    assert "eos_token '<end>' (token 7) is not among the model's end tokens" in caplog.text


def test_an_error_of_a_criterion_reaches_the_caller_and_the_next_call_is_served() -> None:
    ids, mask = padded_batch()
    model, arguments = model_of("qwen3"), {"max_new_tokens": 5, "eos_token_id": None}

    def fails(input_ids: Tensor, _scores: Any, **_: Any) -> Tensor:
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        model.generate(ids, mask, stopping_criteria=[fails], **arguments)
    streamed = model.generate(ids, mask, streamer=Recorder(), **arguments)
    assert torch.equal(streamed, model.generate(ids, mask, **arguments))


# What comes back


def test_logits_are_the_model_s_and_scores_what_the_processors_of_transformers_make_of_them() -> None:
    ids, mask = padded_batch((7, 7))
    rows = new_tokens("qwen3")
    arguments = {"max_new_tokens": 9, "eos_token_id": [rows[0][0]], "min_new_tokens": 5, "repetition_penalty": 1.3}
    arguments |= {"bad_words_ids": words_of(rows), "suppress_tokens": [3, 9], "pad_token_id": PAD}
    returned = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    model = model_of("qwen3")
    actual = model.generate(ids, mask, **arguments, **returned)
    assert torch.equal(actual.sequences, model.generate(ids, mask, **arguments))
    assert actual.seeds is None and actual.past_key_values is None
    everything = model(actual.sequences).logits
    processors = logits_process.LogitsProcessorList(
        [
            logits_process.RepetitionPenaltyLogitsProcessor(1.3),
            logits_process.NoBadWordsLogitsProcessor(words_of(rows), [rows[0][0]]),
            logits_process.MinNewTokensLengthLogitsProcessor(7, 5, [rows[0][0]]),
            logits_process.SuppressTokensLogitsProcessor([3, 9]),
        ]
    )
    for step, (logits, scores) in enumerate(zip(actual.logits, actual.scores, strict=True)):
        live = [rows[0][0] not in row for row in actual.sequences[:, 7 : 7 + step].tolist()]
        assert_bitwise_equal(logits[live], everything[live, 6 + step])
        assert_bitwise_equal(scores[live], processors(actual.sequences[live, : 7 + step], logits[live]))
    only = model.generate(ids, mask, **arguments, return_dict_in_generate=True)
    assert torch.equal(only.sequences, actual.sequences) and only.scores is None and only.logits is None
    theirs = plain_model("qwen3").generate(ids, attention_mask=mask, do_sample=False, **arguments, **returned)
    assert torch.equal(theirs.sequences, actual.sequences)
    assert [s.shape for s in theirs.scores] == [s.shape for s in actual.scores]
    assert {s.dtype for s in theirs.scores} == {s.dtype for s in actual.scores}


def test_the_logits_of_a_row_that_has_ended_are_zeros() -> None:
    ids, mask = padded_batch()
    rows = new_tokens("qwen3")
    returned = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    actual = model_of("qwen3").generate(ids, mask, eos_token_id=rows[0][2], max_new_tokens=8, **returned)
    ended = rows[0].index(rows[0][2])
    for step, (logits, scores) in enumerate(zip(actual.logits, actual.scores)):
        assert (not logits[0].any() and not scores[0].any()) == (step > ended)


@pytest.mark.parametrize("stepwise", [False, True])
def test_one_seed_serves_all_rows_and_each_repeats_alone(stepwise: bool) -> None:
    ids, mask = padded_batch()
    model = model_of("qwen3")
    arguments = {"do_sample": True, "temperature": 1.3, "top_p": 0.95, "max_new_tokens": 10, "eos_token_id": None}
    arguments |= {"return_dict_in_generate": True} | ({"streamer": Recorder(), "min_p": 0.01} if stepwise else {})
    actual = model.generate(ids, mask, seed=7, num_return_sequences=2, **arguments)
    assert actual.sequences.shape[0] == 6 and len(set(actual.seeds)) == 6
    assert actual.seeds == tuple(seed_of_row(7, row) for row in range(6)) and actual.seeds[0] == 7
    if stepwise:
        arguments["streamer"] = None
    for row, seed in enumerate(actual.seeds):
        prompt = ids[row // 2 : row // 2 + 1, -LENGTHS[row // 2] :]
        alone = model.generate(prompt, seed=seed, **arguments)
        assert alone.seeds == (seed,)
        assert torch.equal(alone.sequences[0], actual.sequences[row, -alone.sequences.shape[1] :])
    again = model.generate(ids, mask, seed=list(actual.seeds), num_return_sequences=2, **arguments)
    assert torch.equal(again.sequences, actual.sequences)
    fresh = [model.generate(ids, mask, **arguments) for _ in range(2)]
    assert not torch.equal(fresh[0].sequences, fresh[1].sequences) and not {*fresh[0].seeds} & {*fresh[1].seeds}
    again = model.generate(ids, mask, seed=fresh[0].seeds, **arguments)
    assert torch.equal(again.sequences, fresh[0].sequences)


def test_seeds_that_are_not_given_are_drawn_by_torch() -> None:
    model, ids = model_of("qwen3"), padded_batch(LENGTHS)[0]
    arguments = {"do_sample": True, "max_new_tokens": 4, "return_dict_in_generate": True, "attention_mask": ids * 0 + 1}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        actual = [model.generate(ids, **arguments) for _ in range(2)]
        torch.manual_seed(3)
        again = [model.generate(ids, **arguments) for _ in range(2)]
    assert len({seed for output in actual for seed in output.seeds}) == 2 * len(LENGTHS)
    for output, repeated in zip(actual, again, strict=True):
        assert output.seeds == repeated.seeds and torch.equal(output.sequences, repeated.sequences)


def test_greedy_call_draws_nothing_from_torch() -> None:
    model, (ids, mask) = model_of("qwen3"), padded_batch(LENGTHS)
    before = torch.get_rng_state()
    model.generate(ids, mask, max_new_tokens=4)
    assert torch.equal(torch.get_rng_state(), before)


def test_seeds_are_the_documented_hash() -> None:
    assert seed_of_row(7, 0) == 7
    assert seed_of_row(7, 1) == int.from_bytes(hashlib.sha256(b"7/1").digest()[:8], "little") == 6801174921074823891


def test_a_row_gets_what_an_engine_draws_with_its_seed() -> None:
    ids = padded_batch((9,))[0]
    model = model_of("qwen3")
    actual = model.generate(ids, do_sample=True, seed=5, max_new_tokens=8, eos_token_id=None)
    params = SamplingParams(seed=5, max_tokens=8, ignore_eos=True, top_k=50)  # as Hugging Face's default
    [output] = model.engine(detcompile.EngineConfig(num_blocks=20)).generate(ids[0].tolist(), params, progress=False)
    assert actual[0, 9:].tolist() == output.outputs[0].token_ids


# Any combination


@pytest.mark.parametrize(
    "name", exhaustive_unless(lambda name: name == "lfm2", ["lfm2", "mamba2", "qwen3_next", "granite_swa"])
)
def test_layers_with_states_and_windows_are_watched_with_the_same_tokens(name: str) -> None:
    ids, mask = padded_batch((9, 5, 80, 1))
    model = model_of(name)
    for _ in range(2):  # over a runner that has served before
        arguments = {"max_new_tokens": 20, "repetition_penalty": 1.3}
        watched = model.generate(ids, mask, streamer=Recorder(), **arguments)
        assert torch.equal(watched, model.generate(ids, mask, **arguments))
        ids, mask = ids[:3].roll(1, 0), mask[:3].roll(1, 0)


# What cannot be served
