"""Quarantine: what engines have died with, served one at a time until it is known whether it is to blame.

A server's front judges its answers by it, and an engine over worker processes its requests.
"""

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from detcompile.runtime.requests.sampling_params import SamplingParams

__all__ = ["ALONE_DEATHS", "Quarantine"]

CROWD_DEATHS = 2  # engines that may die with an answer among others before it is served alone
ALONE_DEATHS = 2  # engines that may die with it alone before it is given up
TRIAL_TOKENS = 4  # tokens of a sample that are drawn alone: the steps in flight when an engine died are among them


class Suspect(Protocol):
    """An answer in the making.

    Attributes:
        params: what was asked.
        deaths: engines that ended while they had it among others, since it was last served alone.
        deaths_alone: engines that ended while they had nothing else.
    """

    params: SamplingParams
    deaths: int
    deaths_alone: int

    @property
    def finished(self) -> bool:
        """Whether no token comes any more."""

    @property
    def num_tokens(self) -> int:
        """Tokens drawn so far, over all samples."""


Answer = TypeVar("Answer", bound=Suspect)


class Quarantine(Generic[Answer]):
    """Says which of the answers that an engine died with have to be served alone, and which of them is.

    What kills an engine does so again: a sample is drawn from the same tokens with the same bits. An answer that has
    drawn some tokens past those at which an engine died is acquitted.

    Args:
        condemn: ends an answer that ALONE_DEATHS engines died with while they had nothing else.

    Attributes:
        suspects: answers that wait to be served alone.
        trial: the answer that is.
    """

    def __init__(self, condemn: Callable[[Answer], None]) -> None:
        self.suspects: list[Answer] = []
        self.trial: Answer | None = None
        self._condemn = condemn
        self._goal = 0

    def died_with(self, answer: Answer) -> bool:
        """An engine died with an answer; whether it may go on among others."""
        if answer is self.trial:
            self.trial = None
            answer.deaths_alone += 1
            if answer.deaths_alone >= ALONE_DEATHS:
                self._condemn(answer)
                return False
        else:
            answer.deaths += 1
            if answer.deaths < CROWD_DEATHS:
                return True
        self.suspects.append(answer)
        return False

    def begin(self) -> Answer:
        """The next answer to serve alone."""
        self.trial = self.suspects.pop(0)
        self._goal = self.trial.num_tokens + TRIAL_TOKENS * self.trial.params.n
        return self.trial

    def interrupt(self) -> None:
        """The engine of the trial is stopped: its answer is tried again."""
        if self.trial is not None:
            self.suspects.insert(0, self.trial)
            self.trial = None

    def acquits(self, answer: Answer) -> bool:
        """Whether an answer with news was served alone, and long enough; it is no suspect then."""
        if answer is not self.trial or not (answer.finished or answer.num_tokens >= self._goal):
            return False
        self.trial = None
        answer.deaths = answer.deaths_alone = 0
        return True

    def forget(self, answer: Answer) -> None:
        """Nobody waits for an answer any more."""
        if answer is self.trial:
            self.trial = None
        if answer in self.suspects:
            self.suspects.remove(answer)
