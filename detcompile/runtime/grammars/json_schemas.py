r"""JSON schemas as llguidance gets them: with fixed options, and without what it takes and would not keep.

llguidance reads a name or string of JSON by its spelling, and a parser by what the spelling means. So ``\u`` is no
escape here: ``{"\u0061": 1}`` would be a further property to the masks and the property ``a`` to everybody else.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from detcompile.errors import InvalidInput

__all__ = ["ESCAPES", "prepared_lark", "prepared_schema", "require_continuations", "schemas_of_lark"]

WHITESPACE = r"(\x20|\x0A\x20{0,20})?"  # where JSON may have some: as it is written, and nothing to get lost in
ESCAPES = {"json_allowed_escapes": 'nrbtf\\"'}  # letters that may follow a backslash
LAYOUT = {"item_separator", "key_separator", "whitespace_flexible", "whitespace_pattern"}  # options of a %json in Lark
UNCHECKED_FORMATS = {"binary", "directory-path", "file-path", "password", "path"}  # which every string has
MAPS = ("properties", "patternProperties", "$defs", "definitions")  # keywords with schemas by names
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
SINGLES = ("items", "additionalItems", "additionalProperties")
SCALARS = (
    "type", "enum", "const", "pattern", "minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum",
    "exclusiveMaximum", "multipleOf",
)  # fmt: skip
NEEDS_ESCAPES = re.compile(r"[\x00-\x1f\x7f]|\\[xucv0pP]")  # of a pattern that may match nothing that can be written
UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")  # llguidance writes these with \u alone
PATTERN_PARTS = re.compile(  # of a regular expression: a class, a letter by its number or name, an escape, a letter
    r"(?P<set>\[\^?\]?(?:\\.|[^\]\\])*\])|\\(?:[xuU]\{(?P<braced>[0-9a-fA-F]+)\}|x(?P<byte>[0-9a-fA-F]{2})"
    r"|u(?P<short>[0-9a-fA-F]{4})|U(?P<long>[0-9a-fA-F]{8})|(?P<name>[av]))|\\.|.",
    re.S,
)
NOTHING = r"[a&&b]"  # a class without letters
LARK = re.compile(  # what a %json of a Lark grammar may be confused with, and then the %json itself
    r'"(?:\\.|[^"\\\n])*"|(?:#|//)[^\n]*|/(?:\\.|[^/\\])+/|<[^<>\s]+>|(?P<json>%json)\s*'
)
Schema = dict[str, Any]
Alive = Callable[[Schema, str], bool]  # whether anything may follow a text that begins as a schema says


def prepared_schema(source: str) -> Schema:
    """Return a schema with the options that all schemas have.

    Raises:
        InvalidInput: it is no JSON, or has a keyword that would not be kept.
    """
    schema = json.loads(source)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise InvalidInput("a JSON schema that matches something is an object or true")
    if "x-guidance" in schema:
        raise InvalidInput("x-guidance sets options of llguidance, which are fixed here: leave it out")
    _prepare(schema)
    return schema | {"x-guidance": {"whitespace_pattern": WHITESPACE, **ESCAPES}}


def prepared_lark(source: str) -> str:
    """Return a Lark grammar whose JSON schemas have fixed options, but for their layout.

    Raises:
        InvalidInput: a schema in it has a keyword or an option that would not be kept.
    """
    parts, end = [], 0
    for start, stop, schema in _placed(source):
        own = schema.get("x-guidance", {})
        if not isinstance(own, dict) or not own.keys() <= LAYOUT:
            raise InvalidInput(f"x-guidance in a grammar may set {', '.join(sorted(LAYOUT))}, and nothing else")
        _prepare(schema)
        parts += [source[end:start], _written(schema | {"x-guidance": own | ESCAPES})]
        end = stop
    return "".join([*parts, source[end:]])


def schemas_of_lark(source: str) -> list[Schema]:
    """Return the JSON schemas of a Lark grammar."""
    return [schema for _, _, schema in _placed(source)]


def require_continuations(schema: Schema, alive: Alive) -> None:
    """Refuse a schema that lets a text begin which nothing can go on with.

    llguidance does not look for such ends. They come of references that only lead to themselves, of strings that need
    an escape and numbers that are not there, and of patterns whose only names are those of properties.

    Raises:
        InvalidInput: the keyword that makes it so.
    """
    every = list(_subschemas(schema))
    _require_ends_of_references(schema, every)
    closed = any(own.get("additionalProperties") is False for own in every)
    for own in every:
        for scalar in _suspects(own):
            if not alive(scalar, ""):
                said = "has no number" if "multipleOf" in scalar else "matches no text that is written without \\u"
                raise _refusal(schema, f"{_shown(scalar)} {said}")
        if closed and isinstance(own.get("patternProperties"), dict):
            _require_other_names(schema, own, alive)


def _prepare(schema: Schema) -> None:
    """Take out what asks for nothing, and refuse what would not be kept."""
    for own in _subschemas(schema):
        if own.get("uniqueItems") is False:
            del own["uniqueItems"]
        if own.get("format") in UNCHECKED_FORMATS:
            del own["format"]
        _leave_out_unwritable(schema, own)
        fewest, required = own.get("minProperties"), own.get("required")
        num_required = len(set(map(str, required))) if isinstance(required, list) else 0
        if isinstance(fewest, int) and fewest - num_required > 1:
            said = "an object may have one name twice, so only one more than are required can be counted"
            raise _refusal(schema, f"minProperties {fewest} is not kept: {said}")


def _leave_out_unwritable(schema: Schema, own: Schema) -> None:
    """Take out of a schema what a text without \\u cannot have: llguidance would take it without these letters."""
    values = own.get("enum")
    if isinstance(values, list):
        own["enum"] = [value for value in values if not _is_unwritable(value)]
    if _is_unwritable(own.get("const")) or (values and not own["enum"]):
        raise _refusal(schema, f"{_shown(own)} matches no text that is written without \\u")
    if isinstance(own.get("pattern"), str):
        own["pattern"] = _writable_pattern(own["pattern"])
    if isinstance(own.get("patternProperties"), dict):
        own["patternProperties"] = {_writable_pattern(name): part for name, part in own["patternProperties"].items()}


def _is_unwritable(value: Any) -> bool:
    """Whether a value has a letter that has to be escaped with \\u."""
    if isinstance(value, dict):
        return any(_is_unwritable(part) for part in (*value, *value.values()))
    if isinstance(value, list):
        return any(map(_is_unwritable, value))
    return isinstance(value, str) and UNWRITABLE.search(value) is not None


def _writable_pattern(pattern: str) -> str:
    """Return a pattern in which single letters that cannot be written match nothing; classes lose them anyway."""

    def part(found: re.Match[str]) -> str:
        inner = found["set"] and PATTERN_PARTS.fullmatch(found["set"][1:-1])  # a class of one letter is that letter
        letter = inner or found
        code = letter["braced"] or letter["byte"] or letter["short"] or letter["long"]
        text = {"a": "\a", "v": "\v"}.get(letter["name"], letter[0])
        if code is not None:
            text = chr(min(int(code, 16), sys.maxunicode))
        return NOTHING if UNWRITABLE.fullmatch(text) else found[0]

    return PATTERN_PARTS.sub(part, pattern)


def _subschemas(schema: Schema) -> Iterator[Schema]:
    """A schema and those in it, wherever JSON Schema has any or a reference names one. Each comes once."""
    waiting: list[Any] = [schema]
    seen: set[int] = set()
    while waiting:
        own = waiting.pop()
        if not isinstance(own, dict) or id(own) in seen:
            continue
        seen.add(id(own))
        yield own
        waiting += [_target(schema, own)] + [own.get(name) for name in SINGLES]
        waiting += [part for name in MAPS if isinstance(own.get(name), dict) for part in own[name].values()]
        waiting += [part for name in (*LISTS, "items") if isinstance(own.get(name), list) for part in own[name]]


def _target(schema: Schema, own: Schema) -> Any:
    """What a reference within the schema names; None for another one."""
    reference = own.get("$ref")
    if not isinstance(reference, str) or not re.match(r"#(/|$)", reference):
        return None
    found: Any = schema
    for part in reference.split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and part.isdecimal() and int(part) < len(found):
            found = found[int(part)]
        elif isinstance(found, dict):
            found = found.get(part)
        else:
            return None
    return found


def _require_ends_of_references(schema: Schema, every: list[Schema]) -> None:
    """Refuse references that lead to themselves without a letter between."""
    ends: set[int] = set()  # ids of schemas that are known to match something, or to be refused elsewhere

    def ended(part: Any) -> bool:
        return not isinstance(part, dict) or id(part) in ends

    grows = True
    while grows:
        before = len(ends)
        for own in reversed(every):
            one_of, all_of = own.get("anyOf") or [None], own.get("allOf") or [None]
            if ended(_target(schema, own)) and any(map(ended, one_of)) and all(map(ended, all_of)):
                ends.add(id(own))
        grows = len(ends) > before
    for own in every:
        if id(own) not in ends:
            raise _refusal(schema, f"{_shown(own)} leads to itself alone, so that no text matches it")


def _suspects(own: Schema) -> Iterator[Schema]:
    """Schemas of scalars in a schema, without those in others in it, that may match nothing."""
    bounded = own.keys() & {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
    pattern, values = own.get("pattern"), own["enum"] if isinstance(own.get("enum"), list) else []
    values = [*values, own["const"]] if "const" in own else values
    texts = [text for text in (pattern, *values) if isinstance(text, str)]
    if ("multipleOf" in own and bounded) or any(map(NEEDS_ESCAPES.search, texts)):
        yield {name: own[name] for name in SCALARS if name in own}
    inner = [value for value in values if isinstance(value, (dict, list))]
    while inner:
        value = inner.pop()
        inner += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        if isinstance(value, str) and NEEDS_ESCAPES.search(value):
            yield {"const": value}


def _require_other_names(schema: Schema, own: Schema, alive: Alive) -> None:
    """Refuse patterns of names that match none but those of properties, where a comma may follow these."""
    names = dict.fromkeys([*(own.get("properties") or ()), *(own.get("required") or ())])
    patterns = {pattern: part is not False and {"const": 0} for pattern, part in own["patternProperties"].items()}
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
            schema, f"patternProperties {_shown(list(patterns))} match names of properties alone: ask it of these"
        )


def _placed(source: str) -> Iterator[tuple[int, int, Schema]]:
    """Where the schemas of a Lark grammar begin and end. What is no JSON is left to who reads the grammar."""
    at = 0
    while found := LARK.search(source, at):
        at = found.end()
        if found["json"]:
            try:
                schema, stop = json.JSONDecoder().raw_decode(source, at)
            except ValueError:
                continue
            if isinstance(schema, dict):
                yield at, stop, schema
                at = stop


def _refusal(schema: Mapping[str, Any], said: str) -> InvalidInput:
    title = schema.get("title")
    return InvalidInput(f"the schema {_shown(title)}: {said}" if isinstance(title, str) else said)


def _shown(value: Any) -> str:
    return _written(value)[:100]


def _written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
