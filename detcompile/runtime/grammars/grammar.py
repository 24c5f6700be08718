"""Grammar: what the text of an answer must match, given by its source."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from detcompile.errors import InvalidInput

Kind = Literal["json_schema", "json_object", "regex", "lark", "choice"]
MAX_SOURCE = 64 << 10  # bytes
STRUCTURED = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "lark"}  # vLLM's names


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on the whole text of an answer.

    Args:
        kind: "json_schema"; "json_object", any JSON object; "regex", in Rust's syntax; "lark", a grammar in
            llguidance's dialect of Lark, or llama.cpp's GBNF; "choice", a JSON list of texts.
        source: the schema, regular expression, grammar or list; empty for "json_object". At most 64 KB.

    Raises:
        InvalidInput: the kind is unknown, or the source is invalid or too long.
    """

    kind: Kind
    source: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise InvalidInput(f"grammar: kind {str(self.kind)[:40]!r} must be one of {', '.join(get_args(Kind))}")
        if not isinstance(self.source, str) or bool(self.source) == (self.kind == "json_object"):
            raise InvalidInput(f"grammar: {self.kind} needs {'no' if self.kind == 'json_object' else 'a'} source")
        try:
            size = len(self.source.encode())
        except UnicodeEncodeError as error:
            raise InvalidInput("grammar: the source holds half of a surrogate pair, which is not valid text") from error
        if size > MAX_SOURCE:
            raise InvalidInput(f"grammar: the source has {size} bytes, of {MAX_SOURCE} at most")
        if self.kind == "choice":
            try:
                texts = json.loads(self.source)
            except ValueError as error:
                raise InvalidInput(f"grammar: choice needs a JSON list: {error}") from error
            if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
                raise InvalidInput("grammar: choice needs a list of texts, none of them empty")

    @property
    def digest(self) -> str:
        """sha256 of kind and source, in hex."""
        return hashlib.sha256(f"{self.kind}\0{self.source}".encode()).hexdigest()

    @staticmethod
    def json_schema(schema: Any) -> "Grammar":
        """Return a grammar of JSON that matches a schema: a dict, JSON text, or a pydantic model class."""
        if hasattr(schema, "model_json_schema"):
            schema = schema.model_json_schema()
        return Grammar("json_schema", schema if isinstance(schema, str) else _as_json(schema))

    @staticmethod
    def json_object() -> "Grammar":
        """Return a grammar of any JSON object."""
        return Grammar("json_object")

    @staticmethod
    def regex(pattern: str) -> "Grammar":
        """Return a grammar of text that a regular expression matches as a whole."""
        return Grammar("regex", pattern)

    @staticmethod
    def lark(source: str) -> "Grammar":
        """Return a grammar from a context-free grammar's source."""
        return Grammar("lark", source)

    @staticmethod
    def choice(texts: Sequence[str]) -> "Grammar":
        """Return a grammar of exactly these texts."""
        return Grammar("choice", _as_json(list(texts) if isinstance(texts, (tuple, set)) else texts))

    @staticmethod
    def of(given: Any) -> "Grammar":
        """Convert a Grammar, a mapping of its two fields, or vLLM's StructuredOutputsParams (object or mapping).

        Raises:
            InvalidInput: none of these, or not exactly one constraint.
        """
        if isinstance(given, Grammar):
            return given
        fields = given if isinstance(given, Mapping) else {name: getattr(given, name, None) for name in _NAMES}
        if fields.keys() == {"kind", "source"}:
            return Grammar(**fields)
        named = {name: value for name, value in fields.items() if value is not None and value is not False}
        if len(named) != 1 or not named.keys() <= set(_NAMES):
            names = ", ".join(sorted(map(str, named))) or "none"
            raise InvalidInput(f"grammar: give a Grammar, or one of {', '.join(_NAMES)}; not {names[:100]}")
        [(name, value)] = named.items()
        if name == "json_object":
            return Grammar.json_object()
        if name in ("regex", "grammar"):
            return Grammar(STRUCTURED[name], value)  # type: ignore[arg-type]
        return Grammar.json_schema(value) if name == "json" else Grammar.choice(value)


_NAMES = (*STRUCTURED, "json_object")


def _as_json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(f"grammar: the source is not JSON: {error}") from error
