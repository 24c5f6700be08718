"""Bad words: sequences of tokens that a request must not complete.

A word forbids its last token wherever the tokens before it are its others. So what it forbids is a function of the
row's own tokens, drafted ones included, and known on the host once those are.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from detcompile.errors import InvalidInput

__all__ = ["BadWords", "NO_WORDS", "word_tokens"]

Word = tuple[int, ...]


class BadWords(NamedTuple):
    """Words of two tokens or more; a word of one is forbidden always, as a bias is.

    Attributes:
        anywhere: forbidden also where the prompt has begun them; but not where they are longer than all tokens so far,
            as Hugging Face's are not.
        generated: forbidden where the output has begun them, as vLLM's are.
    """

    anywhere: tuple[Word, ...] = ()
    generated: tuple[Word, ...] = ()

    @staticmethod
    def of(anywhere: Iterable[Sequence[int]], generated: Iterable[Word]) -> tuple["BadWords", tuple[int, ...]]:
        """The words, and the tokens that are words of their own."""
        given = tuple(dict.fromkeys(map(tuple, anywhere))), tuple(dict.fromkeys(generated))
        single = dict.fromkeys(word[0] for words in given for word in words if len(word) == 1)
        return BadWords(*(tuple(word for word in words if len(word) > 1) for words in given)), tuple(single)

    def completions(self, token_ids: Sequence[int], num_prompt_tokens: int, drafted: Sequence[int] = ()) -> Word:
        """The tokens that would complete a word behind ``token_ids``, and ``drafted`` ones behind those."""
        num_tokens = len(token_ids) + len(drafted)
        num_generated = num_tokens - num_prompt_tokens
        longest = max(map(len, (*self.anywhere, *self.generated)), default=1) - 1
        tail = (*token_ids[max(0, len(token_ids) - longest) :], *drafted)
        found = [word[-1] for word in self.anywhere if len(word) <= num_tokens and _begun(word, tail)]
        found += [word[-1] for word in self.generated if len(word) <= num_generated + 1 and _begun(word, tail)]
        return tuple(dict.fromkeys(found))


NO_WORDS = BadWords()


def word_tokens(words: Iterable[str], tokenize: Callable[[str], list[int]], num_logits: int) -> list[Word]:
    """The tokens of words as they begin a text, and as they stand behind a space where that is another first token.

    As vLLM's SamplingParams.update_from_tokenizer.

    Raises:
        InvalidInput: a word without tokens, or with one that the model cannot draw.
    """
    found: list[Word] = []
    for word in words:
        plain, spaced = (tuple(tokenize(prefix + word.lstrip())) for prefix in ("", " "))
        if not plain or not max(plain) < num_logits:
            raise InvalidInput(f"bad_words: {word!r}, whose tokens {list(plain)} the model cannot draw: leave it out")
        found.append(plain)
        if len(spaced) == len(plain) and spaced[0] != plain[0] and max(spaced) < num_logits:
            found.append(spaced)
    return found


def _begun(word: Word, tail: Sequence[int]) -> bool:
    """Whether all of a word but its last token stands at the end of ``tail``."""
    return tuple(tail[len(tail) - len(word) + 1 :]) == word[:-1]
