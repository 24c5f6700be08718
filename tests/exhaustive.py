"""Mark cases that `make test` leaves to `make test-all` and CI's rotation."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

__all__ = ["EXHAUSTIVE", "exhaustive_unless"]

EXHAUSTIVE = pytest.mark.exhaustive


def exhaustive_unless(quick: Callable[[Any], bool], cases: Iterable[Any]) -> list[Any]:
    """Parameters, those marked that are not ``quick``."""
    return [
        case
        if quick(case)
        else pytest.param(*case, marks=EXHAUSTIVE)
        if isinstance(case, tuple)
        else pytest.param(case, marks=EXHAUSTIVE)
        for case in cases
    ]
