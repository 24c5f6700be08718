"""GrammarCompiler: grammars as matchers over the tokens of one tokenizer, by llguidance."""

import importlib
import importlib.metadata
import json
import threading
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

from detcompile.errors import InvalidInput
from detcompile.runtime.grammars.grammar import Grammar
from detcompile.runtime.grammars.matcher import Matcher, token_bits

__all__ = ["COMPILE_SECONDS", "GrammarCompiler", "compiled_within", "definition_of", "llguidance_version"]

COMPILE_SECONDS = 1.0
MOST_LEFT = 4  # threads that compile what nobody waits for any more; beside so many, no new one is started
COMPILE_STACK = 256 << 20  # bytes: rules that name each other nest as deep as there is source for
LIMITS = {"max_lexer_states": 50_000, "verbose_errors": False}  # of LLParserLimits, beside its own bounds of each step
WHITESPACE = r"(\x20|\x0A\x20{0,20})?"  # where JSON may have some: as it is written, and nothing to get lost in


class GrammarCompiler:
    """Makes matchers. Any thread may.

    Args:
        tokenizer: a tokenizer of transformers; None for a model that takes token ids only.
        num_logits: ids that the model can draw.
        eos_token_ids: tokens that end a request by themselves.
        seconds: longest that a grammar may take to compile.
    """

    def __init__(
        self, tokenizer: Any | None, num_logits: int, eos_token_ids: Sequence[int], *, seconds: float = COMPILE_SECONDS
    ) -> None:
        self._seconds = seconds
        self._given = tokenizer
        self._num_logits = num_logits
        self._eos_token_ids = tuple(eos_token_ids)
        self._num_words = -(-num_logits // 32)
        self._making = threading.Lock()

    def matcher(self, grammar: Grammar, stop_token_ids: Sequence[int]) -> Matcher:
        """A matcher before the first token.

        Args:
            stop_token_ids: tokens that end the sequence, wherever the text may end.

        Raises:
            InvalidInput: no llguidance or no tokenizer that it reads, or a grammar that is none or too large.
        """
        made = compiled_within(grammar, self._tokenizer_once(), self._seconds)
        ends = token_bits([token for token in stop_token_ids if token < self._num_logits], self._num_words)
        beyond = range(self._num_logits, 32 * self._num_words)
        return Matcher(made, ends, token_bits([*self._tokenizer.eos_tokens, *beyond], self._num_words))

    def _tokenizer_once(self) -> Any:
        with self._making:
            return self._tokenizer

    @cached_property
    def _tokenizer(self) -> Any:
        backend = getattr(self._given, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise InvalidInput("a grammar needs the text of tokens: give a tokenizer of the tokenizers library")
        alone = Tokenizer.from_str(backend.to_str())
        alone.no_truncation()
        alone.no_padding()
        size = max(alone.get_vocab_size(), 1 + max(alone.get_vocab().values()), self._num_logits)
        known = list(self._eos_token_ids) or None  # None: those that look like one, and are never drawn then
        return _llguidance().LLTokenizer(alone.to_str(), n_vocab=size, eos_token=known)


def llguidance_version() -> str | None:
    """The version of the library that makes the masks; None without it."""
    try:
        return importlib.metadata.version("llguidance")
    except importlib.metadata.PackageNotFoundError:
        return None


def definition_of(grammar: Grammar) -> str:
    """A grammar in llguidance's own form.

    Raises:
        InvalidInput: a source that is none.
    """
    llguidance = _llguidance()
    try:
        if grammar.kind == "json_schema":
            options = {"whitespace_pattern": WHITESPACE}
            return str(llguidance.LLMatcher.grammar_from_json_schema(grammar.source, defaults=options))
        if grammar.kind == "json_object":
            return definition_of(Grammar.json_schema({"type": "object"}))
        if grammar.kind == "choice":
            texts = sorted(set(json.loads(grammar.source)))
            return str(llguidance.grammar_from("lark", "start: " + " | ".join(map(json.dumps, texts))))
        return str(llguidance.grammar_from("grammar" if grammar.kind == "lark" else grammar.kind, grammar.source))
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"grammar: this {grammar.kind} cannot be read: {str(error)[:300]}") from error


def compiled_within(grammar: Grammar, tokenizer: Any, seconds: float) -> Any:
    """llguidance's matcher of a grammar.

    Args:
        tokenizer: llguidance's.
        seconds: longest that it may take.

    Raises:
        InvalidInput: a grammar that is none, too large, or takes longer; any, where too many compile on behind those
            who have been told so.
    """
    found: list[Any] = []

    def make() -> None:
        try:
            limits = _llguidance().LLParserLimits(**LIMITS)
            made = _llguidance().LLMatcher(tokenizer, definition_of(grammar), log_level=0, limits=limits)
            found.append(InvalidInput(_refusal(grammar, made.get_error())) if made.is_error() else made)
        except InvalidInput as error:
            found.append(error)

    with _starting:
        _left[:] = [thread for thread in _left if thread.is_alive()]
        if len(_left) >= MOST_LEFT:
            said = f"{MOST_LEFT} grammars that took over {seconds:g} s still compile in this process"
            raise InvalidInput(f"grammar: {said}: wait until they have ended, or start it anew")
        before = threading.stack_size(COMPILE_STACK)
        try:
            thread = threading.Thread(target=make, daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join(seconds)
    if not found:
        _left.append(thread)
        raise InvalidInput(f"grammar: this {grammar.kind} takes over {seconds:g} s to compile: give a smaller one")
    if isinstance(found[0], InvalidInput):
        raise found[0]
    return found[0]


_starting = threading.Lock()  # of a thread with a stack of another size
_left: list[threading.Thread] = []  # that nobody waits for any more; each takes a core, and memory as it goes


def _refusal(grammar: Grammar, error: str) -> str:
    return f"grammar: this {grammar.kind} cannot be served: {' '.join(error.split())[:300]}"


def _llguidance() -> Any:
    try:
        return importlib.import_module("llguidance")
    except ImportError as error:
        raise InvalidInput('grammars need llguidance: pip install "detcompile[serve]"') from error
