"""Columns: what the sampler reads of the rows that need more than an argmax, built on the host, copied in one piece.

Legend: Q rows that need more than an argmax, B biased (row, token) pairs, A allowed ones, C guesses of a row at most, L
rows that want logprobs, M masked ones of W words each, N requests whose token counts are new, E distinct tokens of
theirs.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple, TypedDict, cast

import numpy as np
import torch
from torch import Tensor

from detcompile.runtime.grammars.matcher import Mask
from detcompile.runtime.sampling.filters import NO_LIMIT, PROBABILITY_UNIT
from detcompile.runtime.sampling.penalties import TokenCounts
from detcompile.runtime.sampling.philox import noise_keys
from detcompile.runtime.sampling.rejection import ACCEPTANCE_STREAM, CERTAIN, NO_GUESS, RESIDUAL_STREAM
from detcompile.runtime.sampling.rows import SampleRow

__all__ = [
    "Columns",
    "PackedColumns",
    "allowed_columns",
    "bias_columns",
    "drawing_columns",
    "fresh_columns",
    "mask_columns",
    "penalty_columns",
    "proposal_columns",
]

ALIGNMENT = 16  # bytes; each column begins at a multiple


class Columns(TypedDict, total=False):
    """Small tensors by name; those of a need that no row has are absent."""

    rows: Tensor  # [Q] int64: each row's index among the logits
    logprob_rows: Tensor  # [L] int64: the same of rows that want logprobs

    # Biases: each is added to one logit.
    bias_rows: Tensor  # [B] int64: row within its group
    bias_tokens: Tensor  # [B] int64
    bias_values: Tensor  # [B] fp32

    # The only tokens of rows that may draw no others.
    allowed_rows: Tensor  # [A] int64: row within its group
    allowed_tokens: Tensor  # [A] int64

    # Tokens that a grammar lets a row draw: the rows of a group that is masked, group by group.
    masks: Tensor  # [M, 4 W] uint8: a bit a token, lowest first

    # Draws: noise, temperature and filters.
    keys: Tensor  # [Q, 5] int64, of ``philox.noise_keys``
    temperature: Tensor  # [Q, 1] fp32
    top_k: Tensor  # [Q, 1] int64: most tokens that are kept
    mass_limit: Tensor  # [Q, 1] int64: a token is kept while those before it have less of PROBABILITY_UNIT
    min_p: Tensor  # [Q, 1] fp64: a token is kept from this share of the likeliest one's probability on

    # Guesses to accept or reject, as ``rejection.resolve`` takes them.
    guesses: Tensor  # [Q, C] int64
    sources: Tensor  # [Q, C] int64
    acceptance_keys: Tensor  # [Q, 5] int64
    residual_keys: Tensor  # [Q, 5] int64

    # Penalties, and the TokenCounts that they follow.
    slots: Tensor  # [Q] int64: slot of the row's counts; -1 where it has no penalties
    repetition: Tensor  # [Q, 1] fp32
    frequency: Tensor  # [Q, 1] fp32
    presence: Tensor  # [Q, 1] fp32
    fresh_slots: Tensor  # [N] int64; this and the rest are FreshCounts
    fresh_entry_slots: Tensor  # [E] int64
    fresh_entry_tokens: Tensor  # [E] int64
    fresh_entry_words: Tensor  # [E] int32


class PackedColumns(NamedTuple):
    """Columns in one buffer of host memory, pinned for CUDA, that travel as one copy which nobody waits for."""

    buffer: Tensor  # [bytes] uint8
    places: dict[str, tuple[int, torch.Size, torch.dtype]]  # first byte, shape and dtype of each

    @staticmethod
    def of(columns: Columns, device: torch.device) -> "PackedColumns":
        """Columns on the CPU, packed for ``device``."""
        tensors = cast(dict[str, Tensor], columns)
        places, size = {}, 0
        for name, tensor in tensors.items():
            places[name] = (size, tensor.shape, tensor.dtype)
            size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        buffer = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
        packed = PackedColumns(buffer, places)
        for name, place in packed._views(buffer).items():
            place.copy_(tensors[name])
        return packed

    def to(self, device: torch.device) -> Columns:
        """The columns on ``device``, views of one buffer."""
        return cast(Columns, self._views(self.buffer.to(device, non_blocking=True)))

    def _views(self, buffer: Tensor) -> dict[str, Tensor]:
        return {
            name: buffer[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            for name, (start, shape, dtype) in self.places.items()
        }


def bias_columns(rows: list[int], tokens: list[int], values: list[float]) -> Columns:
    """Biases, each with the row within its group, its token and what is added."""
    return {
        "bias_rows": torch.tensor(rows, dtype=torch.int64, device="cpu"),
        "bias_tokens": torch.tensor(tokens, dtype=torch.int64, device="cpu"),
        "bias_values": torch.tensor(values, dtype=torch.float32, device="cpu"),
    }


def allowed_columns(rows: list[int], tokens: list[int]) -> Columns:
    """Tokens that may be drawn, each with the row within its group."""
    return {
        "allowed_rows": torch.tensor(rows, dtype=torch.int64, device="cpu"),
        "allowed_tokens": torch.tensor(tokens, dtype=torch.int64, device="cpu"),
    }


def mask_columns(masks: list[Mask]) -> Columns:
    """Masks [W] of M rows as bytes."""
    return {"masks": torch.from_numpy(np.stack(masks).view(np.uint8))} if masks else {}


def drawing_columns(rows: list[SampleRow]) -> Columns:
    """Noise keys, temperatures and filters of Q rows, greedy ones among them, which nobody draws."""
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


def proposal_columns(rows: list[SampleRow], distributions: list[Tensor]) -> Columns:
    """Guesses and their sources, and noise keys of their own; known distributions are appended."""
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


def penalty_columns(rows: list[SampleRow], counts: TokenCounts, slots: dict[Hashable, int]) -> Columns:
    """Penalties and slots; rows that have none in ``slots`` yet are placed last, as they can be only once a step."""
    params = [row.params for row in rows]
    penalties: Columns = {
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
    return {"slots": torch.tensor(own, dtype=torch.int64, device="cpu"), **penalties}


def fresh_columns(counts: TokenCounts) -> Columns:
    """What the requests that were placed since the last call start from."""
    fresh = counts.fresh()
    return {
        "fresh_slots": fresh.slots,
        "fresh_entry_slots": fresh.entry_slots,
        "fresh_entry_tokens": fresh.entry_tokens,
        "fresh_entry_words": fresh.entry_words,
    }


def _column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=dtype, device="cpu").unsqueeze(1)
