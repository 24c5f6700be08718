"""From a planned step to what a worker needs to run it."""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np

from detcompile.runtime.acceptance import Proposals
from detcompile.runtime.draft_tree import Path
from detcompile.runtime.sampling import SampleRow
from detcompile.runtime.sequence import Sequence
from detcompile.runtime.step_builder import BlockTables, SharedToken, StepEntry, build_arrays
from detcompile.runtime.tree_verification import Verification
from detcompile.runtime.worker import PromptRows, StepWork

__all__ = ["Draw", "build_work", "lay_out"]


class Draw(NamedTuple):
    """A token to draw: the next one of a sequence, or the one after a node of its draft tree."""

    sequence: Sequence
    carrier: Sequence  # whose entry in the step has the logits: the sequence, or a branch's stand-in
    offset: int  # of the token in that entry
    path: Path = ()
    proposals: Proposals | None = None  # guesses to accept or reject; None draws what plain decoding draws


def lay_out(
    entries: SequenceOf[StepEntry], drafted: Mapping[Sequence, Verification]
) -> tuple[list[StepEntry], list[SharedToken], list[Draw]]:
    """The entries with branches in the place of drafted sequences, what these share, and every token to draw."""
    laid_out: list[StepEntry] = []
    shared: list[SharedToken] = []
    draws: list[Draw] = []
    for entry in entries:
        sequence, start, num_tokens, _ = entry
        verification = drafted.get(sequence)
        if verification is not None:
            shared += verification.shared(len(laid_out))
            laid_out += [branch.entry for branch in verification.branches]
            draws += [
                Draw(sequence, carrier, offset, path, verification.proposals(path))
                for path, carrier, offset in verification.rows()
            ]
            continue
        laid_out.append(entry)
        if start + num_tokens == sequence.num_tokens:
            draws.append(Draw(sequence, sequence, num_tokens - 1))
    return laid_out, shared, draws


def build_work(
    entries: SequenceOf[StepEntry],
    draws: SequenceOf[Draw],
    prompts: SequenceOf[StepEntry],
    tables: BlockTables,
    block_size: int,
    pending: dict[Sequence, int],
    copies: SequenceOf[tuple[int, int]] = (),
    shared: SequenceOf[SharedToken] = (),
) -> StepWork:
    """The arrays of a step; its rows of logits are those of ``draws`` and then all of ``prompts``.

    Args:
        entries: the sequences of the step, in their order; those of the others below are among them.
        prompts: entries whose prompt logprobs are wanted.
        pending: rows of the previous step's sampled tokens that are the newest token of a sequence.
        copies: (from, to) blocks that are copied first.
        shared: tokens of an entry that stand before another's.
    """
    sequences = [entry.sequence for entry in entries]
    width = max(len(table) for sequence in sequences for table in sequence.block_tables)
    arrays = build_arrays(entries, tables.rows(sequences, width), block_size, pending, shared)
    if prompts or [draw.carrier for draw in draws] != sequences:
        first = dict(zip(sequences, arrays.cu_seqlens[:-1].tolist()))
        kept = [first[draw.carrier] + draw.offset for draw in draws]
        for sequence, _, num_tokens, _ in prompts:
            kept += range(first[sequence], first[sequence] + num_tokens)
        arrays = arrays._replace(logits_to_keep=np.array(kept or [0], np.int64))  # a graph gives one row at least
    return StepWork(arrays, _sample_rows(draws), _prompt_rows(prompts, len(draws)), tuple(copies))


def _sample_rows(draws: SequenceOf[Draw]) -> tuple[SampleRow, ...]:
    rows: list[SampleRow] = []
    known: Sequence | None = None
    num_tokens = num_generated = 0
    for sequence, _, _, path, proposals in draws:
        if sequence is not known:  # a tree's draws stand side by side
            known, num_tokens, num_generated = sequence, sequence.num_tokens, sequence.num_generated
        rows.append(
            SampleRow(
                sequence.sampling,
                num_tokens + len(path),
                num_generated + len(path),
                sequence.sample_index,
                sequence,
                sequence.token_ids,
                proposals,
            )
        )
    return tuple(rows)


def _prompt_rows(entries: SequenceOf[StepEntry], start: int) -> tuple[PromptRows, ...]:
    rows = []
    for sequence, first, num_tokens, _ in entries:
        most = min(num_tokens, sequence.num_prompt_tokens - 1 - first)
        targets = tuple(sequence.token_ids[first + 1 : first + 1 + most])
        rows.append(PromptRows(start, targets, sequence.sampling.prompt_logprobs or 0))
        start += num_tokens
    return tuple(rows)
