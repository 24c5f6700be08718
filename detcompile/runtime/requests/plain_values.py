"""Convert callers' values to plain bool, int, float or str; reject other types by name.

Numbers of numpy and torch are accepted. True is not a number and 7.0 is not an integer: both are likely mistakes.
"""

import operator
import os
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from detcompile.errors import InvalidInput

MOST_SHOWN = 80  # characters of a value in an error message


def flag(value: Any, name: str) -> bool:
    """Return ``value`` as a bool.

    Raises:
        InvalidInput: ``value`` is neither True nor False.
    """
    if not _is_flag(value):
        raise InvalidInput(f"{name} {shown(value)} is {kind(value)}: give True or False")
    return bool(value)


def whole_number(value: Any, name: str) -> int:
    """Return ``value`` as an int.

    Raises:
        InvalidInput: ``value`` is not an integer of Python, numpy or torch; bools and floats are rejected.
    """
    if type(value) is int:
        return value
    if not _is_flag(value) and getattr(value, "ndim", 0) == 0:
        try:
            return int(operator.index(value))
        except TypeError:
            pass
    raise InvalidInput(f"{name} {shown(value)} is {kind(value)}: give an integer")


def number(value: Any, name: str) -> float:
    """Return ``value`` as a float; infinities are allowed.

    Raises:
        InvalidInput: ``value`` is not a real number, is NaN, or is an integer beyond a float's range.
    """
    if type(value) is float and value == value:
        return value
    real = not isinstance(value, (str, bytes, bytearray, complex)) and hasattr(type(value), "__float__")
    if real and not _is_flag(value) and getattr(value, "ndim", 0) == 0 and "complex" not in _dtype(value):
        try:
            result = float(value)
        except (TypeError, ValueError, OverflowError):
            pass
        else:
            if result == result:
                return result
            raise InvalidInput(f"{name} is NaN: give a number")
    raise InvalidInput(f"{name} {shown(value)} is {kind(value)}: give a number")


def or_none(read: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    """Return a reader that accepts None too."""
    return lambda value, name: None if value is None else read(value, name)


def string(value: Any, name: str) -> str:
    """Return ``value`` unchanged.

    Raises:
        InvalidInput: ``value`` is not a string.
    """
    if not isinstance(value, str):
        raise InvalidInput(f"{name} {shown(value)} is {kind(value)}: give a string")
    return value


def file_path(value: Any, name: str) -> Path:
    """Return ``value`` as a path.

    Raises:
        InvalidInput: ``value`` is not a path, or no file can have this path.
    """
    try:
        if isinstance(value, (str, os.PathLike)) and b"\0" not in os.fsencode(value):
            return Path(os.fsdecode(value))
    except ValueError:  # halves of surrogate pairs
        pass
    raise InvalidInput(f"{name} {shown(value)}: give the path of a file")


def token_list(values: Any, name: str) -> list[int]:
    """Return a list of integers from a list, a tuple or another sequence, or from a 1-D array of numpy or torch.

    Raises:
        InvalidInput: ``values`` is anything else; the message gives the index of a bad entry.
    """
    if hasattr(values, "tolist"):
        if getattr(values, "ndim", 1) != 1:
            raise InvalidInput(f"{name}: it has shape {list(values.shape)}: give one axis of integers")
        dtype = _dtype(values)
        if any(word in dtype for word in ("float", "complex", "bool")):
            raise InvalidInput(f"{name}: it holds {dtype}: give integers")
        values = list(values.tolist())
    elif not isinstance(values, Collection) or isinstance(values, (str, bytes, bytearray, Mapping)):
        raise InvalidInput(f"{name}: {shown(values)} is {kind(values)}: give a list of integers")
    if all(type(value) is int for value in values):
        return list(values)
    return [whole_number(value, f"{name}: entry {index},") for index, value in enumerate(values)]


def shown(value: Any) -> str:
    """Return a short repr for error messages; never raises."""
    try:
        text = repr(value)
    except Exception:  # for example an int with more digits than Python prints
        text = f"of {type(value).__name__}"
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"


def kind(value: Any) -> str:
    """Return the name of the value's type, with its article."""
    name = type(value).__name__
    return "None" if value is None else f"an {name}" if name[0] in "aeiou" else f"a {name}"


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool) or (getattr(value, "ndim", None) == 0 and "bool" in _dtype(value))


def _dtype(value: Any) -> str:
    return str(getattr(value, "dtype", ""))


def stop_tokens(model: Any) -> tuple[int, ...]:
    """Return the end tokens of the model's ``generation_config``.

    Raises:
        InvalidInput: the value is neither a token id nor a list of them.
    """
    config = getattr(model, "generation_config", None)
    return token_ids(getattr(config, "eos_token_id", None), "generation_config.eos_token_id")


def token_ids(value: Any, name: str) -> tuple[int, ...]:
    """Return one token id, several or none as a tuple.

    Raises:
        InvalidInput: the value is neither a token id nor a list of them.
    """
    if value is None:
        return ()
    listed = isinstance(value, (Sequence, Set)) and not isinstance(value, (str, bytes))
    many = listed or getattr(value, "ndim", 0) > 0
    return tuple(token_list(value, name)) if many else (whole_number(value, name),)
