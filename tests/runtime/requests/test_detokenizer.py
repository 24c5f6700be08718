"""Detokenizer's pieces add up to the whole text, cut at the first stop string."""

import copy
import functools
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import detcompile
from detcompile.runtime.requests.detokenizer import Detokenizer
from detcompile.runtime.requests.sampling_params import SamplingParams

TINY = AutoTokenizer.from_pretrained(Path(detcompile.__file__).parent / "tiny")
TEXTS = st.one_of(
    st.text(max_size=30),
    st.text(st.sampled_from("ab \n.é日🎉\u200d\ufffd"), max_size=40),
    st.lists(st.sampled_from(["the ", "hello", " world", "日本", "👩‍👩‍👧", "\n\n", "stop"]), max_size=8).map("".join),
)
TOKENS = st.integers(0, len(TINY) - 1)
BYTE_TOKENS = [i for i in range(len(TINY)) if TINY.decode([i]).endswith("\ufffd")]
IDS = st.one_of(
    st.lists(TOKENS, max_size=40),
    st.lists(st.sampled_from(BYTE_TOKENS), max_size=60),
    st.lists(st.one_of(st.sampled_from(BYTE_TOKENS), TOKENS, st.sampled_from(TINY.all_special_ids)), max_size=40),
    TEXTS.map(lambda text: TINY(text).input_ids),
)


@functools.cache
def sentencepiece_like():
    """Leading spaces are part of tokens and dropped at the start; bytes stand for what is not in the vocabulary."""
    words = ["<unk>", "▁", "▁a", "▁hello", "lo", "▁wor", "ld", "s", "t", "o", "p", ".", "▁stop"]
    vocab = {token: i for i, token in enumerate(words + [f"<0x{byte:02X}>" for byte in range(256)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer), len(words)


def decode(tokenizer, ids, **options):
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False, **{"skip_special_tokens": True, **options})


def pieces_of(tokenizer, ids, sizes=(1,), **params):
    """Every piece, several tokens at a time, and the detokenizer."""
    detokenizer, pieces, start, turn = Detokenizer(tokenizer, SamplingParams(**params)), [], 0, 0
    while start < len(ids):
        size = sizes[turn % len(sizes)]
        pieces.append(detokenizer.append(ids[start : start + size]))
        start, turn = start + size, turn + 1
    return [*pieces, detokenizer.finish()], detokenizer


@given(ids=IDS, sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4), skip=st.booleans())
@example(ids=BYTE_TOKENS * 3, sizes=[1], skip=True)
def test_pieces_join_to_decoded_text(ids, sizes, skip):
    pieces, detokenizer = pieces_of(TINY, ids, sizes, skip_special_tokens=skip)
    assert "".join(pieces) == decode(TINY, ids, skip_special_tokens=skip)
    assert detokenizer.stopped_by is None and detokenizer.num_tokens == len(ids)
    whole = Detokenizer(TINY, SamplingParams(skip_special_tokens=skip))
    assert whole.finish(ids) == "".join(pieces) and whole.num_tokens == len(ids)


@given(words=st.lists(st.one_of(st.integers(1, 12), st.sampled_from("é日🎉")), max_size=30))
def test_pieces_join_to_decoded_text_if_decoder_drops_spaces(words):
    tokenizer, first_byte = sentencepiece_like()
    ids = [i for w in words for i in ([w] if isinstance(w, int) else [first_byte + byte for byte in w.encode()])]
    pieces, _ = pieces_of(tokenizer, ids)
    assert "".join(pieces) == decode(tokenizer, ids)


RUNS = st.lists(
    st.one_of(st.integers(1, 12), st.binary(min_size=1, max_size=6), st.sampled_from([c.encode() for c in "é日🎉"])),
    max_size=30,
)


@given(words=RUNS, sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4), stops=st.lists(st.sampled_from("s日")))
@example(words=["日".encode(), b"\xff", 3], sizes=[1], stops=[])
@example(words=[3, *["日".encode()] * 5, b"\xff"], sizes=[1], stops=["日"])
def test_bytes_that_are_no_character_take_their_whole_run_with_them(words, sizes, stops):
    """One such byte turns the characters before it into marks too, so nothing of a run is certain before its end."""
    tokenizer, first_byte = sentencepiece_like()
    ids = [i for w in words for i in ([w] if isinstance(w, int) else [first_byte + byte for byte in w])]
    text = decode(tokenizer, ids)
    pieces, detokenizer = pieces_of(tokenizer, ids, sizes, stop=stops)
    assert ("".join(pieces), detokenizer.stopped_by) == text_with_stops(text, stops, include=False)
    if not stops:
        assert Detokenizer(tokenizer, SamplingParams()).finish(ids) == text


def test_half_a_character_is_held_back():
    ids = TINY("日").input_ids
    assert len(ids) == 3
    pieces, _ = pieces_of(TINY, ids)
    assert pieces == ["", "", "日", ""]
    assert pieces_of(TINY, ids[:2])[0] == ["", "", "\ufffd"]


def text_with_stops(text, stops, include):
    """The text cut where the first stop string is complete, looked for character by character."""
    for end in range(len(text) + 1):
        actual = [stop for stop in stops if text[:end].endswith(stop)]
        if actual:
            longest = max(actual, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@given(
    ids=st.one_of(IDS, st.text("abc", max_size=40).map(lambda text: TINY(text).input_ids)),
    stops=st.lists(st.one_of(st.text("abc", min_size=1, max_size=5), st.text(min_size=1, max_size=2)), max_size=3),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    include=st.booleans(),
    data=st.data(),
)
def test_the_text_ends_at_the_first_stop_string(ids, stops, sizes, include, data):
    text = decode(TINY, ids)
    if text and data.draw(st.booleans()):  # one that is there
        start = data.draw(st.integers(0, len(text) - 1))
        stops = [*stops, text[start : start + data.draw(st.integers(1, 6))]]
    pieces, detokenizer = pieces_of(TINY, ids, sizes, stop=stops, include_stop_str_in_output=include)
    assert ("".join(pieces), detokenizer.stopped_by) == text_with_stops(text, stops, include)


@given(
    parts=st.lists(st.sampled_from(["<t>", "</t>", "<", "/t>", " ", "\n", "a", "ab", "b"]), max_size=9),
    opens=st.sampled_from(["", "<t>"]),
    stops=st.lists(st.sampled_from(["a", "ab", "\n", "</t>", ">a", "<t>"]), min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    include=st.booleans(),
)
def test_stop_strings_begin_after_the_reasoning(parts, opens, stops, sizes, include):
    text = "".join(parts)
    thinks, end = text.lstrip(" \t\r\n").startswith(opens), 0
    if thinks:
        place = text.find("</t>", text.find(opens) + len(opens))
        end = len(text) if place < 0 else place + len("</t>")
    rest, stopped_by = text_with_stops(text[end:], stops, include)
    params = {"stop": stops, "include_stop_str_in_output": include, "reasoning_markers": (opens, "</t>")}
    pieces, detokenizer = pieces_of(TINY, TINY(text).input_ids, sizes, **params)
    assert ("".join(pieces), detokenizer.stopped_by) == (text[:end] + rest, stopped_by)


def test_a_stop_string_across_tokens_ends_at_its_token():
    ids = TINY("one two\n\nthree").input_ids
    end = next(n for n in range(len(ids)) if "\n\nth" in decode(TINY, ids[:n]))
    for sizes in ([1], [3], [100]):
        pieces, detokenizer = pieces_of(TINY, ids, sizes, stop="\n\nth")
        assert "".join(pieces) == "one two" and detokenizer.stopped_by == "\n\nth" and detokenizer.num_tokens == end
    assert "".join(pieces_of(TINY, ids, stop="\n\nth", include_stop_str_in_output=True)[0]) == "one two\n\nth"


def test_possible_stop_string_is_held_back_no_longer_than_needed():
    ids = [i for letter in "xabaaby" for i in TINY(letter).input_ids]
    pieces, _ = pieces_of(TINY, ids, stop=("abab", "aby!"))
    assert pieces == ["x", "", "", "", "aba", "", "", "aby"]


@pytest.mark.parametrize(("min_tokens", "text"), [(0, ""), (1, "a"), (2, "aa"), (6, "aaaaaa")])
def test_stop_strings_wait_for_min_tokens(min_tokens, text):
    ids = TINY("a").input_ids * 6
    assert "".join(pieces_of(TINY, ids, stop="a", min_tokens=min_tokens)[0]) == text


@pytest.mark.parametrize(("min_tokens", "text"), [(0, "x"), (3, "x"), (4, "xaba"), (6, "xaba"), (7, "xabaaba")])
def test_a_stop_string_may_begin_in_the_first_min_tokens_and_ends_behind_them(min_tokens, text):
    ids = [i for letter in "xabaaba" for i in TINY(letter).input_ids]
    pieces, detokenizer = pieces_of(TINY, ids, stop="aba", min_tokens=min_tokens)
    assert "".join(pieces) == text and detokenizer.num_tokens == (4 if min_tokens < 4 else 7)


def test_a_stop_string_that_ends_in_the_first_min_tokens_is_text_though_a_longer_one_might_come():
    ids = [i for letter in "xabyzab" for i in TINY(letter).input_ids]
    pieces, detokenizer = pieces_of(TINY, ids, stop=["ab", "abc"], min_tokens=3)
    assert "".join(pieces) == "xabyz" and detokenizer.num_tokens == 7


def test_a_token_costs_the_same_in_a_long_text():
    for ids in (TINY("hello wörld ").input_ids * 300, BYTE_TOKENS * 10, [*TINY("a").input_ids, *[0] * 500]):
        detokenizer = Detokenizer(TINY, SamplingParams(stop="never seen"))
        longest = 0
        for token in ids:
            detokenizer.append([token])
            longest = max(longest, len(detokenizer._window), len(detokenizer._held))
        assert longest <= 20


def test_unknown_special_tokens_leave_the_text_as_decoded():
    """transformers does not return from `all_special_ids` if unk_token is not in the vocabulary."""
    without_unknown = copy.deepcopy(TINY)
    without_unknown.unk_token = "<not in the vocabulary>"
    nameless = SimpleNamespace(decode=TINY.decode, convert_ids_to_tokens=TINY.convert_ids_to_tokens)
    ids = [*TINY("a ").input_ids, *TINY.all_special_ids, *TINY("b").input_ids]
    for tokenizer in (without_unknown, nameless):
        pieces, _ = pieces_of(tokenizer, ids, stop="never seen")
        assert "".join(pieces) == decode(TINY, ids)


def test_nothing_comes_after_the_end():
    detokenizer = Detokenizer(TINY, SamplingParams())
    assert detokenizer.append([]) == detokenizer.finish() == ""
    with pytest.raises(AssertionError, match=r"finish\(\) called twice|has been finished"):
        detokenizer.append([5])
    with pytest.raises(AssertionError, match=r"finish\(\) called twice|has been finished"):
        detokenizer.finish()
