"""generate() under random arguments: Hugging Face's greedy tokens, and the same row in any batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from detcompile.runtime.dense.padded_batch import seed_of_row
from tests.model_cases import VOCAB_SIZE
from tests.models.generation_cases import PAD, Recorder, model_of, padded_batch, plain_model, tokenizer

ROWS = st.integers(1, 3)
TOKEN = st.integers(1, VOCAB_SIZE - 1)
CHOICES: dict[str, st.SearchStrategy] = {
    "eos_token_id": st.lists(TOKEN, min_size=1, max_size=30),
    "min_new_tokens": st.integers(1, 8),
    "min_length": st.integers(1, 20),
    "max_length": st.integers(10, 22),
    "max_new_tokens": st.integers(1, 12),
    "repetition_penalty": st.sampled_from([0.8, 1.4]),
    "bad_words_ids": st.lists(st.lists(TOKEN, min_size=1, max_size=2), min_size=1, max_size=40),
    "suppress_tokens": st.lists(TOKEN, min_size=1, max_size=60),
    "stop_strings": st.lists(st.integers(40, 110).map(chr), min_size=1, max_size=4),
    "use_cache": st.booleans(),
    "top_k": st.none() | st.just(5),
    "temperature": st.none() | st.just(0.5),
    "num_beams": st.just(1),
    "return_dict_in_generate": st.booleans(),
    "output_scores": st.booleans(),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@settings(max_examples=60)
@given(data=st.data(), rows=ROWS, seed=st.integers(0, 99))
def test_any_arguments_give_hugging_face_s_greedy_tokens(data: st.DataObject, rows: int, seed: int) -> None:
    names = data.draw(st.lists(st.sampled_from(sorted(CHOICES)), max_size=6, unique=True))
    arguments = {name: data.draw(CHOICES[name], label=name) for name in names} | {"do_sample": False}
    arguments |= {"pad_token_id": PAD, "tokenizer": tokenizer()}
    ids = padded_batch((9,) * rows, seed)[0]
    streamers = Recorder(), Recorder()
    streams = data.draw(st.booleans(), label="streams")
    actual, expected = (
        model.generate(ids, **arguments, **({"streamer": streamer} if streams else {}))
        for model, streamer in zip((model_of("qwen3"), plain_model("qwen3")), streamers)
    )
    if arguments.get("return_dict_in_generate"):
        assert (actual.scores is None) == (expected.scores is None)
        actual, expected = actual.sequences, expected.sequences
    assert torch.equal(actual, expected)
    assert streamers[0].seen == streamers[1].seen


@settings(max_examples=25)
@given(data=st.data(), seed=st.integers(0, 99), lengths=st.lists(st.integers(2, 20), min_size=1, max_size=4))
def test_a_row_is_alone_in_any_batch_and_watched_or_not(data: st.DataObject, seed: int, lengths: list[int]) -> None:
    names = {"eos_token_id", "min_new_tokens", "repetition_penalty", "bad_words_ids", "suppress_tokens"}
    chosen = data.draw(st.lists(st.sampled_from(sorted(names)), max_size=4, unique=True))
    arguments = {name: data.draw(CHOICES[name], label=name) for name in chosen}
    arguments |= {"max_new_tokens": 9, "pad_token_id": PAD, "do_sample": data.draw(st.booleans(), label="do_sample")}
    ids, mask = padded_batch(tuple(lengths), seed)
    model = model_of("qwen3")
    seeds = [seed_of_row(seed, row) for row in range(len(lengths))]
    together = model.generate(ids, mask, seed=seed, **arguments)
    watched = model.generate(ids, mask, seed=seed, streamer=Recorder(), **arguments)
    assert torch.equal(together, watched)
    for row, length in enumerate(lengths):
        alone = model.generate(ids[row : row + 1, -length:], seed=seeds[row], **arguments)[0, length:]
        item = together[row, ids.shape[1] :]
        assert torch.equal(item[: len(alone)], alone) and (item[len(alone) :] == PAD).all()
