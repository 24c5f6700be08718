"""Shared parts of the gradient tests: packed sequences, their leaves, and other packings of them."""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["cu_seqlens_of", "leaves_of", "packings", "split"]


def cu_seqlens_of(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def leaves_of(lengths: Sequence[int], leaf: int) -> Tensor:
    """Return the boundaries of the leaves of consecutive sequences."""
    table, at = [0], 0
    for length in lengths:
        table += [at + min(end, length) for end in range(leaf, length + leaf, leaf)]
        at += length
    return torch.tensor(table, dtype=torch.int32)


def split(rows: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """Return the rows of each sequence."""
    return list(rows.split(list(lengths)))


def packings(count: int) -> dict[str, list[list[int]]]:
    """Return, by name, micro-batches of the indices of ``count`` sequences."""
    numbers = list(range(count))
    half = count // 2
    return {
        "together": [numbers],
        "one by one": [[number] for number in numbers],
        "halves": [numbers[:half], numbers[half:]],
        "backwards": [numbers[::-1]],
        "odd, even": [numbers[1::2], numbers[::2]],
    }
