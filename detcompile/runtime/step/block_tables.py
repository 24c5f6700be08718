"""Block tables of running sequences, kept from step to step.

Legend: G KV groups, S sequences, W width of the block tables.
"""

from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray

from detcompile.runtime.requests.sequence import Sequence


class BlockTables:
    """Block tables of running sequences in one array, [G, slots, W] int32, from which a step gathers its rows.

    A sequence gets a slot when it is first seen and keeps it until ``remove``. Only new blocks are written.
    """

    def __init__(self, num_groups: int, num_slots: int, width: int) -> None:
        self._array = np.zeros((num_groups, num_slots, width), np.int32)
        self._free = list(reversed(range(num_slots)))
        self._slots: dict[Sequence, tuple[int, list[int]]] = {}  # slot, and blocks written per group

    def remove(self, sequence: Sequence) -> None:
        """Free the sequence's slot, if it has one."""
        entry = self._slots.pop(sequence, None)
        if entry is not None:
            self._free.append(entry[0])

    def changed(self, sequence: Sequence, first: int) -> None:
        """Rewrite the sequence's blocks from entry ``first`` on at its next use."""
        entry = self._slots.get(sequence)
        if entry is not None:
            entry[1][:] = [min(first, done) for done in entry[1]]

    def row(self, sequence: Sequence, width: int) -> NDArray[np.int32]:
        """Return a view [G, 1, width]; entries beyond the sequence's blocks are undefined."""
        slot = self._slot(sequence)
        return self._array[:, slot : slot + 1, :width]

    def rows(self, sequences: SequenceOf[Sequence], width: int) -> NDArray[np.int32]:
        """Return a copy [G, S, width]; entries beyond a sequence's blocks are undefined."""
        return self._array[:, [self._slot(sequence) for sequence in sequences], :width]

    def _slot(self, sequence: Sequence) -> int:
        entry = self._slots.get(sequence)
        if entry is None:
            entry = self._slots[sequence] = (self._free.pop(), [0] * len(sequence.block_tables))
        slot, written = entry
        for group, table in enumerate(sequence.block_tables):
            done = written[group]
            if len(table) != done:
                self._array[group, slot, done : len(table)] = table[done:]
                written[group] = len(table)
        return slot
