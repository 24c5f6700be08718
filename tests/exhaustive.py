"""Mark cases that `make test` leaves to `make test-all` and CI's rotation."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

__all__ = ["EXHAUSTIVE", "EXHAUSTIVE_BY_CASE", "exhaustive_unless"]

EXHAUSTIVE = pytest.mark.exhaustive
EXHAUSTIVE_BY_CASE = pytest.mark.exhaustive(by_case=True)  # of files too long for one part of the rotation


def exhaustive_unless(
    quick: Callable[[Any], bool], cases: Iterable[Any], mark: pytest.MarkDecorator = EXHAUSTIVE
) -> list[Any]:
    """Return parameters; those that are not ``quick`` get the mark."""
    return [
        case if quick(case) else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark)
        for case in cases
    ]
