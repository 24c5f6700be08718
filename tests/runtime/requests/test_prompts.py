"""Every supported form of a prompt is understood; anything else is rejected by name."""

import array

import numpy as np
import pytest
import tokenizers
import torch
from transformers import BatchEncoding, PreTrainedTokenizerFast

from detcompile.errors import InvalidInput
from detcompile.runtime.requests.prompts import prompts_of, read_prompt
from tests.runtime.engine_cases import GREEDY, LetterTokenizer, config_of, engine_of, prompt_of, tiny_model

TEXTS = ["ab", "cdea", "b"]
IDS = [[0, 1], [2, 3, 4, 0], [1]]


def tokenizer() -> PreTrainedTokenizerFast:
    """A letter is a token, as LetterTokenizer reads it; 5 is padding."""
    vocabulary = {letter: index for index, letter in enumerate("abcde")} | {"[PAD]": 5}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[PAD]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    actual = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]")
    actual.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return actual


def forms() -> dict:
    """Of TEXTS, or of the second of them alone."""
    read = tokenizer()
    messages = [[{"role": "user", "content": text}] for text in TEXTS]
    one = IDS[1]
    return {
        "many": {
            "texts": TEXTS,
            "tuple": tuple(TEXTS),
            "array of texts": np.array(TEXTS),
            "ids": IDS,
            "arrays": [np.array(ids) for ids in IDS],
            "tensors": [torch.tensor(ids) for ids in IDS],
            "encodings": [read(text) for text in TEXTS],
            "encodings of tensors": [read(text, return_tensors="pt") for text in TEXTS],
            "tokenizer(texts)": read(TEXTS),
            "padded on the right": read(TEXTS, padding=True, return_tensors="pt"),
            "padded on the left": read(TEXTS, padding=True, padding_side="left", return_tensors="np"),
            "padded lists": read(TEXTS, padding=True),
            "a plain dict": dict(read(TEXTS, padding=True)),
            "chats": read.apply_chat_template(messages, padding=True),
            "tokenizers": read.backend_tokenizer.encode_batch(TEXTS),
            "vLLM's texts": [{"prompt": text} for text in TEXTS],
            "vLLM's ids": [{"prompt_token_ids": ids} for ids in IDS],
            "mixed": [TEXTS[0], {"prompt": TEXTS[1], "prompt_token_ids": torch.tensor(IDS[1])}, IDS[2]],
        },
        "one": {
            "text": TEXTS[1],
            "ids": one,
            "tuple": tuple(one),
            "integers of numpy": [np.int32(token) for token in one],
            "integers of torch": list(torch.tensor(one)),
            "array": array.array("q", one),
            "numpy": np.array(one, np.uint16),
            "torch": torch.tensor(one, dtype=torch.int32),
            "a row": torch.tensor([one]),
            "encoding": read(TEXTS[1]),
            "encoding of a row": read(TEXTS[1], return_tensors="pt"),
            "chat": read.apply_chat_template(messages[1]),
            "chat without a dict": read.apply_chat_template(messages[1], return_dict=False),
            "tokenizers": read.backend_tokenizer.encode(TEXTS[1]),
            "vLLM's text": {"prompt": TEXTS[1]},
            "vLLM's ids": {"prompt_token_ids": one, "multi_modal_data": None},
            "ids as a prompt": {"prompt": one},
        },
    }


@pytest.mark.parametrize("form", forms()["many"])
def test_many_prompts_are_one_each(form, device):
    engine = engine_of(tiny_model(device), config_of(), tokenizer=LetterTokenizer())
    outputs = engine.generate(forms()["many"][form], GREEDY, progress=False)
    assert [str(output.error) for output in outputs] == ["None"] * 3
    assert [output.prompt_token_ids for output in outputs] == IDS


@pytest.mark.parametrize("form", forms()["one"])
def test_one_prompt_is_one(form, device):
    engine = engine_of(tiny_model(device), config_of(), tokenizer=LetterTokenizer())
    given = forms()["one"][form]
    [output] = engine.generate(given, GREEDY, progress=False)
    assert output.error is None and output.prompt_token_ids == IDS[1]
    assert output.prompt == (TEXTS[1] if "text" in form else None)
    engine.add_request(given, GREEDY)
    outputs = []
    while engine.has_unfinished_requests:
        outputs += engine.step()  # none, while the first step with overlap is under way
    again = outputs[-1]
    assert again.prompt_token_ids == IDS[1] and again.outputs == output.outputs


NONSENSE = {
    "None": None,
    "bytes": b"abc",
    "bytearray": bytearray(b"abc"),
    "memoryview": memoryview(b"abc"),
    "set": {1, 2},
    "frozenset": frozenset([1, 2]),
    "generator": (token for token in [1, 2]),
    "an int": 7,
    "float": 1.5,
    "a bool": True,
    "object": object(),
}
IN_ENTRIES = {
    "1.0 is a float": [1.0, 2],
    "True is a bool": [0, True],
    "None is None": [1, None],
    "'a' is a str": [1, "a"],
    "a list": [1, [2]],
    "holds torch.float32": torch.tensor([1.0]),
    "holds torch.bool": torch.tensor([True]),
    "holds float64": np.array([1.0]),
    "'role', 'content'.*apply_chat_template": {"role": "user", "content": "hi"},
    "'pixel_values'": {"input_ids": [1], "pixel_values": [1.0]},
    "'multi_modal_data'": {"prompt": "ab", "multi_modal_data": {"image": 1}},
    "nothing in it": {"prompt": None},
    "a dict with": {},
    "attention_mask must hold": {"input_ids": [1, 2], "attention_mask": [1]},
    "a 0 .padding. or a 1": {"input_ids": [1, 2], "attention_mask": [1, 2]},
    "prompt is empty": {"input_ids": [1, 2], "attention_mask": [0, 0]},
    "are bytes|a bytes": {"prompt_token_ids": b"ab"},
    "give a list of integers": {"prompt_token_ids": "ab"},
    "cache_salt 1 is an int: give a string": {"prompt": "a", "cache_salt": 1},
    "holds token 160": {"prompt_token_ids": [160]},
    "holds token -1": np.array([-1]),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_refused_by_name(name, device):
    engine = engine_of(tiny_model(device), config_of())
    for call in (engine.add_request, lambda prompt: engine.generate(prompt, GREEDY, progress=False)):
        with pytest.raises(InvalidInput, match=f"{name}.*give a string"):
            call(NONSENSE[name])
    good, bad = engine.generate([[1, 2], NONSENSE[name]], GREEDY, progress=False)
    assert good.error is None and isinstance(bad.error, InvalidInput) and name in str(bad.error)
    assert not engine.has_unfinished_requests


@pytest.mark.parametrize("message", IN_ENTRIES)
def test_entries_that_cannot_be_are_refused_by_name(message, device):
    engine = engine_of(tiny_model(device), config_of())
    with pytest.raises(InvalidInput, match=message):
        engine.add_request(IN_ENTRIES[message], GREEDY)
    good, bad = engine.generate([[1, 2], IN_ENTRIES[message]], GREEDY, progress=False)
    assert good.error is None and isinstance(bad.error, InvalidInput)
    assert not engine.has_unfinished_requests


def test_rows_of_a_batch_are_for_generate():
    batch = torch.tensor([[1, 2], [3, 4]])
    assert [read_prompt(row).token_ids for row in prompts_of(batch)] == [[1, 2], [3, 4]]
    with pytest.raises(InvalidInput, match="2 rows: give one prompt, or all of them to generate"):
        read_prompt(batch)
    with pytest.raises(InvalidInput, match="of one shape"):
        prompts_of(BatchEncoding({"input_ids": [[1], [2]], "attention_mask": [[1]]}))


@pytest.mark.parametrize("error", [TypeError("TextInputSequence must be str"), RuntimeError("Already borrowed")])
def test_text_that_the_tokenizer_refuses_is_refused_and_the_others_are_served(error, device):
    class Refuses(LetterTokenizer):
        def __call__(self, text, verbose):
            if "\ud83d" in text or "x" in text:
                raise error
            return super().__call__(text, verbose)

    engine = engine_of(tiny_model(device), config_of(), tokenizer=Refuses())
    first, half, other, last = engine.generate(["ab", "a\ud83d", "x", "cd"], GREEDY, progress=False)
    assert isinstance(half.error, InvalidInput) and "character 1 is half of a surrogate pair" in str(half.error)
    assert isinstance(other.error, InvalidInput) and repr(error) in str(other.error)
    assert first.error is last.error is None and not engine.has_unfinished_requests
    assert engine.stats.num_generated_tokens == 12


def test_a_real_tokenizer_refuses_half_a_character(device):
    read = tokenizer()
    engine = engine_of(tiny_model(device), config_of(), tokenizer=read)
    with pytest.raises(InvalidInput, match="half of a surrogate pair"):
        engine.add_request("ab\ud83d", GREEDY)
    assert engine.generate([prompt_of(3)], GREEDY, progress=False)[0].error is None
