"""SamplingPlan: what the sampler of one step reads, laid out on the host, and one copy away from the device.

Rows with the same needs form a group and are worked on together. The order of a plan's rows never reaches a number.

Legend: R rows of a step, Q rows that need more than an argmax, V vocabulary size, B biased (row, token) pairs.
"""

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.runtime.device_memory import ran_out_of_memory
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.runtime.sampling.penalties import FreshCounts, TokenCounts
from detcompile.runtime.sampling.philox import noise_keys
from detcompile.runtime.sampling.rejection import ACCEPTANCE_STREAM, CERTAIN, NO_GUESS, RESIDUAL_STREAM, Proposals

__all__ = ["PackedTensors", "RowGroup", "RowNeeds", "SampleRow", "SamplingPlan", "plan_rows"]

PROBABILITY_UNIT = 2.0**56  # fixed-point probabilities: a row's sum stays far below 2^63
NO_LIMIT = torch.iinfo(torch.int64).max
ALIGNMENT = 16
GREEDY = SamplingParams(temperature=0.0)


class SampleRow(NamedTuple):
    """A row of logits, and whose it is.

    ``key`` and ``token_ids`` matter only with penalties: the first plan that holds a key reads all its ``position``
    tokens; later plans follow the drawn tokens on the device, and read nothing.
    """

    params: SamplingParams  # seeded, unless greedy
    position: int  # index in its sequence of the token that the row draws
    num_generated: int = 0  # tokens of the output before it, those still on the device included
    sample_index: int = 0  # which of the n completions
    key: Hashable = None  # of the sequence
    token_ids: Sequence[int] = ()  # prompt, then output
    proposals: Proposals | None = None  # guesses to accept or reject; None draws plainly


class RowNeeds(NamedTuple):
    """What a row needs beyond an argmax."""

    biased: bool
    penalised: bool
    drawn: bool
    filtered: bool
    proposed: bool


class RowGroup(NamedTuple):
    """Rows ``start:stop`` of a plan's columns, of one kind, few enough to be worked on at once."""

    needs: RowNeeds
    start: int
    stop: int
    bias_start: int
    bias_stop: int
    first_row: int | None  # of the logits, where the group is a run of them


class PackedTensors(NamedTuple):
    """Small tensors in one buffer of host memory, pinned for CUDA, that travel as one copy which nobody waits for."""

    buffer: Tensor
    places: dict[str, tuple[int, torch.Size, torch.dtype]]

    @staticmethod
    def of(tensors: dict[str, Tensor], device: torch.device) -> "PackedTensors":
        """``tensors`` are on the CPU."""
        places, size = {}, 0
        for name, tensor in tensors.items():
            places[name] = (size, tensor.shape, tensor.dtype)
            size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        buffer = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        packed = PackedTensors(buffer, places)
        for name, place in packed._views(buffer).items():
            place.copy_(tensors[name])
        return packed

    def to(self, device: torch.device) -> dict[str, Tensor]:
        """The tensors on ``device``, views of one buffer."""
        return self._views(self.buffer.to(device, non_blocking=True))

    def _views(self, buffer: Tensor) -> dict[str, Tensor]:
        return {
            name: buffer[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            for name, (start, shape, dtype) in self.places.items()
        }


class SamplingPlan(NamedTuple):
    """Made by ``Sampler.prepare``, used up by one call of the sampler."""

    num_rows: int
    groups: tuple[RowGroup, ...]
    columns: PackedTensors | None  # None where an argmax is all
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
        row._replace(params=GREEDY, key=None, token_ids=(), proposals=None) if index in found else row
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
    if all(row.params.plain for row in rows):
        return SamplingPlan(len(rows), (), None, 0, (), 0)
    biases = [_bias(row, eos_token_ids, counts.vocab_size) for row in rows]
    needs = [_needs(row, bool(bias)) for row, bias in zip(rows, biases)]
    special = sorted((i for i, need in enumerate(needs) if any(need)), key=lambda i: needs[i])
    logprob_rows = tuple(i for i, row in enumerate(rows) if row.params.logprobs is not None)
    if not special and not logprob_rows:
        return SamplingPlan(len(rows), (), None, 0, (), 0)
    groups, bias_columns = _groups(special, needs, biases, at_once)
    own = [rows[i] for i in special]
    columns = {"rows": torch.tensor(special, dtype=torch.int64), **_drawing_columns(own), **bias_columns}
    columns["logprob_rows"] = torch.tensor(logprob_rows, dtype=torch.int64)
    distributions: list[Tensor] = []
    if any(need.proposed for need in needs):
        columns |= _proposal_columns(own, distributions)
    penalised = any(need.penalised for need in needs)
    if penalised:
        columns |= _penalty_columns(own, counts, slots)
    if penalised and fresh:
        columns |= {f"fresh_{name}": value for name, value in zip(FreshCounts._fields, counts.fresh())}
    return SamplingPlan(
        len(rows),
        tuple(groups),
        PackedTensors.of(columns, device),
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
    return RowNeeds(biased, params.penalised, drawn, drawn and params.filtered, proposed)


def _bias(row: SampleRow, eos_token_ids: Sequence[int], vocab_size: int) -> dict[int, float]:
    params = row.params
    biases = params.logit_bias or {}
    if row.num_generated < params.min_tokens:
        stops = (*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids))
        biases = biases | dict.fromkeys(stops, -math.inf)
    if biases and not (min(biases) >= 0 and max(biases) < vocab_size):  # on a GPU it would end the process
        raise InvalidInput(f"a bias of token {max(biases)} or {min(biases)}: the logits are of 0 to {vocab_size - 1}")
    return biases


def _groups(
    special: list[int], needs: list[RowNeeds], biases: list[dict[int, float]], at_once: int
) -> tuple[list[RowGroup], dict[str, Tensor]]:
    """Runs of one kind, ``at_once`` rows at most; bias entries name the row within its group."""
    groups: list[RowGroup] = []
    bias_rows: list[int] = []
    bias_tokens: list[int] = []
    bias_values: list[float] = []
    start = 0
    while start < len(special):
        need, stop, bias_start = needs[special[start]], start, len(bias_rows)
        while stop < min(len(special), start + at_once) and needs[special[stop]] == need:
            bias_rows += [stop - start] * len(biases[special[stop]])
            bias_tokens += biases[special[stop]].keys()
            bias_values += biases[special[stop]].values()
            stop += 1
        first, last = special[start], special[stop - 1]
        first_row = first if last - first == stop - 1 - start else None  # rows of one kind ascend
        groups.append(RowGroup(need, start, stop, bias_start, len(bias_rows), first_row))
        start = stop
    return groups, {
        "bias_rows": torch.tensor(bias_rows, dtype=torch.int64),
        "bias_tokens": torch.tensor(bias_tokens, dtype=torch.int64),
        "bias_values": torch.tensor(bias_values, dtype=torch.float32),
    }


def _drawing_columns(rows: list[SampleRow]) -> dict[str, Tensor]:
    """Keys [Q, 5]; the rest [Q, 1]."""
    params = [row.params for row in rows]
    keys = noise_keys([p.seed or 0 for p in params], [r.position for r in rows], [r.sample_index for r in rows])
    limits = [max(1, int(p.top_p * PROBABILITY_UNIT)) if p.top_p < 1 else NO_LIMIT for p in params]
    return {
        "keys": keys,
        "temperature": _column([p.temperature for p in params], torch.float32),
        "top_k": _column([p.top_k if p.top_k > 0 else NO_LIMIT for p in params], torch.int64),
        "mass_limit": _column(limits, torch.int64),
        "min_p": _column([p.min_p for p in params], torch.float64),
    }


def _proposal_columns(rows: list[SampleRow], distributions: list[Tensor]) -> dict[str, Tensor]:
    """Guesses and their sources [Q, C], and noise keys [Q, 5] of their own; known distributions are appended."""
    most = max(len(row.proposals.tokens) for row in rows if row.proposals is not None)
    guesses = torch.full((len(rows), most), NO_GUESS, dtype=torch.int64)
    sources = torch.full((len(rows), most), CERTAIN, dtype=torch.int64)
    for index, row in enumerate(rows):
        if row.proposals is None:
            continue
        guesses[index, : len(row.proposals.tokens)] = torch.tensor(row.proposals.tokens)
        for column, distribution in enumerate(row.proposals.distributions):
            if distribution is not None:
                sources[index, column] = len(distributions)
                distributions.append(distribution)
    seeds, positions = [row.params.seed or 0 for row in rows], [row.position for row in rows]
    return {
        "guesses": guesses,
        "sources": sources,
        "acceptance_keys": noise_keys(seeds, positions, [ACCEPTANCE_STREAM + row.sample_index for row in rows]),
        "residual_keys": noise_keys(seeds, positions, [RESIDUAL_STREAM + row.sample_index for row in rows]),
    }


def _penalty_columns(rows: list[SampleRow], counts: TokenCounts, slots: dict[Hashable, int]) -> dict[str, Tensor]:
    """Slots [Q] (-1 where there are no penalties) and penalties [Q, 1]; rows are placed last, as only once they can."""
    params = [row.params for row in rows]
    penalties = {
        "repetition": _column([p.repetition_penalty for p in params], torch.float32),
        "frequency": _column([p.frequency_penalty for p in params], torch.float32),
        "presence": _column([p.presence_penalty for p in params], torch.float32),
    }
    keys = [row.key for row in rows if row.params.penalised]
    assert len(set(keys)) == len(keys), "two rows of one step have the same key"
    for row in rows:
        if row.params.penalised and row.key not in slots:
            slots[row.key] = counts.place(row.key, row.token_ids, row.position, row.num_generated)
    own = [slots[row.key] if row.params.penalised else -1 for row in rows]
    return {"slots": torch.tensor(own, dtype=torch.int64), **penalties}


def _column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=dtype).unsqueeze(1)
