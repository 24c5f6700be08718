"""Turns: one thread at a time touches an engine, in the order in which they asked, and Ctrl-C waits for the turn's end.

A thread that steps again and again gives way to those that wait: threading.Lock would let it have the lock every time.
"""

import contextlib
import signal
import threading
from collections import deque
from collections.abc import Iterator

__all__ = ["Place", "Turns", "without_interrupts"]


class Place:
    """Where a thread waits for its turn. Reused turn after turn."""

    def __init__(self) -> None:
        self._called = threading.Lock()  # held while nothing has come
        self._called.acquire()
        self._excused = False  # has what it would take a turn for
        self._has_turn = False


class Turns:
    """A lock that is handed on in order. The thread that has it may take it again (``with turns:`` inside)."""

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
        """Wait for a turn; ``give`` ends it. False, and no turn, if the place was excused before it came."""
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
        """End a turn: the next that waits has it."""
        with self._mutex:
            self._depth -= 1
            if self._depth == 0:
                self._hand_on()

    def excuse(self, place: Place) -> None:
        """What the place waits for has come: its next ``take``, or the one under way, returns at once."""
        with self._mutex:
            place._excused = True
            if place in self._waiting:
                self._waiting.remove(place)
                place._called.release()

    def _hand_on(self) -> None:
        if self._waiting:
            self._owner = 0  # no thread's, until the next one is awake
            place = self._waiting.popleft()
            place._has_turn = True
            place._called.release()
        else:
            self._owner = None

    def _leave(self, place: Place) -> None:
        """An exception ended the wait: the turn may have come by then."""
        with self._mutex:
            if place in self._waiting:
                self._waiting.remove(place)
            elif place._has_turn:
                place._has_turn = False
                self._hand_on()


@contextlib.contextmanager
def without_interrupts() -> Iterator[None]:
    """Ctrl-C in the main thread raises KeyboardInterrupt at the end, and a second one at once.

    Half of a step would leave an engine that serves nobody any more.
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
