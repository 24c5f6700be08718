"""SamplingPlan: what the sampler of one step reads, laid out on the host, and one copy away from the device.

Rows with the same needs form a group and are worked on together. The order of a plan's rows never reaches a number.

Legend: R rows of a step, V vocabulary size.
"""

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.runtime.device_memory import ran_out_of_memory
from detcompile.runtime.grammars.matcher import Mask
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.runtime.sampling.columns import (
    Columns,
    PackedColumns,
    allowed_columns,
    bias_columns,
    drawing_columns,
    fresh_columns,
    mask_columns,
    penalty_columns,
    proposal_columns,
)
from detcompile.runtime.sampling.penalties import TokenCounts
from detcompile.runtime.sampling.rows import SampleRow

__all__ = ["RowGroup", "RowNeeds", "SamplingPlan", "plan_rows"]

GREEDY = SamplingParams(temperature=0.0)


class RowNeeds(NamedTuple):
    """What a row needs beyond an argmax."""

    biased: bool
    restricted: bool
    masked: bool
    penalised: bool
    drawn: bool
    filtered: bool
    proposed: bool

    @property
    def changed(self) -> bool:
        """Whether the row's logits are others than the model's."""
        return self.biased or self.restricted or self.masked or self.penalised


class RowGroup(NamedTuple):
    """Rows ``start:stop`` of a plan's columns, of one kind, few enough to be worked on at once."""

    needs: RowNeeds
    start: int
    stop: int
    bias_start: int
    bias_stop: int
    allowed_start: int
    allowed_stop: int
    mask_start: int
    mask_stop: int
    first_row: int | None  # of the logits, where the group is a run of them


class SamplingPlan(NamedTuple):
    """Made by ``Sampler.prepare``, used up by one call of the sampler."""

    num_rows: int
    groups: tuple[RowGroup, ...]
    columns: PackedColumns | None  # None where an argmax is all
    num_slots: int  # of TokenCounts; 0 where no row has penalties
    logprob_rows: tuple[int, ...]  # rows that want logprobs, in the order of Sampled.logprobs
    num_logprobs: int  # the most alternatives that one of them wants
    distributions: tuple[Tensor, ...] = ()  # [V] on the device, that guesses were drawn from


def plan_rows(
    rows: Sequence[SampleRow],
    counts: TokenCounts,
    device: torch.device,
    eos_token_ids: Sequence[int],
    at_once: int,
    refused: dict[int, Exception] | None = None,
) -> SamplingPlan:
    """Lay out the step; ``at_once`` bounds the rows of a group.

    Args:
        refused: gets the rows that cannot be planned, by their index, with what they raised; each is planned as
            a greedy one, whose token nobody is to read. None: what one raises is raised.

    Raises:
        InvalidInput: a row that samples has no seed, or a bias of a token that has no logit.
    """
    slots: dict[Hashable, int] = {}
    try:
        return _plan(rows, counts, device, eos_token_ids, at_once, slots)
    except Exception as error:
        alone = refused is not None and not ran_out_of_memory(error)
        found = {} if not alone else _faulty(rows, counts, device, eos_token_ids, slots)
        if refused is None or not found:
            raise
        refused |= found
    for index in found:
        counts.forget(rows[index].key)
    sound = [
        row._replace(params=GREEDY, key=None, token_ids=(), mask=None, proposals=None) if index in found else row
        for index, row in enumerate(rows)
    ]
    return _plan(sound, counts, device, eos_token_ids, at_once, slots)


def _faulty(
    rows: Sequence[SampleRow],
    counts: TokenCounts,
    device: torch.device,
    eos_token_ids: Sequence[int],
    slots: dict[Hashable, int],
) -> dict[int, Exception]:
    """The rows that cannot be planned even alone."""
    found: dict[int, Exception] = {}
    for index, row in enumerate(rows):
        try:
            _plan([row], counts, device, eos_token_ids, 1, slots, fresh=False)
        except Exception as error:
            found[index] = error
    return found


def _plan(
    rows: Sequence[SampleRow],
    counts: TokenCounts,
    device: torch.device,
    eos_token_ids: Sequence[int],
    at_once: int,
    slots: dict[Hashable, int],
    *,
    fresh: bool = True,
) -> SamplingPlan:
    """``slots`` keeps those of rows that were placed, which a row is once a step, however often this is tried."""
    if all(row.params.plain and not row.forbidden and row.mask is None for row in rows):
        return SamplingPlan(len(rows), (), None, 0, (), 0)
    biases = [_bias(row, eos_token_ids, counts.vocab_size) for row in rows]
    needs = [_needs(row, bool(bias)) for row, bias in zip(rows, biases)]
    special = sorted((i for i, need in enumerate(needs) if any(need)), key=lambda i: needs[i])
    logprob_rows = tuple(i for i, row in enumerate(rows) if row.params.logprobs is not None)
    if not special and not logprob_rows:
        return SamplingPlan(len(rows), (), None, 0, (), 0)
    groups, changed = _groups(rows, special, needs, biases, at_once)
    own = [rows[i] for i in special]
    columns: Columns = {**drawing_columns(own), **changed}
    columns["rows"] = torch.tensor(special, dtype=torch.int64, device="cpu")
    columns["logprob_rows"] = torch.tensor(logprob_rows, dtype=torch.int64, device="cpu")
    distributions: list[Tensor] = []
    if any(need.proposed for need in needs):
        columns |= proposal_columns(own, distributions)
    penalised = any(need.penalised for need in needs)
    if penalised:
        columns |= penalty_columns(own, counts, slots)
    if penalised and fresh:
        columns |= fresh_columns(counts)
    return SamplingPlan(
        len(rows),
        tuple(groups),
        PackedColumns.of(columns, device),
        counts.num_slots if penalised else 0,
        logprob_rows,
        max((rows[i].params.logprobs or 0 for i in logprob_rows), default=0),
        tuple(distributions),
    )


def _needs(row: SampleRow, biased: bool) -> RowNeeds:
    params = row.params
    drawn = not params.greedy
    if drawn and params.seed is None:
        raise InvalidInput("a request that samples needs a seed: call SamplingParams.seeded() first")
    proposed = drawn and row.proposals is not None
    masked = row.mask is not None
    return RowNeeds(biased, params.restricted, masked, params.penalised, drawn, drawn and params.filtered, proposed)


def _bias(row: SampleRow, eos_token_ids: Sequence[int], vocab_size: int) -> dict[int, float]:
    params = row.params
    biases = params.logit_bias or {}
    if row.num_generated < params.min_tokens:
        stops = (*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids))
        biases = biases | dict.fromkeys(stops, -math.inf)
    if row.forbidden:
        biases = biases | dict.fromkeys(row.forbidden, -math.inf)
    if biases and not (min(biases) >= 0 and max(biases) < vocab_size):  # on a GPU it would end the process
        raise InvalidInput(f"a bias of token {max(biases)} or {min(biases)}: the logits are of 0 to {vocab_size - 1}")
    return biases


def _groups(
    rows: Sequence[SampleRow], special: list[int], needs: list[RowNeeds], biases: list[dict[int, float]], at_once: int
) -> tuple[list[RowGroup], Columns]:
    """Runs of one kind, ``at_once`` rows at most; biases and allowed tokens name the row within its group."""
    groups: list[RowGroup] = []
    bias_rows: list[int] = []
    bias_tokens: list[int] = []
    bias_values: list[float] = []
    allowed_rows: list[int] = []
    allowed_tokens: list[int] = []
    masks: list[Mask] = []
    start = 0
    while start < len(special):
        need, stop, mask_start = needs[special[start]], start, len(masks)
        bias_start, allowed_start = len(bias_rows), len(allowed_rows)
        while stop < min(len(special), start + at_once) and needs[special[stop]] == need:
            own, allowed = biases[special[stop]], rows[special[stop]].params.allowed_token_ids or ()
            bias_rows += [stop - start] * len(own)
            bias_tokens += own.keys()
            bias_values += own.values()
            allowed_rows += [stop - start] * len(allowed)
            allowed_tokens += allowed
            mask = rows[special[stop]].mask
            masks += [] if mask is None else [mask]
            stop += 1
        first, last = special[start], special[stop - 1]
        first_row = first if last - first == stop - 1 - start else None  # rows of one kind ascend
        entries = bias_start, len(bias_rows), allowed_start, len(allowed_rows), mask_start, len(masks)
        groups.append(RowGroup(need, start, stop, *entries, first_row))
        start = stop
    limits = allowed_columns(allowed_rows, allowed_tokens) | mask_columns(masks)
    return groups, bias_columns(bias_rows, bias_tokens, bias_values) | limits
