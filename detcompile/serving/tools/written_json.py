"""JSON written by a model, as values that can be encoded again: no lone surrogates, no deep nesting."""

import json
from typing import Any

__all__ = ["read_json"]

MOST_DEPTH = 200  # nesting that can be encoded again even from deep in Python's stack


def read_json(text: str) -> Any:
    """Decode a text; lone surrogates, which UTF-8 cannot represent, are replaced.

    Raises:
        ValueError: invalid JSON, or too deep nesting.
    """
    try:
        return _repaired(json.loads(text), MOST_DEPTH)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _repaired(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if not isinstance(value, (dict, list)):
        return value
    if depth == 0:
        raise ValueError(f"it is nested deeper than {MOST_DEPTH} values")
    if isinstance(value, list):
        return [_repaired(item, depth - 1) for item in value]
    return {_repaired(name, 0): _repaired(item, depth - 1) for name, item in value.items()}
