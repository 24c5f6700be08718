"""Numerics: the declared choices that fix every SumOrder, and the functions that choose orders on CPUs and GPUs.

These functions see the reduced length, the dtype, the device type or instruction set, and the Numerics. They have no
parameter for the number of tokens, the batch or the current tensor-parallel size.
"""

import functools
import hashlib
import itertools
import math
from dataclasses import dataclass, field, fields

import torch

from detcompile.errors import InvalidInput, NumericsError
from detcompile.orders.exact import ARITHMETICS
from detcompile.orders.gradient_orders import Exact
from detcompile.orders.matmul_orders import Blocked, EvenOdd, Sequential, Tree
from detcompile.orders.row_orders import Row
from detcompile.orders.token_orders import KV

__all__ = [
    "COARSEST_GRID",
    "FINEST_GRID",
    "KEY_BLOCK",
    "KV_BLOCK",
    "Numerics",
    "kv_order",
    "matmul_order",
    "row_order",
    "state_order",
    "token_product_order",
    "token_row_order",
]

KV_BLOCK = 64  # keys of one step of the online softmax
KEY_BLOCK = 128  # keys of one step of a query's gradient
_TILE_BLOCK = 32  # K of AMX's bfloat16 tiles
FINEST_GRID, COARSEST_GRID = -96, 0  # magnitudes up to 2^-45 and to 2^51
_FP32_BLOCK = 128  # one long float32 chain is less accurate than cuBLAS; blocks of 128 are more accurate


@dataclass(frozen=True, kw_only=True, slots=True)
class _CpuRows:
    """Lanes of a row on a CPU: doubled from `fewest_lanes` until no lane adds more than `steps` terms.

    This is as accurate as torch.sum; 64 lanes for any length would not be.
    """

    fewest_lanes: int = 64
    most_lanes: int = 4096
    steps: int = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class _GpuRows:
    """Lanes of a row on a GPU, which are threads.

    Attributes:
        load: bytes that a thread loads at once, if the rows are aligned to them.
        shortest: shorter rows are padded to this many elements.
        short: elements of the longest row that shares its program with other rows.
        short_lanes: most lanes of a short row, and fewest lanes of a longer one.
        elements: elements per thread, up to most_lanes threads.
        most_lanes: most lanes of a row that one program holds in registers.
        longest: elements of the longest such row; longer rows are cut into chunks for several programs.
        chunk, chunk_lanes: elements and lanes of a chunk.
    """

    load: int = 16
    shortest: int = 64
    short: int = 512
    short_lanes: int = 128
    elements: int = 16
    most_lanes: int = 1024
    longest: int = 16384
    chunk: int = 4096
    chunk_lanes: int = 512


_CPU, _GPU = _CpuRows(), _GpuRows()


@dataclass(frozen=True, kw_only=True, slots=True)
class Numerics:
    """The declared choices about rounding. They are part of a fingerprint.

    Attributes:
        tp_sizes: tensor-parallel sizes with equal bits; starts with 1, and each size divides the next. Exact arithmetic
            has equal bits at any size.
        kv_chunk: keys in one attention chunk, counted from position 0; a multiple of 64.
        token_leaf: tokens of one sequence in one float32 sum of a weight's gradient; a multiple of 64.
        token_grid: such sums are rounded to multiples of 2^token_grid, so that they add up exactly.
        train_tp_sizes: tensor-parallel sizes of a trainer with equal gradients; only (1,) for now.
        arithmetic: "float", or "exact16", "exact8x16" or "exact8" for exact integers (docs/exact.md).

    token_leaf, token_grid and train_tp_sizes only affect gradients. They are part of a trainer's fingerprint, but not
    of a compiled model's: ``repr`` leaves them out, and ``for_training`` includes them.

    Raises:
        NumericsError: a choice is invalid.
    """

    tp_sizes: tuple[int, ...] = (1, 2, 4, 8)
    kv_chunk: int = 512
    token_leaf: int = field(default=1024, repr=False)
    token_grid: int = field(default=-44, repr=False)
    train_tp_sizes: tuple[int, ...] = field(default=(1,), repr=False)
    arithmetic: str = "float"

    def __repr__(self) -> str:
        exact = f", arithmetic={self.arithmetic!r}" if self.is_exact else ""
        return f"Numerics(tp_sizes={self.tp_sizes!r}, kv_chunk={self.kv_chunk!r}{exact})"

    def __post_init__(self) -> None:
        if self.arithmetic not in ("float", *ARITHMETICS):
            raise NumericsError(
                f"Numerics.arithmetic={self.arithmetic!r}: give one of 'float', {', '.join(map(repr, ARITHMETICS))}"
            )
        object.__setattr__(self, "tp_sizes", _checked_tp_sizes(self.tp_sizes))
        if type(self.kv_chunk) is not int or self.kv_chunk < 1 or self.kv_chunk % KV_BLOCK:
            raise NumericsError(
                f"Numerics.kv_chunk={self.kv_chunk!r}: attention walks blocks of {KV_BLOCK} keys; use a positive "
                f"multiple of {KV_BLOCK}, such as {_nearest_chunk(self.kv_chunk)}"
            )
        self._check_gradients()

    def _check_gradients(self) -> None:
        leaf, grid, sizes = self.token_leaf, self.token_grid, self.train_tp_sizes
        if type(leaf) is not int or leaf < 1 or leaf % KV_BLOCK:
            raise NumericsError(
                f"Numerics.token_leaf={leaf!r}: a leaf of a gradient's sum is whole blocks of {KV_BLOCK} tokens; use a "
                f"positive multiple of {KV_BLOCK}, such as 1024"
            )
        if type(grid) is not int or not FINEST_GRID <= grid <= COARSEST_GRID:
            raise NumericsError(
                f"Numerics.token_grid={grid!r}: sums are rounded to multiples of 2^token_grid; use an integer from "
                f"{FINEST_GRID} to {COARSEST_GRID}, such as -44"
            )
        if not isinstance(sizes, tuple | list) or tuple(sizes) != (1,):
            raise NumericsError(
                f"Numerics.train_tp_sizes={sizes!r}: a trainer has one tensor-parallel rank; use (1,), and shard it "
                "with FSDP"
            )
        object.__setattr__(self, "train_tp_sizes", (1,))

    @property
    def is_exact(self) -> bool:
        """True if the bits are the same on every machine: products are sums of integers."""
        return self.arithmetic != "float"

    @property
    def leaves(self) -> int:
        """Leaves of every row-parallel sum: the largest declared size."""
        return self.tp_sizes[-1]

    @property
    def radices(self) -> tuple[int, ...]:
        """Children of a node at each level, from root to leaf: (1, 3, 6) gives (3, 2), and (1,) gives none."""
        return tuple(large // small for small, large in itertools.pairwise(self.tp_sizes))

    def split_radices(self, tp: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the radices above and below the tree level that has one node per rank."""
        level = self.tp_sizes.index(tp)
        return self.radices[:level], self.radices[level:]

    def digest(self) -> str:
        """Return the sha256, in hex, of every choice that affects a forward; the same in every process."""
        return hashlib.sha256(repr(self).encode()).hexdigest()

    def for_training(self) -> str:
        """Return every choice as text, for a trainer's fingerprint."""
        names = [choice.name for choice in fields(self) if choice.name != "arithmetic"]  # a trainer has floats
        choices = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"Numerics({choices})"


def matmul_order(
    k: int, dtype: torch.dtype, radices: tuple[int, ...], isa: str = ""
) -> Sequential | Blocked | EvenOdd | Tree:
    """Return how a GEMM sums its K features.

    Args:
        k: summed features of all ranks together.
        dtype: both operands' dtype: float32 takes Blocked leaves, bfloat16 and float16 take Sequential ones.
        radices: `Numerics.radices` for a row-parallel GEMM, else ().
        isa: instruction set of a CPU from `cpu.library.isa_of`, "" for a GPU; "amx" makes bfloat16 take EvenOdd leaves.

    Raises:
        NumericsError: K does not split into prod(radices) equal leaves; the message names tp_sizes that fit.
        InvalidInput: no GEMM has this dtype.
    """
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise InvalidInput(f"matmul of {dtype}: there is an order for float32, bfloat16 and float16; convert first")
    leaves = math.prod(radices)
    if k % leaves:
        raise NumericsError(_misfit(k, radices))
    leaf_k = k // leaves
    leaf: Sequential | Blocked | EvenOdd = Sequential(leaf_k)
    if dtype is torch.float32:
        leaf = Blocked(leaf_k, _FP32_BLOCK)
    elif dtype is torch.bfloat16 and isa == "amx":
        leaf = EvenOdd(leaf_k, _TILE_BLOCK)
    return Tree(k, radices, leaf) if radices else leaf


@functools.lru_cache(4096)  # cached because launches call it while a prompt waits for the host
def row_order(length: int, device_type: str, radices: tuple[int, ...] = (), dtype: torch.dtype = torch.bfloat16) -> Row:
    """Return how a reduction over one axis sums its `length` elements.

    Args:
        length: elements of a whole row, of all ranks together.
        device_type: "cpu" or "cuda".
        radices: `Numerics.radices` for a row that ranks may share (the vocabulary), else ().
        dtype: dtype of the elements; on a GPU it decides how many a thread loads at once.

    Raises:
        InvalidInput: no template supports this device type.
    """
    leaf_length = -(-length // math.prod(radices))
    if device_type == "cpu":
        return Row(length, _cpu_lanes(leaf_length), 1, radices)
    if device_type == "cuda":
        vector = min(leaf_length & -leaf_length, _GPU.load // dtype.itemsize)
        if leaf_length > _GPU.longest:
            return Row(length, _GPU.chunk_lanes, vector, radices, _GPU.chunk)
        return Row(length, _cuda_lanes(leaf_length, vector), vector, radices)
    raise InvalidInput(f"row reduction on device type {device_type!r}: there is an order for 'cpu' and 'cuda' only")


def state_order(length: int, device_type: str) -> Sequential | Row:
    """Return how a recurrence sums over the keys of its state. On a GPU, keys are lanes, padded to a power of two.

    Raises:
        InvalidInput: no template supports this device type.
    """
    if device_type == "cpu":
        return Sequential(length)
    if device_type == "cuda":
        return Row(length, 1 << (length - 1).bit_length(), 1)
    raise InvalidInput(f"a recurrence on device type {device_type!r}: there is an order for 'cpu' and 'cuda' only")


def kv_order(numerics: Numerics) -> KV:
    """Return how attention walks the keys of a sequence."""
    return KV(numerics.kv_chunk, KV_BLOCK)


def token_product_order(numerics: Numerics, dtype: torch.dtype, isa: str = "") -> Exact:
    """Return how the gradient of a matrix sums over tokens. A leaf with fewer tokens is shorter.

    Args:
        dtype: dtype of the rows and of their gradients.
        isa: the CPU's instruction set, as in ``matmul_order``.
    """
    leaf = matmul_order(numerics.token_leaf, dtype, (), isa)
    return Exact(leaf, numerics.token_leaf, numerics.token_grid)


def token_row_order(numerics: Numerics) -> Exact:
    """Return how the gradient of a scale or table sums over tokens: a leaf is one row."""
    return Exact(Sequential(1), 1, numerics.token_grid)


def _cpu_lanes(length: int) -> int:
    lanes = _CPU.fewest_lanes
    while lanes * _CPU.steps < length and lanes < _CPU.most_lanes:
        lanes *= 2
    return lanes


def _cuda_lanes(length: int, vector: int) -> int:
    """Return the threads of a row. Short rows, which share a program, use only threads with an element."""
    width = max(1 << (length - 1).bit_length(), _GPU.shortest)
    if width <= _GPU.short:
        return min(width // vector, _GPU.short_lanes)
    return max(_GPU.short_lanes, min(width // _GPU.elements, _GPU.most_lanes))


def _checked_tp_sizes(sizes: tuple[int, ...]) -> tuple[int, ...]:
    where = f"Numerics.tp_sizes={sizes!r}"
    if not isinstance(sizes, tuple | list) or any(type(size) is not int for size in sizes):
        raise NumericsError(f"{where}: expected a tuple of integers, such as (1, 2, 4, 8)")
    if not sizes or sizes[0] != 1:
        raise NumericsError(f"{where}: the first size must be 1; put 1 in front, as in (1, 2, 4, 8)")
    for small, large in itertools.pairwise(sizes):
        if large <= small:
            raise NumericsError(f"{where}: {large} follows {small}; list each size once, in ascending order")
        if large % small:
            raise NumericsError(
                f"{where}: {small} does not divide {large}, so no rank of {small} would hold whole ranks of {large}; "
                f"drop one of them, or use a multiple of {small}, such as {large + small - large % small}"
            )
    return tuple(sizes)


def _nearest_chunk(chunk: object) -> int:
    return max(1, round(chunk / KV_BLOCK)) * KV_BLOCK if type(chunk) is int else 512


def _misfit(k: int, radices: tuple[int, ...]) -> str:
    """Return the message for a K that does not divide. The sizes that fit are a prefix of the declared chain."""
    tp_sizes = tuple(itertools.accumulate(radices, initial=1, func=lambda size, radix: size * radix))
    prefix = tuple(size for size in tp_sizes if k % size == 0)
    divisors = [size for size in range(2, 65) if k % size == 0]
    others = f"any other chain that ends in one of {', '.join(map(str, divisors))}" if divisors else "no other up to 64"
    return (
        f"K={k} does not split into {tp_sizes[-1]} equal leaves, as Numerics.tp_sizes={tp_sizes} asks of a "
        f"row-parallel sum; tp_sizes that fit this K: {prefix} (the declared sizes up to the largest that divides it), "
        f"or {others}"
    )
