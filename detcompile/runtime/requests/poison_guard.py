"""PoisonRequestGuard: serve requests that crashed engines one at a time, until it is known which of them does.

A server's front uses it for its answers, and an engine over worker processes for its requests.
"""

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from detcompile.runtime.requests.sampling_params import SamplingParams

__all__ = ["ALONE_DEATHS", "PoisonRequestGuard"]

CROWD_DEATHS = 2  # engines that may die with an answer among others before it is served alone
ALONE_DEATHS = 2  # engines that may die with it alone before it is given up
ISOLATED_TOKENS = 4  # tokens of a sample that are drawn alone: the steps in flight when an engine died are among them


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


class PoisonRequestGuard(Generic[Answer]):
    """Says which of the answers that an engine died with have to be served alone, and which of them is.

    What kills an engine does so again: a sample is drawn from the same tokens with the same bits. An answer that has
    drawn some tokens past those at which an engine died is cleared.

    Args:
        block: ends an answer that ALONE_DEATHS engines died with while they had nothing else.

    Attributes:
        suspects: answers that wait to be served alone.
        isolated: the answer that is served alone.
    """

    def __init__(self, block: Callable[[Answer], None]) -> None:
        self.suspects: list[Answer] = []
        self.isolated: Answer | None = None
        self._block = block
        self._goal = 0

    def died_with(self, answer: Answer) -> bool:
        """An engine died with an answer; whether it may go on among others."""
        if answer is self.isolated:
            self.isolated = None
            answer.deaths_alone += 1
            if answer.deaths_alone >= ALONE_DEATHS:
                self._block(answer)
                return False
        else:
            answer.deaths += 1
            if answer.deaths < CROWD_DEATHS:
                return True
        self.suspects.append(answer)
        return False

    def isolate_next(self) -> Answer:
        """Return the next answer to serve alone."""
        self.isolated = self.suspects.pop(0)
        self._goal = self.isolated.num_tokens + ISOLATED_TOKENS * self.isolated.params.n
        return self.isolated

    def interrupt(self) -> None:
        """The engine of the isolated answer is stopped: it is tried again."""
        if self.isolated is not None:
            self.suspects.insert(0, self.isolated)
            self.isolated = None

    def clears(self, answer: Answer) -> bool:
        """Whether an answer with news was served alone, and long enough; it is no suspect then."""
        if answer is not self.isolated or not (answer.finished or answer.num_tokens >= self._goal):
            return False
        self.isolated = None
        answer.deaths = answer.deaths_alone = 0
        return True

    def forget(self, answer: Answer) -> None:
        """Nobody waits for an answer any more."""
        if answer is self.isolated:
            self.isolated = None
        if answer in self.suspects:
            self.suspects.remove(answer)
