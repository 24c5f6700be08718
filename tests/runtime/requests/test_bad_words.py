"""Bad words as vLLM reads them, and the tokens that would complete one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from detcompile.errors import InvalidInput
from detcompile.runtime.requests.bad_words import BadWords, word_tokens

TOKENS = st.integers(0, 2)
WORDS = st.lists(st.lists(TOKENS, min_size=1, max_size=4).map(tuple), max_size=6)


@given(WORDS, WORDS, st.lists(TOKENS, min_size=1), st.lists(TOKENS), st.integers(0))
def test_a_word_forbids_its_last_token_behind_its_others(anywhere, generated, prompt, output, cut):
    """Said the long way: what would end with a word, if it came next; whichever tokens are drafted."""
    words, single = BadWords.of(anywhere, generated)
    tokens, cut = [*prompt, *output], len(prompt) + cut % (len(output) + 1)
    expected = set()
    for token in range(3):
        longer = [*tokens, token]
        if any(longer[-len(word) :] == [*word] and len(word) <= len(tokens) for word in anywhere):
            expected.add(token)
        if any([*output, token][-len(word) :] == [*word] for word in generated):
            expected.add(token)
    expected |= {word[0] for word in anywhere if len(word) == 1}
    actual = words.completions(tokens[:cut], len(prompt), tokens[cut:])
    assert {*actual, *single} == expected


def test_a_word_is_read_at_a_text_s_beginning_and_behind_a_space():
    spelled = {"an": [1], " an": [2], "ant": [1, 5], " ant": [2, 5], "the": [7], " the": [8, 9], "so": [4], " so": [4]}
    assert word_tokens(["an"], spelled.__getitem__, 10) == [(1,), (2,)]
    assert word_tokens([" ant"], spelled.__getitem__, 10) == [(1, 5), (2, 5)]
    assert word_tokens(["the"], spelled.__getitem__, 10) == [(7,)]  # as vLLM: of another length
    assert word_tokens(["so"], spelled.__getitem__, 10) == [(4,)]
    with pytest.raises(InvalidInput, match=r"cannot draw the tokens .* of 'the'"):
        word_tokens(["an", "the"], spelled.__getitem__, 7)
