"""Repetition, presence and frequency penalties, from token counts kept on the device.

While the host plans a step, it may not know the previous step's tokens yet. The counts of a request are therefore built
once from its token ids and then updated on the device. They depend only on the token ids: if forgotten and rebuilt,
they are the same.

Legend: R rows, V vocabulary size, S slots (requests with penalties).
"""

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
        self._fresh: list[tuple[int, np.ndarray, np.ndarray]] = []

    def place(self, key: Hashable, token_ids: Sequence[int], position: int, num_generated: int) -> int:
        """Return the slot of a request that draws token ``position``, output token ``num_generated`` (from 0).

        ``token_ids`` are read only if the request is new, and must then be all ``position`` tokens.
        """
        if key not in self._slot_of:
            assert len(token_ids) == position, (
                f"counts of request {key!r} start from {len(token_ids)} of its {position} tokens: give all of them,"
                " and forget a request before rebuilding its counts"
            )
            tokens, words = self._starting_words(token_ids, position - num_generated)  # may raise: before any change
            self._slot_of[key] = self._new_slot()
            self._num_tokens[key] = position
            self._fresh.append((self._slot_of[key], tokens, words))
        counted = self._num_tokens[key]
        assert counted == position, f"request {key!r} draws token {position}, its counts hold {counted} tokens"
        self._num_tokens[key] += 1
        return self._slot_of[key]

    def forget(self, key: Hashable) -> None:
        """Free the slot of a request, if it has one."""
        if key in self._slot_of:
            slot = self._slot_of.pop(key)
            self._free_slots.append(slot)
            self._fresh = [fresh for fresh in self._fresh if fresh[0] != slot]
            del self._num_tokens[key]

    def fresh(self) -> FreshCounts:
        """Return the starting counts of requests placed since the last call."""
        slots, tokens, words = zip(*self._fresh) if self._fresh else ((), (), ())
        entry_slots = np.repeat(np.array(slots, dtype=np.int64), [len(t) for t in tokens])
        self._fresh = []
        all_tokens, all_words = (torch.from_numpy(np.concatenate(parts or [np.empty(0)])) for parts in (tokens, words))
        new_slots = torch.tensor(slots, dtype=torch.int64, device="cpu")
        return FreshCounts(new_slots, torch.from_numpy(entry_slots), all_tokens.long(), all_words.int())

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

    def _starting_words(self, token_ids: Sequence[int], num_prompt_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the distinct tokens and their words."""
        ids = np.asarray(token_ids, dtype=np.int64)
        assert ((ids >= 0) & (ids < self.vocab_size)).all(), "counts start from tokens that the host knows"
        tokens, place = np.unique(ids, return_inverse=True)
        words = 2 * np.bincount(place[num_prompt_tokens:], minlength=len(tokens))
        words[place[:num_prompt_tokens]] += 1
        return tokens, words


def penalize(logits: Tensor, words: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor) -> Tensor:
    """Apply penalties [R, 1] fp32 to logits [R, V] fp32, given the words [R, V] of ``TokenCounts``."""
    times = words >> 1
    less = torch.where(logits > 0, logits / repetition, logits * repetition)
    repeated = torch.where(words > 0, less, logits)
    return repeated - frequency * times - presence * (times > 0)
