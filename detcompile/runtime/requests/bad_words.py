"""Bad words: token sequences that a request must not complete.

A word's last token is forbidden whenever the preceding tokens are the rest of the word. The forbidden tokens thus
depend only on the row's own tokens, including drafted ones, and the host computes them once these are known.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from detcompile.errors import InvalidInput

Word = tuple[int, ...]


class BadWords(NamedTuple):
    """Words of two or more tokens; a word of one token is always forbidden, like a bias of -inf.

    Attributes:
        anywhere: words that may begin in the prompt. A word longer than all tokens so far is ignored, as in Hugging
            Face.
        generated: words that must lie in the output entirely, as in vLLM.
    """

    anywhere: tuple[Word, ...] = ()
    generated: tuple[Word, ...] = ()

    @staticmethod
    def of(anywhere: Iterable[Sequence[int]], generated: Iterable[Word]) -> tuple["BadWords", tuple[int, ...]]:
        """Return the words of two or more tokens, and the tokens of one-token words."""
        given = tuple(dict.fromkeys(map(tuple, anywhere))), tuple(dict.fromkeys(generated))
        single = dict.fromkeys(word[0] for words in given for word in words if len(word) == 1)
        return BadWords(*(tuple(word for word in words if len(word) > 1) for words in given)), tuple(single)

    def completions(self, token_ids: Sequence[int], num_prompt_tokens: int, drafted: Sequence[int] = ()) -> Word:
        """Return the tokens that would complete a word after ``token_ids`` and ``drafted``."""
        num_tokens = len(token_ids) + len(drafted)
        num_generated = num_tokens - num_prompt_tokens
        longest = max(map(len, (*self.anywhere, *self.generated)), default=1) - 1
        tail = (*token_ids[max(0, len(token_ids) - longest) :], *drafted)
        last = [word[-1] for word in self.anywhere if len(word) <= num_tokens and _begun(word, tail)]
        last += [word[-1] for word in self.generated if len(word) <= num_generated + 1 and _begun(word, tail)]
        return tuple(dict.fromkeys(last))


NO_WORDS = BadWords()


def word_tokens(words: Iterable[str], tokenize: Callable[[str], list[int]], num_logits: int) -> list[Word]:
    """Return the tokens of each word without and with a leading space, if the space changes the first token.

    Follows vLLM's SamplingParams.update_from_tokenizer.

    Raises:
        InvalidInput: a word has no tokens, or one that the model cannot draw.
    """
    sequences: list[Word] = []
    for word in words:
        plain, spaced = (tuple(tokenize(prefix + word.lstrip())) for prefix in ("", " "))
        if not plain or not max(plain) < num_logits:
            raise InvalidInput(f"bad_words: the model cannot draw the tokens {list(plain)} of {word!r}: leave it out")
        sequences.append(plain)
        if len(spaced) == len(plain) and spaced[0] != plain[0] and max(spaced) < num_logits:
            sequences.append(spaced)
    return sequences


def _begun(word: Word, tail: Sequence[int]) -> bool:
    """Return True if ``tail`` ends with all tokens of the word but the last."""
    return tuple(tail[len(tail) - len(word) + 1 :]) == word[:-1]
