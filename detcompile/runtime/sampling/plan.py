"""SamplingPlan: inputs of one step's sampler, laid out on the host and moved to the device in one copy.

Rows with the same needs form a group and are processed together. The order of a plan's rows does not affect results.

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
from detcompile.runtime.sampling.filters import Filters
from detcompile.runtime.sampling.penalties import TokenCounts
from detcompile.runtime.sampling.sampling_tensors import (
    PackedTensors,
    SampleRow,
    SamplingTensors,
    allowed_tensors,
    bias_tensors,
    drawing_tensors,
    fresh_tensors,
    mask_tensors,
    penalty_tensors,
    proposal_tensors,
)

GREEDY = SamplingParams(temperature=0.0)


class RowNeeds(NamedTuple):
    """Operations that a row needs beyond an argmax."""

    biased: bool
    restricted: bool
    masked: bool
    penalized: bool
    drawn: bool
    filtered: bool
    proposed: bool
    reported: bool  # with log-probabilities in the distribution that it is drawn from

    @property
    def changed(self) -> bool:
        """True if the row's logits differ from the model's."""
        return self.biased or self.restricted or self.masked or self.penalized


class RowGroup(NamedTuple):
    """Rows ``start:stop`` of a plan's tensors: equal needs, and few enough to be processed at once."""

    needs: RowNeeds
    start: int
    stop: int
    bias_start: int
    bias_stop: int
    allowed_start: int
    allowed_stop: int
    mask_start: int
    mask_stop: int
    first_row: int | None  # first row of the logits, if the group's rows are consecutive
    filters: Filters


class SamplingPlan(NamedTuple):
    """Made by ``Sampler.prepare`` for one call of the sampler."""

    num_rows: int
    groups: tuple[RowGroup, ...]
    tensors: PackedTensors | None  # None if an argmax is enough
    num_slots: int  # of TokenCounts; 0 if no row has penalties
    logprob_rows: tuple[int, ...]  # rows that want logprobs, in the order of Sampled.logprobs
    num_logprobs: int  # most alternatives that any row wants
    num_reported: int = 0  # largest number of likeliest tokens that a reported row wants
    distributions: tuple[Tensor, ...] = ()  # [V] on the device, from which guesses were drawn


def plan_rows(
    rows: Sequence[SampleRow],
    counts: TokenCounts,
    device: torch.device,
    eos_token_ids: Sequence[int],
    at_once: int,
    refused: dict[int, Exception] | None = None,
) -> SamplingPlan:
    """Plan a step with groups of up to ``at_once`` rows.

    Args:
        refused: receives the exceptions of rows that cannot be planned, by index; each such row is planned as a greedy
            row, whose token must be ignored. None re-raises the exception.

    Raises:
        InvalidInput: a sampled row has no seed, or a biased token has no logit.
    """
    slots: dict[Hashable, int] = {}
    try:
        return _plan(rows, counts, device, eos_token_ids, at_once, slots)
    except Exception as error:
        alone = refused is not None and not ran_out_of_memory(error)
        errors = {} if not alone else _faulty(rows, counts, device, eos_token_ids, slots)
        if refused is None or not errors:
            raise
        refused |= errors
    for index in errors:
        counts.forget(rows[index].key)
    sound = [
        row._replace(params=GREEDY, key=None, token_ids=(), mask=None, proposals=None) if index in errors else row
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
    """Return the rows that cannot be planned even alone, with their exceptions."""
    errors: dict[int, Exception] = {}
    for index, row in enumerate(rows):
        try:
            _plan([row], counts, device, eos_token_ids, 1, slots, fresh=False)
        except Exception as error:
            errors[index] = error
    return errors


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
    """Plan a step. ``slots`` keeps placed rows across retries, because a row may be placed only once per step."""
    if all(row.params.plain and not row.forbidden and row.mask is None for row in rows):
        return SamplingPlan(len(rows), (), None, 0, (), 0)
    biases = [_bias(row, eos_token_ids, counts.vocab_size) for row in rows]
    needs = [_needs(row, bool(bias)) for row, bias in zip(rows, biases)]
    special = sorted((i for i, need in enumerate(needs) if any(need)), key=lambda i: needs[i])
    logprob_rows = tuple(i for i, row in enumerate(rows) if row.params.logprobs is not None)
    if not special and not logprob_rows:
        return SamplingPlan(len(rows), (), None, 0, (), 0)
    groups, limits = _groups(rows, special, needs, biases, at_once)
    special_rows = [rows[i] for i in special]
    tensors: SamplingTensors = {**drawing_tensors(special_rows), **limits}
    tensors["rows"] = torch.tensor(special, dtype=torch.int64, device="cpu")
    tensors["logprob_rows"] = torch.tensor(logprob_rows, dtype=torch.int64, device="cpu")
    distributions: list[Tensor] = []
    if any(need.proposed for need in needs):
        tensors |= proposal_tensors(special_rows, distributions)
    reported = [i for i in special if needs[i].reported]
    if reported:
        order = sorted(range(len(reported)), key=reported.__getitem__)
        tensors["reported_order"] = torch.tensor(order, dtype=torch.int64, device="cpu")
    penalized = any(need.penalized for need in needs)
    if penalized:
        tensors |= penalty_tensors(special_rows, counts, slots)
    if penalized and fresh:
        tensors |= fresh_tensors(counts)
    return SamplingPlan(
        len(rows),
        tuple(groups),
        PackedTensors.of(tensors, device),
        counts.num_slots if penalized else 0,
        logprob_rows,
        max((rows[i].params.logprobs or 0 for i in logprob_rows), default=0),
        max((rows[i].params.sampling_logprobs or 0 for i in reported), default=0),
        tuple(distributions),
    )


def _needs(row: SampleRow, biased: bool) -> RowNeeds:
    params = row.params
    drawn = not params.greedy
    if drawn and params.seed is None:
        raise InvalidInput("a request that samples needs a seed: call SamplingParams.seeded() first")
    proposed = drawn and row.proposals is not None
    masked = row.mask is not None
    filtered, reported = drawn and params.filtered, drawn and params.sampling_logprobs is not None
    return RowNeeds(biased, params.restricted, masked, params.penalized, drawn, filtered, proposed, reported)


def _bias(row: SampleRow, eos_token_ids: Sequence[int], vocab_size: int) -> dict[int, float]:
    params = row.params
    biases = params.logit_bias or {}
    if row.num_generated < params.min_tokens:
        stops = (*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids))
        biases = biases | dict.fromkeys(stops, -math.inf)
    if row.forbidden:
        biases = biases | dict.fromkeys(row.forbidden, -math.inf)
    if biases and not (min(biases) >= 0 and max(biases) < vocab_size):  # a GPU kernel would crash the process
        raise InvalidInput(f"a bias of token {max(biases)} or {min(biases)}: the logits are of 0 to {vocab_size - 1}")
    return biases


def _groups(
    rows: Sequence[SampleRow], special: list[int], needs: list[RowNeeds], biases: list[dict[int, float]], at_once: int
) -> tuple[list[RowGroup], SamplingTensors]:
    """Split rows into runs of equal needs; biases and allowed tokens give the row within its group."""
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
            row_biases, allowed = biases[special[stop]], rows[special[stop]].params.allowed_token_ids or ()
            bias_rows += [stop - start] * len(row_biases)
            bias_tokens += row_biases.keys()
            bias_values += row_biases.values()
            allowed_rows += [stop - start] * len(allowed)
            allowed_tokens += allowed
            mask = rows[special[stop]].mask
            masks += [] if mask is None else [mask]
            stop += 1
        first, last = special[start], special[stop - 1]
        first_row = first if last - first == stop - 1 - start else None  # rows of equal needs ascend
        entries = bias_start, len(bias_rows), allowed_start, len(allowed_rows), mask_start, len(masks)
        filters = Filters(*map(any, zip(*(rows[i].params.filters for i in special[start:stop]))))
        groups.append(RowGroup(need, start, stop, *entries, first_row, filters))
        start = stop
    limits = allowed_tensors(allowed_rows, allowed_tokens) | mask_tensors(masks)
    return groups, bias_tensors(bias_rows, bias_tokens, bias_values) | limits
