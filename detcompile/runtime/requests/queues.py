"""Queues: the sequences that run and those that wait, and which of them is the most urgent.

Urgency: (priority - steps waited // aging, arrival). The most urgent sequence is never preempted and is admitted first;
every other one becomes the most urgent in time, since nothing that arrives later can pass it after ``aging`` steps for
each priority between them.
"""

from collections.abc import Iterator

from detcompile.runtime.requests.sequence import Sequence

__all__ = ["Queues"]


class Queues:
    """Where each sequence of an engine stands, from its arrival to its end; its blocks are somebody else's.

    Args:
        aging: steps after which a waiting sequence counts as one priority more urgent.

    Attributes:
        running: sequences that run, in the order of their admission.
        waiting: sequences that wait and may be planned, in any order.
        aside: sequences that wait while others are served alone.
        step: steps planned so far.
    """

    def __init__(self, aging: int) -> None:
        self.running: dict[Sequence, None] = {}
        self.waiting: list[Sequence] = []
        self.aside: list[Sequence] = []
        self.step = 0
        self._aging = aging
        self._waiting_since: dict[Sequence, int] = {}
        self._alone: frozenset[Sequence] | None = None

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting_since)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._waiting_since

    def urgency(self, sequence: Sequence) -> tuple[int, int, int]:
        """Sort key of a sequence: the smallest is the most urgent."""
        waited = self.step - self._waiting_since[sequence]
        return sequence.priority - waited // self._aging, sequence.arrival, sequence.sample_index

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait that has just arrived."""
        self._waiting_since.setdefault(sequence, self.step)
        self._wait(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Let a running sequence wait again."""
        del self.running[sequence]
        self._wait(sequence)

    def leave_alone(self, sequences: frozenset[Sequence] | None) -> None:
        """Set all others that wait aside, and those that come, until this is called again; None sets none aside."""
        self._alone = sequences
        waiting = [*self.waiting, *self.aside]
        self.waiting[:], self.aside[:] = [], []
        for sequence in waiting:
            self._wait(sequence)

    def remove(self, sequence: Sequence) -> bool:
        """Forget a finished or cancelled sequence; returns whether it was running."""
        self._waiting_since.pop(sequence)
        if sequence in self.running:
            del self.running[sequence]
            return True
        (self.waiting if sequence in self.waiting else self.aside).remove(sequence)
        return False

    def _wait(self, sequence: Sequence) -> None:
        (self.waiting if self._alone is None or sequence in self._alone else self.aside).append(sequence)
