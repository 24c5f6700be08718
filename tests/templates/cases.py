"""Shared parts of the template tests: data, instruction sets, errors against float64, and a paged cache."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from detcompile.templates.cpu import library as cpu_library

__all__ = ["DTYPES", "ISAS", "KINDS", "PagedCache", "assert_as_accurate", "normal", "sample"]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# The instruction set that models use here and the portable one; a library of kernels takes 18 CPU seconds to build.
# test_instruction_sets.py names another one, which replaces the first.
ISAS = tuple(dict.fromkeys((os.environ.get("DETCOMPILE_TEST_ISA", cpu_library.isa()), "portable")))
KINDS = ["normal", "heavy"]


def sample(kind: str, shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return random values: "normal", or "heavy" with tails about a hundred times wider (within float16's range)."""
    values = normal(shape, torch.float32, seed)
    if kind == "heavy":
        generator = torch.Generator().manual_seed(seed + 1_000_003)
        values = values / torch.rand(tuple(shape), generator=generator).clamp_min(1e-4).sqrt()
    return values.to(dtype)


def normal(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return standard normal values that depend only on the arguments."""
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_as_accurate(ours: Tensor, theirs: Tensor, reference: Tensor, what: str) -> None:
    """Fail unless our root-mean-square error against the float64 reference is at most 1.05 times theirs.

    Each error is taken relative to the value (or to the median value, if greater), so that no outlier decides alone.
    Below a quarter of float32's unit roundoff, where short rows of 16-bit values sum almost exactly, errors are equal.
    """
    assert ours.dtype == theirs.dtype, what
    size = reference.abs().clamp_min(reference.abs().median())
    our_error, their_error = (((y.double() - reference) / size).square().mean().sqrt().item() for y in (ours, theirs))
    assert our_error <= 1.05 * max(their_error, 2.0**-26), f"{what}: error {our_error:.3e}, torch's {their_error:.3e}"


@dataclass(slots=True)
class PagedCache:
    """One sequence's pages in caches whose every other slot is NaN, and the metadata of its next step."""

    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor  # [1, max_blocks] int32
    length: int = 0

    @classmethod
    def poisoned(
        cls,
        num_keys: int,
        block_size: int,
        heads: int,
        head_dim: int,
        v_head_dim: int,
        dtype: torch.dtype,
        seed: int = 0,
    ) -> "PagedCache":
        """Return pages for num_keys keys, at shuffled places among spare pages."""
        needed = -(-num_keys // block_size)
        order = torch.randperm(needed + 3, generator=torch.Generator().manual_seed(seed))
        k_cache, v_cache = (
            torch.full((needed + 3, block_size, heads, width), torch.nan, dtype=dtype)
            for width in (head_dim, v_head_dim)
        )
        return cls(k_cache, v_cache, order[:needed].int()[None].contiguous())

    def step(self, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return slot_mapping, cu_seqlens, seq_lens and block_table of the next `count` tokens."""
        block_size = self.k_cache.shape[1]
        positions = torch.arange(self.length, self.length + count)
        slots = self.block_table[0, positions // block_size].long() * block_size + positions % block_size
        self.length += count
        return slots, _int32(0, count), _int32(self.length), self.block_table

    def attend(
        self, op: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, cuts: Sequence[int], *rest: object
    ) -> Tensor:
        """q [T, Hq, D], k v [T, Hkv, D | Dv], in steps of `cuts` tokens -> [T, Hq, Dv]."""
        outs = []
        for begin, count in zip(_starts(cuts), cuts, strict=True):
            tokens = slice(begin, begin + count)
            step = self.step(count)
            outs.append(op(q[tokens], k[tokens], v[tokens], self.k_cache, self.v_cache, *step, *rest))
        return torch.cat(outs)


def _starts(cuts: Sequence[int]) -> list[int]:
    return [sum(cuts[:i]) for i in range(len(cuts))]


def _int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
