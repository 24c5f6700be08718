"""The block tables of running sequences, kept from step to step.

Legend: G KV groups, S sequences, W width of the block tables.
"""

from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray

from detcompile.runtime.requests.sequence import Sequence

__all__ = ["BlockTables"]


class BlockTables:
    """The block tables of running sequences as one array, [G, seats, W] int32: a step gathers its rows at once.

    A sequence takes a seat when it is first seen and keeps it until ``leave``; only blocks new since then are written.
    """

    def __init__(self, num_groups: int, num_seats: int, width: int) -> None:
        self._array = np.zeros((num_groups, num_seats, width), np.int32)
        self._free = list(reversed(range(num_seats)))
        self._seats: dict[Sequence, tuple[int, list[int]]] = {}  # seat, blocks written of each group

    def leave(self, sequence: Sequence) -> None:
        """Give the sequence's seat back, if it has one; its blocks are no longer known."""
        seat = self._seats.pop(sequence, None)
        if seat is not None:
            self._free.append(seat[0])

    def changed(self, sequence: Sequence, first: int) -> None:
        """The sequence's blocks from entry ``first`` on are others now."""
        seat = self._seats.get(sequence)
        if seat is not None:
            seat[1][:] = [min(first, done) for done in seat[1]]

    def row(self, sequence: Sequence, width: int) -> NDArray[np.int32]:
        """[G, 1, width], a view; what stands behind the sequence's own blocks is any block."""
        seat = self._seat(sequence)
        return self._array[:, seat : seat + 1, :width]

    def rows(self, sequences: SequenceOf[Sequence], width: int) -> NDArray[np.int32]:
        """[G, S, width], copied; otherwise as ``row``."""
        return self._array[:, [self._seat(sequence) for sequence in sequences], :width]

    def _seat(self, sequence: Sequence) -> int:
        found = self._seats.get(sequence)
        if found is None:
            found = self._seats[sequence] = (self._free.pop(), [0] * len(sequence.block_tables))
        seat, written = found
        for group, table in enumerate(sequence.block_tables):
            done = written[group]
            if len(table) != done:
                self._array[group, seat, done : len(table)] = table[done:]
                written[group] = len(table)
        return seat
