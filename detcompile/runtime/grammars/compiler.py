"""GrammarCompiler: compile grammars to matchers over the tokens of one tokenizer, with llguidance."""

import importlib
import importlib.metadata
import json
import threading
from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any

from tokenizers import Tokenizer

from detcompile.errors import InvalidInput
from detcompile.runtime.grammars.grammar import Grammar
from detcompile.runtime.grammars.json_schemas import (
    ESCAPES,
    prepared_lark,
    prepared_schema,
    require_continuations,
    schemas_of_lark,
)
from detcompile.runtime.grammars.matcher import NO_CONTINUATION, Matcher, token_bits

OLDEST = (1, 9)  # release of llguidance; pyproject.toml has the same
COMPILE_SECONDS = 1.0
MOST_LEFT = 4  # abandoned threads that still compile; with this many, no new one is started
COMPILE_STACK = 256 << 20  # bytes: rules that refer to each other nest deeply
LIMITS = {"max_lexer_states": 50_000, "verbose_errors": False}  # LLParserLimits, besides its limits per step
ONE_OF = "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf"
REVISION = 2  # of how grammars are prepared for llguidance; increase it with each change that changes masks


class GrammarCompiler:
    """Makes matchers. Thread-safe.

    Args:
        tokenizer: a tokenizer of transformers; None for a model that takes only token ids.
        num_logits: number of ids that the model can draw.
        eos_token_ids: the model's end-of-sequence tokens.
        seconds: time limit for compiling a grammar.
    """

    def __init__(
        self, tokenizer: Any | None, num_logits: int, eos_token_ids: Sequence[int], *, seconds: float = COMPILE_SECONDS
    ) -> None:
        self._seconds = seconds
        self._given = tokenizer
        self._num_logits = num_logits
        self.eos_token_ids = tuple(eos_token_ids)
        self._num_words = -(-num_logits // 32)
        self._making = threading.Lock()

    def matcher(self, grammar: Grammar, stop_token_ids: Sequence[int]) -> Matcher:
        """Return a matcher before the first token.

        Args:
            stop_token_ids: tokens that end the sequence wherever the text may end.

        Raises:
            InvalidInput: llguidance is missing, the tokenizer is unsupported, or the grammar is invalid or too large.
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
        known = list(self.eos_token_ids) or None  # None: llguidance guesses them, and they are never drawn
        return _llguidance().LLTokenizer(alone.to_str(), n_vocab=size, eos_token=known)


def masks_version() -> str | None:
    """Return what identifies the masks: llguidance's version and our revision; None without the library."""
    try:
        return f"{importlib.metadata.version('llguidance')}+r{REVISION}"
    except importlib.metadata.PackageNotFoundError:
        return None


def definition_of(grammar: Grammar) -> str:
    """Return a grammar in llguidance's format.

    Raises:
        InvalidInput: the source is invalid.
    """
    llguidance = _llguidance()
    try:
        if grammar.kind == "json_schema":
            return str(llguidance.LLMatcher.grammar_from_json_schema(json.dumps(prepared_schema(grammar.source))))
        if grammar.kind == "json_object":
            return definition_of(Grammar.json_schema({"type": "object"}))
        if grammar.kind == "choice":
            texts = sorted(set(json.loads(grammar.source)))
            return str(llguidance.grammar_from("lark", "start: " + " | ".join(map(json.dumps, texts))))
        if grammar.kind == "lark":
            return str(llguidance.grammar_from("grammar", prepared_lark(grammar.source)))
        return str(llguidance.grammar_from(grammar.kind, grammar.source))
    except InvalidInput as error:
        raise InvalidInput(_refusal(grammar, str(error))) from error
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"grammar: this {grammar.kind} cannot be read: {str(error)[:300]}") from error


def compiled_within(grammar: Grammar, tokenizer: Any, seconds: float) -> Any:
    """Compile a grammar to llguidance's matcher.

    Args:
        tokenizer: llguidance's tokenizer.
        seconds: time limit.

    Raises:
        InvalidInput: the grammar is invalid, too large or too slow to compile; or too many earlier grammars that were
            too slow still compile.
    """
    results: list[Any] = []

    def make() -> None:
        try:
            made = _matcher(tokenizer, definition_of(grammar))
            if made.is_error():
                raise InvalidInput(_refusal(grammar, _reason(grammar, tokenizer) or made.get_error()))
            _require_continuations(grammar, tokenizer)
            results.append(made)
        except InvalidInput as error:
            results.append(error)

    with _starting:
        _left[:] = [thread for thread in _left if thread.is_alive()]
        if len(_left) >= MOST_LEFT:
            running = f"{MOST_LEFT} grammars that took over {seconds:g} s still compile in this process"
            raise InvalidInput(f"grammar: {running}: wait until they have ended, or restart the process")
        before = threading.stack_size(COMPILE_STACK)
        try:
            thread = threading.Thread(target=make, daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join(seconds)
    if not results:
        _left.append(thread)
        raise InvalidInput(f"grammar: this {grammar.kind} takes over {seconds:g} s to compile: give a smaller one")
    if isinstance(results[0], InvalidInput):
        raise results[0]
    return results[0]


_starting = threading.Lock()  # held while a thread with another stack size is started
_left: list[threading.Thread] = []  # abandoned threads; each takes a core and memory until it ends


def _matcher(tokenizer: Any, definition: str) -> Any:
    limits = _llguidance().LLParserLimits(**LIMITS)
    return _llguidance().LLMatcher(tokenizer, definition, log_level=0, limits=limits)


def _reason(grammar: Grammar, tokenizer: Any) -> str | None:
    """Return why a schema in a Lark grammar cannot be served, with its title; None if no schema is at fault."""
    for schema in schemas_of_lark(prepared_lark(grammar.source)) if grammar.kind == "lark" else ():
        error = _matcher(tokenizer, _llguidance().LLMatcher.grammar_from_json_schema(json.dumps(schema))).get_error()
        if error:
            return f"the schema {str(schema.get('title'))!r}: {error}"
    return None


def _require_continuations(grammar: Grammar, tokenizer: Any) -> None:
    def alive(schema: dict[str, Any], before: str) -> bool:
        options = {"whitespace_flexible": False, **ESCAPES}
        probe = _matcher(tokenizer, _llguidance().LLMatcher.grammar_from_json_schema(json.dumps(schema), options))
        if not probe.is_error() and probe.consume_tokens(tokenizer.tokenize_str(before)):
            probe.compute_bitmask()
            return not probe.get_error().startswith(NO_CONTINUATION)
        return True  # rejected elsewhere for that, or never reached

    schemas = schemas_of_lark(grammar.source) if grammar.kind == "lark" else []
    if grammar.kind == "json_schema" and isinstance(schema := json.loads(grammar.source), dict):
        schemas = [schema]
    try:
        for schema in schemas:
            require_continuations(schema, alive)
    except InvalidInput as error:
        raise InvalidInput(_refusal(grammar, str(error))) from error


def _refusal(grammar: Grammar, error: str) -> str:
    error = error.replace(ONE_OF, "oneOf of schemas that may match one text together is not kept: use anyOf")
    return f"grammar: this {grammar.kind} cannot be served: {' '.join(error.split())[:300]}"


@cache
def _llguidance() -> Any:
    install = "pip install '.[serve]' in a checkout of detcompile"
    try:
        library = importlib.import_module("llguidance")
    except ImportError as error:
        raise InvalidInput(f"grammars need llguidance: {install}") from error
    version = importlib.metadata.version("llguidance")
    if tuple(map(int, version.split(".")[:2])) < OLDEST:
        raise InvalidInput(f"grammars need llguidance {OLDEST[0]}.{OLDEST[1]} or later, not {version}: {install}")
    return library
