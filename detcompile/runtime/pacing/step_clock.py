"""StepClock: seconds of steps, each from the end of the one before it."""

from collections.abc import Callable

__all__ = ["StepClock"]


class StepClock:
    """Runs while steps are made, and not while the caller has their tokens.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.start_over()

    def start_over(self) -> None:
        """What has passed so far is no step's time."""
        self._ended: float | None = None  # the step before, if it left sequences that run
        self._resumed, self._seconds = self._clock(), 0.0

    def resume(self) -> None:
        """The caller asks for a step."""
        self._resumed = self._clock()

    def pause(self) -> None:
        """The caller gets what came of it."""
        self._seconds += self._clock() - self._resumed

    def lap(self, *, goes_on: bool) -> tuple[float, float]:
        """A step has ended: its seconds, without and with the caller's time in between.

        Args:
            goes_on: sequences run, so that the caller's time before the next end counts for that.
        """
        now = self._clock()
        seconds = self._seconds + now - self._resumed
        since = seconds if self._ended is None else now - self._ended
        self._resumed, self._seconds, self._ended = now, 0.0, now if goes_on else None
        return seconds, since
