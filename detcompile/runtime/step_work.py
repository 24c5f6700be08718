"""From a planned step to what a worker needs to run it."""

from collections.abc import Sequence as SequenceOf

import numpy as np

from detcompile.runtime.sampling import SampleRow
from detcompile.runtime.sequence import Sequence
from detcompile.runtime.step_builder import BlockTables, StepEntry, build_arrays
from detcompile.runtime.worker import PromptRows, StepWork

__all__ = ["build_work"]


def build_work(
    entries: SequenceOf[StepEntry],
    samples: SequenceOf[Sequence],
    prompts: SequenceOf[StepEntry],
    tables: BlockTables,
    block_size: int,
    pending: dict[Sequence, int],
) -> StepWork:
    """The arrays of a step; its rows of logits are those of ``samples`` and then all of ``prompts``.

    Args:
        entries: the sequences of the step, in their order; the others below are among them.
        samples: sequences that draw a token. prompts: entries whose prompt logprobs are wanted.
        pending: rows of the previous step's sampled tokens that are the newest token of a sequence.
    """
    sequences = [entry.sequence for entry in entries]
    width = max(len(table) for sequence in sequences for table in sequence.block_tables)
    arrays = build_arrays(entries, tables.rows(sequences, width), block_size, pending)
    if len(samples) < len(sequences) or prompts:
        first = dict(zip(sequences, arrays.cu_seqlens[:-1].tolist()))
        last = dict(zip(sequences, arrays.logits_to_keep.tolist()))
        kept = [last[sequence] for sequence in samples]
        for sequence, _, num_tokens in prompts:
            kept += range(first[sequence], first[sequence] + num_tokens)
        arrays = arrays._replace(logits_to_keep=np.array(kept or [0], np.int64))  # a graph gives one row at least
    return StepWork(arrays, tuple(map(_sample_row, samples)), _prompt_rows(prompts, len(samples)))


def _sample_row(sequence: Sequence) -> SampleRow:
    return SampleRow(
        params=sequence.sampling,
        position=sequence.num_tokens,
        num_generated=sequence.num_generated,
        sample_index=sequence.sample_index,
        key=sequence,
        token_ids=sequence.token_ids,
    )


def _prompt_rows(entries: SequenceOf[StepEntry], start: int) -> tuple[PromptRows, ...]:
    rows = []
    for sequence, first, num_tokens in entries:
        most = min(num_tokens, sequence.num_prompt_tokens - 1 - first)
        targets = tuple(sequence.token_ids[first + 1 : first + 1 + most])
        rows.append(PromptRows(start, targets, sequence.sampling.prompt_logprobs or 0))
        start += num_tokens
    return tuple(rows)
