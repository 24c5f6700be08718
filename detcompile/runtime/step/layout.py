"""Sizes of a step's arrays: the buckets that steps are padded to, and the buffer that holds all arrays.

Legend: as in runtime/step/runner.py.
"""

import functools
import itertools
import math
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from detcompile.runtime.step.builder import NOT_PENDING, StepArrays
from detcompile.step import NO_SLOT, PADDING_SLOT

TOKEN_BUCKETS = (1, 2, 4, 8, *range(16, 128, 16), *range(128, 512, 32), *range(512, 1024, 64), *range(1024, 4097, 256))
MIXED_BUCKETS = (16, 32, 64, 128, 256, 512)  # for steps with more tokens than sequences
FEWEST_MIXED = 8  # sequences of a mixed step
FEWEST_COPIES = 16  # of a token shared by branches of draft trees
SHORTEST_TABLE = 512  # keys; narrower tables are padded to this, so that short sequences share graphs
ALIGNMENT = 128  # bytes, of each array in a step's buffer
# Padding values other than 0; None repeats the array's last entry.
PADDING = {"pending": NOT_PENDING, "slot_mappings": PADDING_SLOT, "state_slots": NO_SLOT, "cu_seqlens": None}
UNKNOWN = (None,) * len(StepArrays._fields)


class StepLayout(NamedTuple):
    """Sizes of a step's arrays, padding included."""

    tokens: int
    sequences: int
    rows: int
    blocks: int
    groups: int
    copies: int = 1

    def fields(self) -> dict[str, tuple[type[np.generic], tuple[int, ...]]]:
        """Return dtype and shape of each array of StepArrays."""
        return {
            "input_ids": (np.int64, (self.tokens,)),
            "position_ids": (np.int64, (self.tokens,)),
            "pending": (np.int64, (self.tokens,)),
            "logits_to_keep": (np.int64, (self.rows,)),
            "slot_mappings": (np.int64, (self.groups, self.copies, self.tokens)),
            "cu_seqlens": (np.int32, (self.sequences + 1,)),
            "seq_lens": (np.int32, (self.sequences,)),
            "block_tables": (np.int32, (self.groups, self.sequences, self.blocks)),
            "state_slots": (np.int32, (self.sequences,)),
            "block_copies": (np.int64, (3, self.groups * self.sequences if self.copies > 1 else 0)),
        }

    @classmethod
    def of(cls, arrays: StepArrays) -> "StepLayout":
        """Return the layout of a step, without padding."""
        groups, sequences, blocks = arrays.block_tables.shape
        copies = arrays.slot_mappings.shape[1]
        return cls(len(arrays.input_ids), sequences, len(arrays.logits_to_keep), blocks, groups, copies)

    def padded(self, block_size: int) -> "StepLayout":
        """Return the layout of a CUDA graph that can hold the step; large steps are padded only in table width."""
        return _padded(self, block_size)


@functools.lru_cache(maxsize=512)
def _padded(exact: StepLayout, block_size: int) -> StepLayout:
    blocks = 1 << (max(exact.blocks, SHORTEST_TABLE // block_size) - 1).bit_length()
    copies = 1 if exact.copies == 1 else max(FEWEST_COPIES, 1 << (exact.copies - 1).bit_length())
    if exact.tokens == exact.sequences == exact.rows:
        bucket = _bucket(exact.tokens, TOKEN_BUCKETS)
        return exact._replace(tokens=bucket, sequences=bucket, rows=bucket, blocks=blocks, copies=copies)
    if exact.tokens > MIXED_BUCKETS[-1] or exact.rows > exact.tokens:
        return exact._replace(blocks=blocks)
    tokens = _bucket(exact.tokens, MIXED_BUCKETS)
    sequences = min(tokens, 1 << (max(exact.sequences, exact.rows, FEWEST_MIXED) - 1).bit_length())
    return exact._replace(tokens=tokens, sequences=sequences, rows=sequences, blocks=blocks, copies=copies)


class StepBuffer:
    """The arrays of a layout side by side in one buffer, so that one copy moves them all.

    Args:
        memory: [bytes] uint8, pinned or on a device; None allocates it on ``device``.
    """

    def __init__(self, layout: StepLayout, device: torch.device, memory: Tensor | None = None) -> None:
        self.layout = layout
        self._places, size = _places(layout)
        self.bytes = torch.empty(size, dtype=torch.uint8, device=device) if memory is None else memory[:size]

    def fill(self, arrays: StepArrays, before: StepArrays | None = None) -> None:
        """Write a step that fits, and its padding, into host memory.

        A padding token is token 0 at position 0 and is written nowhere; a padding sequence has no tokens and no keys; a
        padding row of logits is token 0's.

        Args:
            before: current content, so that unchanged padding and read-only arrays are not written again.
        """
        all_given: tuple[NDArray[Any], ...] = arrays
        all_known: tuple[NDArray[Any] | None, ...] = before or UNKNOWN
        for given, known, (target, padding) in zip(all_given, all_known, self._targets):
            if given is known and not given.flags.writeable:
                continue
            if given.shape != target.shape:
                if known is None or given.shape != known.shape or padding is None:
                    target.fill(given[-1] if padding is None else padding)
                target = target[tuple(map(slice, given.shape))]
            target[...] = given

    def tensors(self) -> dict[str, Tensor]:
        """Return views of the memory, by the names of StepArrays."""
        whole = {np.int64: (self.bytes.view(torch.int64), 8), np.int32: (self.bytes.view(torch.int32), 4)}
        views = {}
        for name, (start, length, dtype, shape) in self._places.items():
            memory, size = whole[dtype]
            views[name] = memory[start // size : (start + length) // size].view(shape)
        return views

    @functools.cached_property
    def _targets(self) -> list[tuple[NDArray[Any], int | None]]:
        """Host arrays in the order of StepArrays, each with its padding value (None: repeat the last entry)."""
        memory = self.bytes.numpy()
        return [
            (memory[start : start + length].view(dtype).reshape(shape), PADDING.get(name, 0))
            for name in StepArrays._fields
            for start, length, dtype, shape in [self._places[name]]
        ]


def host_tensors(arrays: StepArrays) -> dict[str, Tensor]:
    """Return the tensors of a step that runs on the host, by name; writable arrays are shared, not copied."""
    given: tuple[NDArray[Any], ...] = arrays
    return {
        name: torch.from_numpy(array.astype(dtype, order="C", copy=not array.flags.writeable))
        for (name, dtype), array in zip(_dtypes().items(), given)
    }


@functools.cache
def _dtypes() -> dict[str, type[np.generic]]:
    return {name: dtype for name, (dtype, _) in StepLayout(0, 0, 0, 0, 0).fields().items()}


class StepBuffers:
    """The buffers of several steps in one piece of memory, so that one copy moves them all.

    Args:
        layouts: the layouts of the steps, in order.
        memory: memory to use, as for a StepBuffer.

    Attributes:
        steps: one StepBuffer per layout.
    """

    def __init__(self, layouts: tuple[StepLayout, ...], device: torch.device, memory: Tensor | None = None) -> None:
        ends = list(itertools.accumulate(_places(layout)[1] for layout in layouts))
        self.layouts = layouts
        self.bytes = torch.empty(ends[-1], dtype=torch.uint8, device=device) if memory is None else memory[: ends[-1]]
        starts = (0, *ends[:-1])
        self.steps = [StepBuffer(layout, device, self.bytes[at:]) for layout, at in zip(layouts, starts, strict=True)]

    def fill(self, steps: SequenceOf[StepArrays], before: SequenceOf[StepArrays] | None = None) -> None:
        """Write each step into its buffer; see ``StepBuffer.fill``."""
        for buffer, arrays, known in zip(self.steps, steps, before or (None,) * len(steps), strict=True):
            buffer.fill(arrays, known)


@functools.lru_cache(maxsize=512)
def _places(layout: StepLayout) -> tuple[dict[str, tuple[int, int, type[np.generic], tuple[int, ...]]], int]:
    """Return the first byte, length, dtype and shape of each array, and the total number of bytes."""
    places, size = {}, 0
    for name, (dtype, shape) in layout.fields().items():
        length = math.prod(shape) * np.dtype(dtype).itemsize
        places[name] = (size, length, dtype, shape)
        size += -(-length // ALIGNMENT) * ALIGNMENT
    return places, size


def table_widths(most_blocks: int, block_size: int) -> list[int]:
    """Return the table widths to capture graphs for, up to the first that holds ``most_blocks``."""
    widths = [1 << (max(1, SHORTEST_TABLE // block_size) - 1).bit_length()]
    while widths[-1] < most_blocks:
        widths.append(min(8 * widths[-1], 1 << (most_blocks - 1).bit_length()))
    return widths


def graph_layouts(
    most_sequences: int, most_tokens: int, most_blocks: int, block_size: int
) -> list[tuple[int, int, int]]:
    """Return tokens, sequences and table widths of the graphs of steps up to these sizes.

    The largest sizes come first, so that the memory pool gets its full size at once; the largest mixed step, with
    logits of every token, is included for graphs that are captured later. Within a size the narrowest table comes
    first, because a step would use a wider graph if one existed.
    """
    decodes = _bucket(min(most_sequences, most_tokens), TOKEN_BUCKETS)
    mixed = _bucket(min(most_tokens, MIXED_BUCKETS[-1]), MIXED_BUCKETS)
    sizes = [(size, size) for size in TOKEN_BUCKETS if size <= decodes or size == mixed]
    sizes += [
        (tokens, sequences)
        for tokens, sequences in mixed_layouts()
        if tokens <= most_tokens and sequences < 2 * most_sequences
    ]
    widths = table_widths(most_blocks, block_size)
    return [(*size, width) for size in sorted(sizes, reverse=True) for width in widths]


def first_layouts(layouts: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Return the layouts to capture before serving.

    All layouts of the largest size are captured, because they determine the size of the shared memory. Of every other
    size only the one with the widest tables is captured: it serves all steps of that size.
    """
    widest = max((width for *_, width in layouts), default=0)
    return [layout for layout in layouts if layout[2] == widest or layout[:2] == layouts[0][:2]]


def mixed_layouts() -> list[tuple[int, int]]:
    """Return tokens and sequences of the buckets of mixed steps."""
    return [
        (tokens, FEWEST_MIXED << shift)
        for tokens in MIXED_BUCKETS
        for shift in range((tokens // FEWEST_MIXED).bit_length() - 1)
    ]


def _bucket(size: int, buckets: tuple[int, ...]) -> int:
    return next((bucket for bucket in buckets if size <= bucket), size)
