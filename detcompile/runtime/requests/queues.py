"""Queues: the sequences that run and those that wait, and which of them is the most urgent.

Urgency: (priority - steps waited // aging, arrival). The most urgent sequence is never preempted and is admitted first;
every other one becomes the most urgent in time, since nothing that arrives later can pass it after ``aging`` steps for
each priority between them.
"""

from detcompile.runtime.requests.sequence import Sequence

__all__ = ["Queues"]


class Queues:
    """Where each sequence of an engine stands, from its arrival to its end; its blocks are somebody else's.

    Args:
        aging: steps after which a waiting sequence counts as one priority more urgent.

    Attributes:
        running: sequences that run, in the order of their admission.
        waiting: sequences that wait, in any order.
        step: steps planned so far.
    """

    def __init__(self, aging: int) -> None:
        self.running: dict[Sequence, None] = {}
        self.waiting: list[Sequence] = []
        self.step = 0
        self._aging = aging
        self._waiting_since: dict[Sequence, int] = {}

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._waiting_since

    def urgency(self, sequence: Sequence) -> tuple[int, int, int]:
        """Sort key of a sequence: the smallest is the most urgent."""
        waited = self.step - self._waiting_since[sequence]
        return sequence.priority - waited // self._aging, sequence.arrival, sequence.sample_index

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait that has just arrived."""
        self._waiting_since.setdefault(sequence, self.step)
        self.waiting.append(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Let a running sequence wait again."""
        del self.running[sequence]
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> bool:
        """Forget a finished or cancelled sequence; returns whether it was running."""
        self._waiting_since.pop(sequence)
        if sequence in self.running:
            del self.running[sequence]
            return True
        self.waiting.remove(sequence)
        return False
