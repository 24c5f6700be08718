r"""Prepare JSON schemas for llguidance: set fixed options, and reject keywords that llguidance would not enforce.

llguidance compares names and strings by their spelling, while a parser compares their meaning. Therefore ``\u`` escapes
are disabled: ``{"\u0061": 1}`` would be an additional property to the masks but the property ``a`` to every parser.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from detcompile.errors import InvalidInput

WHITESPACE = r"(\x20|\x0A\x20{0,20})?"  # optional whitespace as usually written, and bounded
ESCAPES = {"json_allowed_escapes": 'nrbtf\\"'}  # characters that may follow a backslash
LAYOUT = {"item_separator", "key_separator", "whitespace_flexible", "whitespace_pattern"}  # options of %json in Lark
UNCHECKED_FORMATS = {"binary", "directory-path", "file-path", "password", "path"}  # any string has these formats
MAPS = ("properties", "patternProperties", "$defs", "definitions")  # keywords that map names to schemas
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
SINGLES = ("items", "additionalItems", "additionalProperties")
SCALARS = (
    "type", "enum", "const", "pattern", "minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum",
    "exclusiveMaximum", "multipleOf",
)  # fmt: skip
NEEDS_ESCAPES = re.compile(r"[\x00-\x1f\x7f]|\\[xucv0pP]")  # a pattern that may match only text that needs escapes
UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")  # llguidance can write these only with \u
PATTERN_PARTS = re.compile(  # parts of a pattern: a class, a character by number or name, an escape, a character
    r"(?P<set>\[\^?\]?(?:\\.|[^\]\\])*\])|\\(?:[xuU]\{(?P<braced>[0-9a-fA-F]+)\}|x(?P<byte>[0-9a-fA-F]{2})"
    r"|u(?P<short>[0-9a-fA-F]{4})|U(?P<long>[0-9a-fA-F]{8})|(?P<name>[av]))|\\.|.",
    re.S,
)
NOTHING = r"[a&&b]"  # an empty class
LARK = re.compile(  # tokens that may contain "%json" without being one, then %json itself
    r'"(?:\\.|[^"\\\n])*"|(?:#|//)[^\n]*|/(?:\\.|[^/\\])+/|<[^<>\s]+>|(?P<json>%json)\s*'
)
Schema = dict[str, Any]
Alive = Callable[[Schema, str], bool]  # whether a text that begins like this can continue under a schema


def prepared_schema(source: str) -> Schema:
    """Return a schema with the fixed options.

    Raises:
        InvalidInput: the source is not JSON, or a keyword would not be enforced.
    """
    schema = json.loads(source)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise InvalidInput("a JSON schema must be an object or true")
    if "x-guidance" in schema:
        raise InvalidInput("x-guidance sets options of llguidance, which are fixed here: leave it out")
    _prepare(schema)
    return schema | {"x-guidance": {"whitespace_pattern": WHITESPACE, **ESCAPES}}


def prepared_lark(source: str) -> str:
    """Return a Lark grammar whose JSON schemas have the fixed options, except layout options.

    Raises:
        InvalidInput: a schema has a keyword or an option that would not be enforced.
    """
    parts, end = [], 0
    for start, stop, schema in _placed(source):
        options = schema.get("x-guidance", {})
        if not isinstance(options, dict) or not options.keys() <= LAYOUT:
            raise InvalidInput(f"x-guidance in a grammar may set only {', '.join(sorted(LAYOUT))}")
        _prepare(schema)
        parts += [source[end:start], _written(schema | {"x-guidance": options | ESCAPES})]
        end = stop
    return "".join([*parts, source[end:]])


def schemas_of_lark(source: str) -> list[Schema]:
    """Return the JSON schemas of a Lark grammar."""
    return [schema for _, _, schema in _placed(source)]


def require_continuations(schema: Schema, alive: Alive) -> None:
    """Reject a schema under which a text may begin that cannot be completed.

    llguidance does not detect such dead ends. They come from references that lead only to themselves, strings that need
    an escape, numbers that do not exist, and name patterns that match only names of properties.

    Raises:
        InvalidInput: names the keyword at fault.
    """
    every = list(_subschemas(schema))
    _require_ends_of_references(schema, every)
    closed = any(part.get("additionalProperties") is False for part in every)
    for part in every:
        for scalar in _suspects(part):
            if not alive(scalar, ""):
                reason = "has no number" if "multipleOf" in scalar else "matches no text that is written without \\u"
                raise _refusal(schema, f"{_shown(scalar)} {reason}")
        if closed and isinstance(part.get("patternProperties"), dict):
            _require_other_names(schema, part, alive)


def _prepare(schema: Schema) -> None:
    """Remove keywords without effect, and reject those that would not be enforced."""
    for part in _subschemas(schema):
        if part.get("uniqueItems") is False:
            del part["uniqueItems"]
        if part.get("format") in UNCHECKED_FORMATS:
            del part["format"]
        _leave_out_unwritable(schema, part)
        fewest, required = part.get("minProperties"), part.get("required")
        num_required = len(set(map(str, required))) if isinstance(required, list) else 0
        if isinstance(fewest, int) and fewest - num_required > 1:
            reason = "a name may occur twice in an object, so at most one more than the required ones can be counted"
            raise _refusal(schema, f"minProperties {fewest} is not kept: {reason}")


def _leave_out_unwritable(schema: Schema, part: Schema) -> None:
    r"""Remove what a text without \u cannot contain: llguidance would accept it without these letters."""
    values = part.get("enum")
    if isinstance(values, list):
        part["enum"] = [value for value in values if not _is_unwritable(value)]
    if _is_unwritable(part.get("const")) or (values and not part["enum"]):
        raise _refusal(schema, f"{_shown(part)} matches no text that is written without \\u")
    if isinstance(part.get("pattern"), str):
        part["pattern"] = _writable_pattern(part["pattern"])
    if isinstance(part.get("patternProperties"), dict):
        part["patternProperties"] = {_writable_pattern(name): each for name, each in part["patternProperties"].items()}


def _is_unwritable(value: Any) -> bool:
    r"""Return whether a value has a letter that has to be escaped with \u."""
    if isinstance(value, dict):
        return any(_is_unwritable(part) for part in (*value, *value.values()))
    if isinstance(value, list):
        return any(map(_is_unwritable, value))
    return isinstance(value, str) and UNWRITABLE.search(value) is not None


def _writable_pattern(pattern: str) -> str:
    """Return a pattern in which single letters that cannot be written match nothing; classes lose them anyway."""

    def replace(match: re.Match[str]) -> str:
        inner = match["set"] and PATTERN_PARTS.fullmatch(match["set"][1:-1])  # a class of one letter is that letter
        letter = inner or match
        code = letter["braced"] or letter["byte"] or letter["short"] or letter["long"]
        text = {"a": "\a", "v": "\v"}.get(letter["name"], letter[0])
        if code is not None:
            text = chr(min(int(code, 16), sys.maxunicode))
        return NOTHING if UNWRITABLE.fullmatch(text) else match[0]

    return PATTERN_PARTS.sub(replace, pattern)


def _subschemas(schema: Schema) -> Iterator[Schema]:
    """Yield a schema and all schemas in it, including those that references name. Each is yielded once."""
    waiting: list[Any] = [schema]
    seen: set[int] = set()
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        waiting += [_target(schema, part)] + [part.get(name) for name in SINGLES]
        waiting += [inner for name in MAPS if isinstance(part.get(name), dict) for inner in part[name].values()]
        waiting += [inner for name in (*LISTS, "items") if isinstance(part.get(name), list) for inner in part[name]]


def _target(schema: Schema, part: Schema) -> Any:
    """Return what a reference within the schema names; None for other references."""
    reference = part.get("$ref")
    if not isinstance(reference, str) or not re.match(r"#(/|$)", reference):
        return None
    target: Any = schema
    for step in reference.split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and step.isdecimal() and int(step) < len(target):
            target = target[int(step)]
        elif isinstance(target, dict):
            target = target.get(step)
        else:
            return None
    return target


def _require_ends_of_references(schema: Schema, every: list[Schema]) -> None:
    """Reject references that lead to themselves without consuming text."""
    ends: set[int] = set()  # ids of schemas that can match something, or are rejected elsewhere

    def ended(part: Any) -> bool:
        return not isinstance(part, dict) or id(part) in ends

    grows = True
    while grows:
        before = len(ends)
        for entry in reversed(every):
            one_of, all_of = entry.get("anyOf") or [None], entry.get("allOf") or [None]
            if ended(_target(schema, entry)) and any(map(ended, one_of)) and all(map(ended, all_of)):
                ends.add(id(entry))
        grows = len(ends) > before
    for entry in every:
        if id(entry) not in ends:
            raise _refusal(schema, f"{_shown(entry)} leads only to itself, so no text matches it")


def _suspects(schema: Schema) -> Iterator[Schema]:
    """Yield scalar schemas of a schema, without nested schemas, that may match nothing."""
    bounded = schema.keys() & {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
    pattern, values = schema.get("pattern"), schema["enum"] if isinstance(schema.get("enum"), list) else []
    values = [*values, schema["const"]] if "const" in schema else values
    texts = [text for text in (pattern, *values) if isinstance(text, str)]
    if ("multipleOf" in schema and bounded) or any(map(NEEDS_ESCAPES.search, texts)):
        yield {name: schema[name] for name in SCALARS if name in schema}
    inner = [value for value in values if isinstance(value, (dict, list))]
    while inner:
        value = inner.pop()
        inner += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        if isinstance(value, str) and NEEDS_ESCAPES.search(value):
            yield {"const": value}


def _require_other_names(schema: Schema, part: Schema, alive: Alive) -> None:
    """Reject name patterns that match only names of properties, if a comma may follow these properties."""
    names = dict.fromkeys([*(part.get("properties") or ()), *(part.get("required") or ())])
    patterns = {name: value is not False and {"const": 0} for name, value in part["patternProperties"].items()}
    if not names or not any(patterns.values()):
        return
    probe = {
        "type": "object",
        "properties": {name: {"const": 0} for name in names},
        "required": list(names),
        "patternProperties": patterns,
        "additionalProperties": False,
    }
    before = "{" + "".join(f"{json.dumps(name, ensure_ascii=False)}:0," for name in names)
    if not alive(probe, before):
        raise _refusal(
            schema, f"patternProperties {_shown(list(patterns))} match only names of properties: constrain those"
        )


def _placed(source: str) -> Iterator[tuple[int, int, Schema]]:
    """Yield the schemas of a Lark grammar with their start and end; invalid JSON is left to llguidance."""
    at = 0
    while match := LARK.search(source, at):
        at = match.end()
        if match["json"]:
            try:
                schema, stop = json.JSONDecoder().raw_decode(source, at)
            except ValueError:
                continue
            if isinstance(schema, dict):
                yield at, stop, schema
                at = stop


def _refusal(schema: Mapping[str, Any], reason: str) -> InvalidInput:
    title = schema.get("title")
    return InvalidInput(f"the schema {_shown(title)}: {reason}" if isinstance(title, str) else reason)


def _shown(value: Any) -> str:
    return _written(value)[:100]


def _written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
