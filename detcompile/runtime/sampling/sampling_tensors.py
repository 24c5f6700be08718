"""SamplingTensors: inputs of the sampler for rows that need more than an argmax, built on the host.

PackedTensors moves them to the device in one copy.

Legend: Q rows that need more than an argmax, B biased (row, token) pairs, A allowed ones, C guesses per row at most, L
rows that want logprobs, M masked rows of W words each, N requests whose token counts are new, E distinct tokens of
theirs.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple, TypedDict, cast

import numpy as np
import torch
from torch import Tensor

from detcompile.runtime.grammars.matcher import Mask
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.runtime.sampling.filters import NO_LIMIT, PROBABILITY_UNIT
from detcompile.runtime.sampling.penalties import TokenCounts
from detcompile.runtime.sampling.philox import noise_keys
from detcompile.runtime.sampling.rejection import ACCEPTANCE_STREAM, CERTAIN, NO_GUESS, RESIDUAL_STREAM, Proposals

ALIGNMENT = 16  # bytes; each tensor begins at a multiple


class SampleRow(NamedTuple):
    """One row of logits to draw a token from, and its parameters.

    ``key`` and ``token_ids`` matter only with penalties: the first plan with a key reads the ``position`` tokens before
    it; later plans follow the drawn tokens on the device and read nothing.
    """

    params: SamplingParams  # seeded, unless greedy
    position: int  # index of the drawn token in its sequence
    num_generated: int = 0  # output tokens before it, including those still on the device
    sample_index: int = 0  # index among the n completions
    key: Hashable = None  # identifies the sequence
    token_ids: Sequence[int] = ()  # prompt, then output
    forbidden: tuple[int, ...] = ()  # tokens that would complete a bad word
    mask: Mask | None = None  # tokens that a grammar allows; None for all
    proposals: Proposals | None = None  # guesses to accept or reject; None draws without guesses


class SamplingTensors(TypedDict, total=False):
    """Small tensors by name; tensors that no row needs are absent."""

    rows: Tensor  # [Q] int64: index of each row among the logits
    logprob_rows: Tensor  # [L] int64: the same for rows that want logprobs
    reported_order: Tensor  # [P] int64: places of the reported rows, group by group, in the order of the logits

    # Biases, each added to one logit.
    bias_rows: Tensor  # [B] int64: row within its group
    bias_tokens: Tensor  # [B] int64
    bias_values: Tensor  # [B] fp32

    # The only tokens that restricted rows may draw.
    allowed_rows: Tensor  # [A] int64: row within its group
    allowed_tokens: Tensor  # [A] int64

    # Tokens that a grammar allows, for the rows of masked groups, group by group.
    masks: Tensor  # [M, 4 W] uint8: a bit a token, lowest first

    # Sampling: noise, temperature and filters.
    keys: Tensor  # [Q, 5] int64, from ``philox.noise_keys``
    temperature: Tensor  # [Q, 1] fp32
    top_k: Tensor  # [Q, 1] int64: number of tokens to keep
    mass_limit: Tensor  # [Q, 1] int64: keep a token while the more likely ones have less mass, in PROBABILITY_UNIT
    min_p: Tensor  # [Q, 1] fp64: keep tokens with at least this fraction of the highest probability

    # Guesses to accept or reject, for ``rejection.resolve``.
    guesses: Tensor  # [Q, C] int64
    sources: Tensor  # [Q, C] int64
    acceptance_keys: Tensor  # [Q, 5] int64
    residual_keys: Tensor  # [Q, 5] int64

    # Penalties and their TokenCounts.
    slots: Tensor  # [Q] int64: slot of the row's counts; -1 without penalties
    repetition: Tensor  # [Q, 1] fp32
    frequency: Tensor  # [Q, 1] fp32
    presence: Tensor  # [Q, 1] fp32
    fresh_slots: Tensor  # [N] int64; this and the following are FreshCounts
    fresh_entry_slots: Tensor  # [E] int64
    fresh_entry_tokens: Tensor  # [E] int64
    fresh_entry_words: Tensor  # [E] int32


class PackedTensors(NamedTuple):
    """Tensors in one host buffer, pinned for CUDA, so that one asynchronous copy moves them all."""

    buffer: Tensor  # [bytes] uint8
    places: dict[str, tuple[int, torch.Size, torch.dtype]]  # first byte, shape and dtype of each

    @staticmethod
    def of(small: SamplingTensors, device: torch.device) -> "PackedTensors":
        """Pack CPU tensors for ``device``."""
        tensors = cast(dict[str, Tensor], small)
        places, size = {}, 0
        for name, tensor in tensors.items():
            places[name] = (size, tensor.shape, tensor.dtype)
            size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        buffer = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
        packed = PackedTensors(buffer, places)
        for name, place in packed._views(buffer).items():
            place.copy_(tensors[name])
        return packed

    def to(self, device: torch.device) -> SamplingTensors:
        """Copy the buffer to ``device`` and return views of it."""
        return cast(SamplingTensors, self._views(self.buffer.to(device, non_blocking=True)))

    def _views(self, buffer: Tensor) -> dict[str, Tensor]:
        return {
            name: buffer[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            for name, (start, shape, dtype) in self.places.items()
        }


def bias_tensors(rows: list[int], tokens: list[int], values: list[float]) -> SamplingTensors:
    """Return biases: the row within its group, the token and the value of each."""
    return {
        "bias_rows": torch.tensor(rows, dtype=torch.int64, device="cpu"),
        "bias_tokens": torch.tensor(tokens, dtype=torch.int64, device="cpu"),
        "bias_values": torch.tensor(values, dtype=torch.float32, device="cpu"),
    }


def allowed_tensors(rows: list[int], tokens: list[int]) -> SamplingTensors:
    """Return tokens that may be drawn, each with the row within its group."""
    return {
        "allowed_rows": torch.tensor(rows, dtype=torch.int64, device="cpu"),
        "allowed_tokens": torch.tensor(tokens, dtype=torch.int64, device="cpu"),
    }


def mask_tensors(masks: list[Mask]) -> SamplingTensors:
    """Return masks [W] of M rows as bytes."""
    return {"masks": torch.from_numpy(np.stack(masks).view(np.uint8))} if masks else {}


def drawing_tensors(rows: list[SampleRow]) -> SamplingTensors:
    """Return noise keys, temperatures and filters of Q rows; greedy rows get unused entries."""
    params = [row.params for row in rows]
    keys = noise_keys([p.seed or 0 for p in params], [r.position for r in rows], [r.sample_index for r in rows])
    temperature = _column([p.temperature for p in params], torch.float32)
    top_k, mass_limit, min_p = filter_limits(params)
    return {"keys": keys, "temperature": temperature, "top_k": top_k, "mass_limit": mass_limit, "min_p": min_p}


def filter_limits(params: Sequence[SamplingParams]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the limits top_k, mass_limit and min_p of ``filtered``, [Q, 1] each."""
    masses = [max(1, int(p.top_p * PROBABILITY_UNIT)) if p.top_p < 1 else NO_LIMIT for p in params]
    top_k = _column([p.top_k if p.top_k > 0 else NO_LIMIT for p in params], torch.int64)
    return top_k, _column(masses, torch.int64), _column([p.min_p for p in params], torch.float64)


def proposal_tensors(rows: list[SampleRow], distributions: list[Tensor]) -> SamplingTensors:
    """Return guesses, their sources and their noise keys; known distributions are appended to ``distributions``."""
    most = max(len(row.proposals.tokens) for row in rows if row.proposals is not None)
    guesses = torch.full((len(rows), most), NO_GUESS, dtype=torch.int64, device="cpu")
    sources = torch.full((len(rows), most), CERTAIN, dtype=torch.int64, device="cpu")
    for index, row in enumerate(rows):
        if row.proposals is None:
            continue
        guesses[index, : len(row.proposals.tokens)] = torch.tensor(row.proposals.tokens, device="cpu")
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


def penalty_tensors(rows: list[SampleRow], counts: TokenCounts, slots: dict[Hashable, int]) -> SamplingTensors:
    """Return penalties and slots. Rows are placed last, because a row may be placed only once per step."""
    params = [row.params for row in rows]
    penalties: SamplingTensors = {
        "repetition": _column([p.repetition_penalty for p in params], torch.float32),
        "frequency": _column([p.frequency_penalty for p in params], torch.float32),
        "presence": _column([p.presence_penalty for p in params], torch.float32),
    }
    keys = [row.key for row in rows if row.params.penalized]
    assert len(set(keys)) == len(keys), "two rows of one step have the same key"
    for row in rows:
        if row.params.penalized and row.key not in slots:
            slots[row.key] = counts.place(row.key, row.token_ids, row.position, row.num_generated)
    row_slots = [slots[row.key] if row.params.penalized else -1 for row in rows]
    return {"slots": torch.tensor(row_slots, dtype=torch.int64, device="cpu"), **penalties}


def fresh_tensors(counts: TokenCounts) -> SamplingTensors:
    """Return the starting counts of requests placed since the last call."""
    fresh = counts.fresh()
    return {
        "fresh_slots": fresh.slots,
        "fresh_entry_slots": fresh.entry_slots,
        "fresh_entry_tokens": fresh.entry_tokens,
        "fresh_entry_words": fresh.entry_words,
    }


def _column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=dtype, device="cpu").unsqueeze(1)
