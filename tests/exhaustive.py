"""Mark cases that `make test` leaves to `make test-all` and CI's rotation."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

__all__ = ["EXHAUSTIVE", "EXHAUSTIVE_BY_ITEM", "exhaustive_unless"]

EXHAUSTIVE = pytest.mark.exhaustive
EXHAUSTIVE_BY_ITEM = pytest.mark.exhaustive(by_item=True)  # of files too long for one part of the rotation


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
