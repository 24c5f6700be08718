"""PoisonRequestGuard: serve requests that crashed engines one at a time, until the culprit is known.

The server's front end uses it for answers; an engine over worker processes uses it for requests, by Isolation.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from detcompile.runtime.requests.sampling_params import SamplingParams

if TYPE_CHECKING:  # these import torch, which the server's front end does not
    from detcompile.runtime.requests.request import Request
    from detcompile.runtime.requests.sequence import Sequence

CROWD_DEATHS = 2  # crashes among other answers before an answer is served alone
ALONE_DEATHS = 2  # crashes alone before an answer is given up
ISOLATED_TOKENS = 4  # tokens per sample drawn alone; must cover the steps in flight when an engine crashed


class Suspect(Protocol):
    """An answer in progress.

    Attributes:
        params: the request's parameters.
        deaths: crashes while it ran among others, since it was last served alone.
        deaths_alone: crashes while it ran alone.
    """

    params: SamplingParams
    deaths: int
    deaths_alone: int

    @property
    def finished(self) -> bool:
        """True once no more tokens follow."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens drawn so far, over all samples."""


Answer = TypeVar("Answer", bound=Suspect)


class PoisonRequestGuard(Generic[Answer]):
    """Decides which answers of a crashed engine must be served alone, and finds the one that crashes engines.

    A poison request crashes an engine again, because a sample is drawn from the same tokens with the same bits. An
    answer that gets some tokens past the point of the crash is cleared.

    Args:
        block: ends an answer that crashed ALONE_DEATHS engines while it ran alone.

    Attributes:
        suspects: answers waiting to be served alone.
        isolated: the answer being served alone.
    """

    def __init__(self, block: Callable[[Answer], None]) -> None:
        self.suspects: list[Answer] = []
        self.isolated: Answer | None = None
        self._block = block
        self._goal = 0

    def died_with(self, answer: Answer) -> bool:
        """Count a crash against an answer. Return True if it may continue among others."""
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
        """Put the isolated answer back at the head of the queue: its engine was stopped, not crashed."""
        if self.isolated is not None:
            self.suspects.insert(0, self.isolated)
            self.isolated = None

    def clears(self, answer: Answer) -> bool:
        """Clear an answer that has run alone for long enough. Return True if it was cleared."""
        if answer is not self.isolated or not (answer.finished or answer.num_tokens >= self._goal):
            return False
        self.isolated = None
        answer.deaths = answer.deaths_alone = 0
        return True

    def forget(self, answer: Answer) -> None:
        """Drop an answer that nobody waits for."""
        if answer is self.isolated:
            self.isolated = None
        if answer in self.suspects:
            self.suspects.remove(answer)


class Isolation:
    """Makes an engine serve the suspects of a PoisonRequestGuard one after another.

    Args:
        serve_alone: makes the engine plan only these sequences; None: all.
        block: ends a request that crashed workers too often.
    """

    def __init__(
        self, serve_alone: "Callable[[frozenset[Sequence] | None], None]", block: "Callable[[Request], None]"
    ) -> None:
        self._serve_alone = serve_alone
        self._guard = PoisonRequestGuard(block)
        self._under_way = False  # other sequences are held back

    def died_with(self, requests: "Iterable[Request]") -> None:
        """Count a crash of the workers against these requests."""
        for request in requests:
            self._guard.died_with(request)

    def update(self) -> None:
        """Before each step: once the isolated request is cleared, isolate the next suspect, or serve all again."""
        guard = self._guard
        if guard.isolated is not None and not guard.clears(guard.isolated):
            return
        if guard.suspects:
            self._under_way = True
            self._serve_alone(frozenset(guard.isolate_next().sequences))
        elif self._under_way:
            self._under_way = False
            self._serve_alone(None)

    def forget(self, request: "Request") -> None:
        """Drop a request that has ended."""
        self._guard.forget(request)
