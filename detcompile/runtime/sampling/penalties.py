"""Repetition, presence and frequency penalties, from token counts kept on the device.

While the host plans a step, it may not know the previous step's tokens yet. The counts of a request are therefore built
once from its token ids and then updated on the device. They depend only on the token ids: if forgotten and rebuilt,
they are the same.

Legend: R rows, V vocabulary size, S slots (requests with penalties).
"""

import itertools
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class FreshCounts(NamedTuple):
    """Starting counts of a plan's new requests, as CPU tensors."""

    slots: Tensor  # [requests] int64
    entry_slots: Tensor  # [entries] int64
    entry_tokens: Tensor  # [entries] int64, distinct within a slot
    entry_words: Tensor  # [entries] int32


class TokenCounts:
    """One word per request and token: twice its count in the output, plus 1 if it is in the prompt.

    ``place`` and ``fresh`` run on the host during planning; ``admit`` and ``count`` run on the device, in planning
    order.

    Args:
        num_slots: requests with memory from the start. Beyond them the counts grow by copying, which needs free memory.
    """

    def __init__(self, vocab_size: int, device: torch.device, num_slots: int = 0) -> None:
        self.words = torch.zeros(num_slots, vocab_size, dtype=torch.int32, device=device)  # [S, V]
        self.num_slots = 0
        self.vocab_size = vocab_size
        self._free_slots: list[int] = []
        self._slot_of: dict[Hashable, int] = {}
        self._num_tokens: dict[Hashable, int] = {}  # tokens counted once every planned step has run
        self._fresh: list[_Fresh] = []

    def place(self, key: Hashable, token_ids: Sequence[int], position: int, num_generated: int) -> int:
        """Return the slot of a request that draws token ``position``, output token ``num_generated`` (from 0).

        ``token_ids`` are read only if the request is new, and must then hold the ``position`` tokens before. New
        requests that are placed one after the other with the same list are counted together.
        """
        if key not in self._slot_of:
            assert len(token_ids) >= position, (
                f"counts of request {key!r} start from {len(token_ids)} of its {position} tokens: give all of them,"
                " and forget a request before rebuilding its counts"
            )
            ids = self._ids(token_ids)  # may raise: before any change
            self._slot_of[key] = self._new_slot()
            self._num_tokens[key] = position
            self._fresh.append(_Fresh(self._slot_of[key], token_ids, ids, position, position - num_generated))
        counted = self._num_tokens[key]
        assert counted == position, f"request {key!r} draws token {position}, its counts hold {counted} tokens"
        self._num_tokens[key] += 1
        return self._slot_of[key]

    def forget(self, key: Hashable) -> None:
        """Free the slot of a request, if it has one."""
        if key in self._slot_of:
            slot = self._slot_of.pop(key)
            self._free_slots.append(slot)
            self._fresh = [fresh for fresh in self._fresh if fresh.slot != slot]
            del self._num_tokens[key]

    def fresh(self) -> FreshCounts:
        """Return the starting counts of requests placed since the last call."""
        slots = torch.tensor([fresh.slot for fresh in self._fresh], dtype=torch.int64, device="cpu")
        every = [_starting_words(list(run)) for _, run in itertools.groupby(self._fresh, lambda fresh: id(fresh.ids))]
        self._fresh = []
        joined = [torch.from_numpy(np.concatenate(parts)) for parts in zip(*every)] or [
            torch.empty(0, device="cpu")
        ] * 3
        entry_slots, tokens, words = joined
        return FreshCounts(slots, entry_slots.long(), tokens.long(), words.int())

    def admit(self, num_slots: int, fresh: FreshCounts) -> None:
        """Write starting counts, which are on the device by now."""
        if num_slots > len(self.words):
            grown = self.words.new_zeros(max(num_slots, 2 * len(self.words)), self.vocab_size)
            grown[: len(self.words)] = self.words
            self.words = grown
        if len(fresh.slots):
            self.words.index_fill_(0, fresh.slots, 0)
            self.words.index_put_((fresh.entry_slots, fresh.entry_tokens), fresh.entry_words)

    def count(self, slots: Tensor, tokens: Tensor) -> None:
        """Add one drawn token to each of the distinct ``slots`` [R]."""
        self.words.index_put_((slots, tokens), self.words[slots, tokens] + 2)

    def _new_slot(self) -> int:
        if self._free_slots:
            return self._free_slots.pop()
        self.num_slots += 1
        return self.num_slots - 1

    def _ids(self, token_ids: Sequence[int]) -> np.ndarray:
        """Return token ids as an array: the last one, if it is of the same list."""
        last = self._fresh[-1] if self._fresh else None
        if last is not None and last.token_ids is token_ids and len(last.ids) == len(token_ids):
            return last.ids
        ids = np.asarray(token_ids, dtype=np.int64)
        assert ((ids >= 0) & (ids < self.vocab_size)).all(), "counts start from tokens that the host knows"
        return ids


class _Fresh(NamedTuple):
    """A new request, whose counts start from ``ids[:position]``."""

    slot: int
    token_ids: Sequence[int]
    ids: np.ndarray  # of token_ids
    position: int
    num_prompt_tokens: int


def _starting_words(run: list[_Fresh]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the slots, distinct tokens and words of requests with the same ids."""
    ids, num_prompt = run[0].ids, run[0].num_prompt_tokens
    assert all(fresh.num_prompt_tokens == num_prompt for fresh in run), "requests of one list have one prompt"
    positions = np.array([fresh.position for fresh in run])
    first, last = positions.min(), positions.max()
    tokens, place = np.unique(ids[:last], return_inverse=True)
    words = 2 * np.bincount(place[num_prompt:first], minlength=len(tokens))
    words[place[:num_prompt]] |= 1
    counts = np.zeros((last - first + 1, len(tokens)), np.int64)  # row i: at position first + i
    counts[0] = words
    counts[np.arange(1, len(counts)), place[first:last]] += 2
    rows = counts.cumsum(0)[positions - first]
    which, entries = np.nonzero(rows)
    return np.array([fresh.slot for fresh in run])[which], tokens[entries], rows[which, entries]


def penalize(logits: Tensor, words: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor) -> Tensor:
    """Apply penalties [R, 1] fp32 to logits [R, V] fp32, given the words [R, V] of ``TokenCounts``."""
    times = words >> 1
    less = torch.where(logits > 0, logits / repetition, logits * repetition)
    repeated = torch.where(words > 0, less, logits)
    return repeated - frequency * times - presence * (times > 0)
