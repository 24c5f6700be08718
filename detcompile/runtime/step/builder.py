"""Build the arrays of one step from sequences, on the host.

Legend: G KV groups, T tokens of a step, S sequences, R rows of logits, W width of the block tables, C sequences that a
token may belong to, N blocks to copy.
"""

import functools
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from detcompile.errors import InvalidInput
from detcompile.runtime.kv.block_pool import NULL_BLOCK
from detcompile.runtime.kv.kv_blocks import KVBlocks
from detcompile.runtime.requests.sequence import Sequence
from detcompile.step import NO_SLOT, PADDING_SLOT

NOT_PENDING = -1  # marks a token that the host knows
NO_COPIES = np.zeros((3, 0), np.int64)


class StepEntry(NamedTuple):
    """A sequence's part of a step: ``num_tokens`` tokens from index ``start`` on."""

    sequence: Sequence
    start: int
    num_tokens: int
    held_from: int = 0  # index of the sequence's first stored token: a draft branch stores only its own tokens


class StepArrays(NamedTuple):
    """A step as plain arrays on the host, which can be sent to another process."""

    input_ids: NDArray[np.int64]  # [T]; arbitrary where pending
    position_ids: NDArray[np.int64]  # [T]
    pending: NDArray[np.int64]  # [T]: row of the previous step's sampled tokens with this token, or NOT_PENDING
    logits_to_keep: NDArray[np.int64]  # [R] indices of packed tokens
    slot_mappings: NDArray[np.int64]  # [G, C, T], as in StepInputs
    cu_seqlens: NDArray[np.int32]  # [S + 1]
    seq_lens: NDArray[np.int32]  # [S]
    block_tables: NDArray[np.int32]  # [G, S, W]
    state_slots: NDArray[np.int32]  # [S]
    block_copies: NDArray[np.int64] = NO_COPIES  # [3, N]: source blocks, target blocks, numbers of tokens


def build_step(sequences: SequenceOf[tuple[Sequence, int]], blocks: KVBlocks, all_logits: bool = False) -> StepArrays:
    """Build a step that computes the next n tokens of each sequence; missing blocks are taken from ``blocks``.

    The caller adds n to ``num_computed`` once the step has run.

    Args:
        sequences: (sequence, n) with 1 <= n <= sequence.num_uncomputed, each sequence once, no token pending.
        all_logits: keep logits of every token, packed like the tokens; otherwise of each sequence's last token.

    Raises:
        InvalidInput: no sequence is given, an n is out of range, or too few blocks are free; no sequence has changed.
    """
    _check_plan(sequences)
    _allocate_missing_blocks(sequences, blocks)
    entries = [StepEntry(sequence, sequence.num_computed, n) for sequence, n in sequences]
    tables = block_tables([sequence for sequence, _ in sequences], len(blocks.groups))
    arrays = build_arrays(entries, tables, blocks.pool.block_size, {})
    return arrays._replace(logits_to_keep=np.arange(len(arrays.input_ids))) if all_logits else arrays


def block_tables(sequences: SequenceOf[Sequence], num_groups: int) -> NDArray[np.int32]:
    """Return the block tables [G, S, W] of these sequences, padded with zeros."""
    width = max(len(table) for sequence in sequences for table in sequence.block_tables)
    tables = np.zeros((num_groups, len(sequences), width), np.int32)
    for row, sequence in enumerate(sequences):
        for group, table in enumerate(sequence.block_tables):
            tables[group, row, : len(table)] = table
    return tables


def build_arrays(
    entries: SequenceOf[StepEntry],
    tables: NDArray[np.int32],
    block_size: int,
    pending: dict[Sequence, int],
) -> StepArrays:
    """Pack the entries, in order; keep logits of the last token of each.

    Args:
        tables: [G, S, W], blocks of each entry's sequence.
        pending: for each sequence whose newest token is not read back, its row in the previous step's sampled tokens.
    """
    starts = np.array([entry.start for entry in entries], np.int64)
    counts = np.array([entry.num_tokens for entry in entries], np.int64)
    cu_seqlens, place, slots = token_places(starts, counts, tables, block_size)
    input_ids, pending_rows = _input_ids(entries, cu_seqlens, pending)
    return StepArrays(
        input_ids=input_ids,
        position_ids=place,
        pending=pending_rows,
        logits_to_keep=cu_seqlens[1:] - 1,
        slot_mappings=slots[:, None],
        cu_seqlens=cu_seqlens.astype(np.int32),
        seq_lens=(starts + counts).astype(np.int32),
        block_tables=tables,
        state_slots=np.array([entry.sequence.state_slot for entry in entries], np.int32),
    )


def token_places(
    starts: NDArray[np.int64], counts: NDArray[np.int64], tables: NDArray[np.int32], block_size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return the places of a step's tokens: the next ``counts`` [S] of sequences with ``starts`` [S] tokens before.

    Returns:
        cu_seqlens [S + 1]; each token's index in its sequence [T]; its slot in each group [G, T].
    """
    cu_seqlens = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=cu_seqlens[1:])
    row = np.repeat(np.arange(len(counts)), counts)
    place = np.arange(cu_seqlens[-1]) + (starts - cu_seqlens[:-1])[row]
    slots = tables[:, row, place // block_size].astype(np.int64) * block_size + place % block_size
    return cu_seqlens, place, slots


def joined(parts: SequenceOf[StepArrays]) -> StepArrays:
    """Join several steps into one; sequences and rows of logits keep the order of the parts."""
    if len(parts) == 1:
        return parts[0]
    starts = np.cumsum([0, *(part.cu_seqlens[-1] for part in parts)])
    copies = max(part.slot_mappings.shape[1] for part in parts)
    width = max(part.block_tables.shape[2] for part in parts)
    slots = [_widened(part.slot_mappings, 1, copies, PADDING_SLOT) for part in parts]
    tables = [_widened(part.block_tables, 2, width, NULL_BLOCK) for part in parts]
    ends = [part.cu_seqlens[1:] + np.int32(start) for part, start in zip(parts, starts)]
    return StepArrays(
        input_ids=np.concatenate([part.input_ids for part in parts]),
        position_ids=np.concatenate([part.position_ids for part in parts]),
        pending=np.concatenate([part.pending for part in parts]),
        logits_to_keep=np.concatenate([part.logits_to_keep + start for part, start in zip(parts, starts)]),
        slot_mappings=np.concatenate(slots, axis=2),
        cu_seqlens=np.concatenate([parts[0].cu_seqlens[:1], *ends]),
        seq_lens=np.concatenate([part.seq_lens for part in parts]),
        block_tables=np.concatenate(tables, axis=1),
        state_slots=np.concatenate([part.state_slots for part in parts]),
        block_copies=np.concatenate([part.block_copies for part in parts], axis=1),
    )


def pending_arrays(
    positions: NDArray[np.int64], pending: list[int], tables: NDArray[np.int32], size: int
) -> list[StepArrays]:
    """Build steps of one pending token per sequence; like ``build_arrays``, with fewer operations.

    Args:
        positions: [steps, S] of the tokens.
        pending: S rows of the previous step's sampled tokens, the same in every step.
        tables: [G, S, W].
        size: tokens per block.
    """
    fixed = _fixed(tuple(pending))
    blocks, places = np.divmod(positions, size)
    slots = tables[:, fixed["logits_to_keep"], blocks].astype(np.int64) * size + places  # [G, steps, S]
    lengths = (positions + 1).astype(np.int32)
    return [
        StepArrays(
            position_ids=positions[step],
            slot_mappings=slots[:, step, None],
            seq_lens=lengths[step],
            block_tables=tables,
            **fixed,
        )
        for step in range(len(positions))
    ]


@functools.lru_cache(maxsize=256)
def _fixed(pending: tuple[int, ...]) -> dict[str, NDArray[Any]]:
    """Return the read-only arrays of a step of pending tokens that do not depend on positions."""
    count = len(pending)
    fixed: dict[str, NDArray[Any]] = {
        "input_ids": np.zeros(count, np.int64),
        "pending": np.array(pending, np.int64),
        "logits_to_keep": np.arange(count),
        "cu_seqlens": np.arange(count + 1, dtype=np.int32),
        "state_slots": np.full(count, NO_SLOT, np.int32),  # drafters have no recurrent state
    }
    return read_only(fixed)


def read_only(arrays: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Mark the arrays read-only, so that a step's host buffer need not copy them again."""
    for array in arrays.values():
        array.setflags(write=False)
    return arrays


def _widened(array: NDArray[Any], axis: int, size: int, value: int) -> NDArray[Any]:
    missing = size - array.shape[axis]
    shape = (*array.shape[:axis], missing, *array.shape[axis + 1 :])
    return np.concatenate([array, np.full(shape, value, array.dtype)], axis) if missing else array


def _input_ids(
    entries: SequenceOf[StepEntry], cu_seqlens: NDArray[np.int64], pending: dict[Sequence, int]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    known: list[int] = []
    rows = np.full(cu_seqlens[-1], NOT_PENDING, np.int64)
    for index, (sequence, start, n, held_from) in enumerate(entries):
        tokens = sequence.token_ids[start - held_from : start - held_from + n]
        if len(tokens) < n:
            assert len(tokens) == n - 1, "only the newest token of a sequence may be pending"
            rows[cu_seqlens[index + 1] - 1] = pending[sequence]
            tokens.append(0)
        known += tokens
    return np.array(known, np.int64), rows


def _check_plan(sequences: SequenceOf[tuple[Sequence, int]]) -> None:
    if not sequences:
        raise InvalidInput("a step needs at least one sequence")
    for index, (sequence, n) in enumerate(sequences):
        if not 1 <= n <= sequence.num_uncomputed:
            raise InvalidInput(
                f"sequence {index} has {sequence.num_uncomputed} tokens left to compute: a step of {n} is impossible"
            )
    if len({id(sequence) for sequence, _ in sequences}) != len(sequences):
        raise InvalidInput("a sequence appears twice in a step: pass all its new tokens in one entry")


def _allocate_missing_blocks(sequences: SequenceOf[tuple[Sequence, int]], blocks: KVBlocks) -> None:
    """Allocate all missing blocks or none, so that a full cache leaves every sequence unchanged."""
    pool = blocks.pool
    missing = 0
    for sequence, n in sequences:
        tables = sequence.block_tables or [[] for _ in blocks.groups]
        missing += sum(max(0, pool.blocks_for(sequence.num_computed + n) - len(table)) for table in tables)
    pool.require_free(missing)
    for sequence, n in sequences:
        if not sequence.block_tables:
            blocks.admit(sequence, n, reuse=False)
        else:
            blocks.grow(sequence, sequence.num_computed + n)
