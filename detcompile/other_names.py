"""Rejects argument names of vLLM and transformers with the name to use here."""

import functools
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

from detcompile.errors import InvalidInput

P = ParamSpec("P")
R = TypeVar("R")


def naming_equivalents(title: str, equivalents: Mapping[str, str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Reject arguments that a function lacks with a message that says what to write instead.

    Args:
        title: the function's name in messages.
        equivalents: what to write, by the argument's name in vLLM or transformers.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if not equivalents.keys().isdisjoint(kwargs):
                name = next(name for name in kwargs if name in equivalents)
                raise InvalidInput(f"{title} has no argument {name!r}: {equivalents[name]}")
            return function(*args, **kwargs)

        return call

    return decorate
