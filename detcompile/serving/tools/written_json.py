"""JSON that a model wrote, as values that JSON can hold again: no half of a surrogate pair, and no deep nesting."""

import json
from typing import Any

__all__ = ["read_json"]

MOST_DEPTH = 200  # of values in values; whoever writes them again may stand deeper in Python's stack than who read them


def read_json(text: str) -> Any:
    """The value that a text is. Halves of surrogate pairs in it, which UTF-8 has none of, are replaced.

    Raises:
        ValueError: it is no JSON, or is nested too deeply.
    """
    try:
        return _mended(json.loads(text), MOST_DEPTH)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _mended(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if not isinstance(value, (dict, list)):
        return value
    if depth == 0:
        raise ValueError(f"it is nested deeper than {MOST_DEPTH} values")
    if isinstance(value, list):
        return [_mended(own, depth - 1) for own in value]
    return {_mended(name, 0): _mended(own, depth - 1) for name, own in value.items()}
