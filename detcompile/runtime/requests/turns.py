"""A fair lock for engine steps: threads get it in arrival order, and Ctrl-C waits until it is released.

With threading.Lock, a thread that steps in a loop could take the lock every time and starve the waiting threads.
"""

import contextlib
import signal
import threading
from collections import deque
from collections.abc import Iterator


class Place:
    """A thread's position in the queue. Reused from turn to turn."""

    def __init__(self) -> None:
        self._called = threading.Lock()  # released to wake the waiting thread
        self._called.acquire()
        self._excused = False  # its result has arrived, so it needs no turn
        self._has_turn = False


class Turns:
    """A reentrant lock that is granted in arrival order."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._waiting: deque[Place] = deque()
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> "Turns":
        self.take(Place())
        return self

    def __exit__(self, *_exception: object) -> None:
        self.give()

    def take(self, place: Place) -> bool:
        """Wait for a turn, which ``give`` ends. Return False, without a turn, if the place was excused first."""
        me = threading.get_ident()
        with self._mutex:
            if place._excused:
                place._excused = False
                return False
            if self._owner in (None, me):
                self._owner = me
                self._depth += 1
                return True
            self._waiting.append(place)
        try:
            place._called.acquire()
        except BaseException:
            self._leave(place)
            raise
        with self._mutex:
            if not place._has_turn:
                place._excused = False
                return False
            place._has_turn = False
            self._owner, self._depth = me, 1
            return True

    def give(self) -> None:
        """Release the lock to the next waiting thread."""
        with self._mutex:
            self._depth -= 1
            if self._depth == 0:
                self._hand_on()

    def excuse(self, place: Place) -> None:
        """Make the current or next ``take`` of this place return False at once: its result has arrived."""
        with self._mutex:
            place._excused = True
            if place in self._waiting:
                self._waiting.remove(place)
                place._called.release()

    def _hand_on(self) -> None:
        if self._waiting:
            self._owner = 0  # reserved until the next thread is awake
            place = self._waiting.popleft()
            place._has_turn = True
            place._called.release()
        else:
            self._owner = None

    def _leave(self, place: Place) -> None:
        """Leave the queue after an exception; pass the turn on if it has just been granted."""
        with self._mutex:
            if place in self._waiting:
                self._waiting.remove(place)
            elif place._has_turn:
                place._has_turn = False
                self._hand_on()


@contextlib.contextmanager
def without_interrupts() -> Iterator[None]:
    """Delay KeyboardInterrupt in the main thread until the block ends; a second Ctrl-C raises at once.

    Interrupting a step halfway would leave the engine unusable.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    interrupted = False

    def note(number: int, frame: object) -> None:
        nonlocal interrupted
        interrupted = True
        signal.signal(number, signal.default_int_handler)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if interrupted:
        raise KeyboardInterrupt
