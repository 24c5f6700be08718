"""Shared parts of the grammar tests: a tokenizer for the tiny models, grammars, and an independent matcher."""

import functools
import json
import re

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from detcompile.runtime.grammars.compiler import GrammarCompiler
from detcompile.runtime.grammars.grammar import Grammar
from detcompile.runtime.grammars.matcher import Matcher
from tests.model_cases import VOCAB_SIZE

__all__ = ["EOS", "GRAMMARS", "allowed", "matcher_of", "matches", "small_tokenizer"]

EOS = 0
WORDS = ("true", "false", "null", "yes", "no", '":', '",', '{"', '"}', "10", "00", "12", "ab", "abc", "ba", "[]", "on")
SCHEMA = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "kind": {"enum": ["yes", "no", "on"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "more": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["ok", "kind", "size"],
    "additionalProperties": False,
}
GRAMMARS = (
    Grammar.json_schema(SCHEMA),
    Grammar.regex("(ab|ba){2,4}c?"),
    Grammar.regex("[a-c]*"),
    Grammar.choice(["yes", "no", "none at all", 'say "ü"']),
    Grammar.lark('start: "(" start? ")" | /[0-9]{1,3}/'),
    Grammar.json_object(),
)


@functools.cache
def small_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE with the tiny models' number of tokens: an end token, ASCII, and pieces of words."""
    letters = [chr(code) for code in range(ord("!"), ord("~") + 1)] + ["Ġ", "Ċ", "Ã", "¼"]
    vocabulary = {"<end>": EOS} | {letter: 1 + place for place, letter in enumerate(letters)}
    merges = []
    for word in WORDS:
        for stop in range(2, len(word) + 1):
            if word[:stop] not in vocabulary and len(vocabulary) < VOCAB_SIZE - 1:
                merges.append((word[: stop - 1], word[stop - 1]))
                vocabulary[word[:stop]] = len(vocabulary)
    backend = Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


def matcher_of(grammar: Grammar, ends: tuple[int, ...] = (EOS,)) -> Matcher:
    return GrammarCompiler(small_tokenizer(), VOCAB_SIZE, [EOS]).matcher(grammar, ends)


def allowed(matcher: Matcher, drafted: tuple[int, ...] = ()) -> list[int] | None:
    """Return the ids of tokens that may follow."""
    mask = matcher.mask(drafted)
    return None if mask is None else [token for token in range(VOCAB_SIZE) if int(mask[token // 32]) >> token % 32 & 1]


def matches(grammar: Grammar, text: str) -> bool:
    """Return whether a whole text matches, computed without llguidance."""
    if grammar.kind == "regex":
        return re.fullmatch(grammar.source, text) is not None
    if grammar.kind == "choice":
        return text in json.loads(grammar.source)
    if grammar.kind == "lark":
        return re.fullmatch(r"(\(*)([0-9]{1,3})?(\)*)", text) is not None and text.count("(") == text.count(")")
    value = json.loads(text)
    if grammar.kind == "json_object":
        return isinstance(value, dict)
    return (
        list(value) in (["ok", "kind", "size"], ["ok", "kind", "size", "more"])
        and isinstance(value["ok"], bool)
        and value["kind"] in ("yes", "no", "on")
        and type(value["size"]) is int
        and 0 <= value["size"] <= 999
        and all(item in ("a", "b") for item in value.get("more", []))
    )
