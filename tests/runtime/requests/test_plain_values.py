"""Sequences of integers are accepted as token ids; other iterables are not. Messages say what is wrong with a value."""

from typing import Any

import numpy as np
import pytest
import torch

from detcompile import InvalidInput
from detcompile.runtime.requests.plain_values import number, token_list


@pytest.mark.parametrize(
    "values",
    [3, None, "12", b"12", {1: 2}, iter([1]), np.array(3), torch.ones(2)],
    ids=lambda value: type(value).__name__,
)
def test_token_list_must_be_integers(values: Any) -> None:
    with pytest.raises(InvalidInput, match="priority: "):
        token_list(values, "priority")


@pytest.mark.parametrize(
    "values", [[1, 2], (1, 2), {1: 0, 2: 0}.keys(), range(1, 3), np.array([1, 2]), torch.tensor([1, 2])]
)
def test_lists_of_integers_are_taken(values: Any) -> None:
    assert token_list(values, "priority") == [1, 2]


@pytest.mark.parametrize("value", [float("nan"), np.float32("nan"), torch.tensor(torch.nan)], ids=repr)
def test_nan_is_called_so(value: Any) -> None:
    with pytest.raises(InvalidInput, match=r"^top_p is NaN: give a number$"):
        number(value, "top_p")


@pytest.mark.parametrize(
    ("value", "text"), [(10**400, "is an int"), ("1", "is a str"), (True, "is a bool"), (1j, "is a complex")]
)
def test_what_is_no_number_has_its_type_named(value: Any, text: str) -> None:
    with pytest.raises(InvalidInput, match=rf"^top_p .* {text}: give a number$"):
        number(value, "top_p")
