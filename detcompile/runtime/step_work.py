"""Build a worker's input (StepWork) from a planned step."""

import itertools
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np

from detcompile.runtime.requests.sequence import Sequence
from detcompile.runtime.sampling.sampler import SampleRow
from detcompile.runtime.speculation.tree_verification import Verification, tree_arrays
from detcompile.runtime.step.block_tables import BlockTables
from detcompile.runtime.step.builder import StepArrays, StepEntry, build_arrays, joined
from detcompile.runtime.step.worker import PromptRows, StepWork


class Draw(NamedTuple):
    """Tokens to draw: a sequence's next one from the logits in ``row``, then one per node of its draft tree."""

    sequence: Sequence
    row: int
    verification: Verification | None = None


def lay_out(
    entries: SequenceOf[StepEntry], drafted: Mapping[Sequence, Verification]
) -> tuple[list[StepEntry], list[Draw]]:
    """Return the entries without a draft tree, and all tokens to draw: theirs first, then the trees'."""
    plain = [entry for entry in entries if entry.sequence not in drafted] if drafted else list(entries)
    ready = [sequence for sequence, start, num_tokens, _ in plain if start + num_tokens == sequence.num_tokens]
    draws = [Draw(sequence, row) for row, sequence in enumerate(ready)]
    row = len(draws)
    for sequence, verification in drafted.items():
        draws.append(Draw(sequence, row, verification))
        row += len(verification.layout.rows)
    return plain, draws


def build_work(
    entries: SequenceOf[StepEntry],
    draws: SequenceOf[Draw],
    prompts: SequenceOf[StepEntry],
    tables: BlockTables,
    block_size: int,
    pending: dict[Sequence, int],
) -> StepWork:
    """Build the arrays of a step; its rows of logits belong to ``draws``, then to ``prompts``.

    Args:
        entries: sequences without a tree, in order; sequences with one, named by ``draws``, follow.
        prompts: entries whose prompt logprobs are wanted.
        pending: for each sequence whose newest token is not read back, its row in the previous step's sampled tokens.
    """
    parts: list[StepArrays] = []
    if entries:
        parts.append(_plain_arrays(entries, draws, tables, block_size, pending))
    trees = [draw.verification for draw in draws if draw.verification is not None]
    for _, group in itertools.groupby(trees, lambda tree: id(tree.layout)):
        alike = list(group)
        width = max(tree.width(block_size) for tree in alike)
        parts.append(tree_arrays(alike, [tables.row(tree.sequence, width) for tree in alike], block_size))
    arrays, rows = joined(parts), _sample_rows(draws)
    if prompts:
        first = dict(zip([entry.sequence for entry in entries], arrays.cu_seqlens.tolist()))
        spans = [np.arange(num_tokens) + first[sequence] for sequence, _, num_tokens, _ in prompts]
        arrays = arrays._replace(logits_to_keep=np.concatenate([arrays.logits_to_keep, *spans]))
    if not len(arrays.logits_to_keep):
        arrays = arrays._replace(logits_to_keep=np.zeros(1, np.int64))  # a graph returns at least one row
    return StepWork(arrays, rows, _prompt_rows(prompts, len(rows)))


def _plain_arrays(
    entries: SequenceOf[StepEntry],
    draws: SequenceOf[Draw],
    tables: BlockTables,
    block_size: int,
    pending: dict[Sequence, int],
) -> StepArrays:
    """Build the arrays of plain entries; keep logits of those that draw a token."""
    sequences = [entry.sequence for entry in entries]
    width = max(len(table) for sequence in sequences for table in sequence.block_tables)
    arrays = build_arrays(entries, tables.rows(sequences, width), block_size, pending)
    drawn = [draw.sequence for draw in draws if draw.verification is None]
    if drawn == sequences:
        return arrays
    last = dict(zip(sequences, arrays.logits_to_keep.tolist()))
    return arrays._replace(logits_to_keep=np.array([last[sequence] for sequence in drawn], np.int64))


def _sample_rows(draws: SequenceOf[Draw]) -> tuple[SampleRow, ...]:
    rows: list[SampleRow] = []
    for sequence, _, verification in draws:
        num_tokens, place = sequence.num_tokens, (sequence.sample_index, sequence, sequence.token_ids)
        num_generated = num_tokens - sequence.num_prompt_tokens
        if verification is None:
            limits = sequence.forbidden_after(), sequence.mask_after()
            rows.append(SampleRow(sequence.sampling, num_tokens, num_generated, *place, *limits))
            continue
        levels = [
            SampleRow(sequence.sampling, num_tokens + depth, num_generated + depth, *place)
            for depth in range(1 + verification.tree.depth)
        ]
        paths = verification.layout.rows
        if verification.rejects or any(sequence.bad_words) or sequence.matcher is not None:
            rows += [
                levels[len(path)]._replace(
                    forbidden=sequence.forbidden_after(verification.tree.along(path)),
                    mask=sequence.mask_after(verification.tree.along(path)),
                    proposals=verification.proposals(path),
                )
                for path in paths
            ]
        else:
            rows += [levels[len(path)] for path in paths]
    return tuple(rows)


def _prompt_rows(entries: SequenceOf[StepEntry], start: int) -> tuple[PromptRows, ...]:
    rows = []
    for sequence, first, num_tokens, _ in entries:
        most = min(num_tokens, sequence.num_prompt_tokens - 1 - first)
        targets = tuple(sequence.token_ids[first + 1 : first + 1 + most])
        rows.append(PromptRows(start, targets, sequence.sampling.prompt_logprobs or 0))
        start += num_tokens
    return tuple(rows)
