"""StepClock: measures steps, each from the end of the previous one."""

from collections.abc import Callable


class StepClock:
    """Runs during steps, and pauses while the caller processes their tokens.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.start_over()

    def start_over(self) -> None:
        """Restart the clock; the time so far belongs to no step."""
        self._ended: float | None = None  # end of the previous step, if sequences are still running
        self._resumed, self._seconds = self._clock(), 0.0

    def resume(self) -> None:
        """Resume when the caller asks for a step."""
        self._resumed = self._clock()

    def pause(self) -> None:
        """Pause when the caller gets the results."""
        self._seconds += self._clock() - self._resumed

    def lap(self, *, goes_on: bool) -> tuple[float, float]:
        """Return the seconds of a step that has ended, without and with the caller's time in between.

        Args:
            goes_on: sequences are running, so the caller's time counts towards the next step.
        """
        now = self._clock()
        seconds = self._seconds + now - self._resumed
        since = seconds if self._ended is None else now - self._ended
        self._resumed, self._seconds, self._ended = now, 0.0, now if goes_on else None
        return seconds, since
