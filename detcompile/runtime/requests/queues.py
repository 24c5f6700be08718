"""Queues of running and waiting sequences, ordered by urgency.

Urgency is (priority - steps waited // aging, arrival). The most urgent sequence is admitted first and never preempted.
Every sequence becomes the most urgent one in time: waiting ``aging`` steps counts as one priority level, so later
arrivals cannot pass it forever.
"""

from collections.abc import Iterator

from detcompile.runtime.requests.sequence import Sequence


class Queues:
    """Tracks each sequence of an engine from arrival to end. Blocks are managed elsewhere.

    Args:
        aging: steps of waiting that make a sequence one priority level more urgent.

    Attributes:
        running: running sequences, in order of admission.
        waiting: waiting sequences that may be planned, in any order.
        aside: waiting sequences held back while others are served alone.
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
        """Return the sort key of a sequence; the smallest key is the most urgent."""
        waited = self.step - self._waiting_since[sequence]
        return sequence.priority - waited // self._aging, sequence.arrival, sequence.sample_index

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that has just arrived."""
        self._waiting_since.setdefault(sequence, self.step)
        self._wait(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Return a running sequence to the waiting queue."""
        del self.running[sequence]
        self._wait(sequence)

    def leave_alone(self, sequences: frozenset[Sequence] | None) -> None:
        """Hold back all waiting and arriving sequences except these; None holds back nothing."""
        self._alone = sequences
        waiting = [*self.waiting, *self.aside]
        self.waiting[:], self.aside[:] = [], []
        for sequence in waiting:
            self._wait(sequence)

    def remove(self, sequence: Sequence) -> bool:
        """Forget a finished or canceled sequence. Return True if it was running."""
        self._waiting_since.pop(sequence)
        if sequence in self.running:
            del self.running[sequence]
            return True
        (self.waiting if sequence in self.waiting else self.aside).remove(sequence)
        return False

    def _wait(self, sequence: Sequence) -> None:
        (self.waiting if self._alone is None or sequence in self._alone else self.aside).append(sequence)
