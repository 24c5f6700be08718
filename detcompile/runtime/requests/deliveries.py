"""Where outputs go: to whoever waits for a request, as a copy of their own, or else to the next ``step``."""

import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from detcompile.errors import EngineError
from detcompile.runtime.requests.copies import Cursor, OutputKind, copy_of, joined
from detcompile.runtime.requests.outputs import RequestOutput
from detcompile.runtime.requests.turns import Place, Turns

__all__ = ["Deliveries", "Mailbox", "Receiver", "dropped"]

Receiver = Callable[[RequestOutput | EngineError], None]


def dropped(_output: RequestOutput | EngineError) -> None:
    """The receiver of a request that nobody waits for any more."""


class Mailbox:
    """Finished outputs of the requests of one ``generate``, put there by whichever thread made them.

    Args:
        turns: the turns in which ``place`` waits; it is excused when something has come.
    """

    def __init__(self, turns: Turns) -> None:
        self.place = Place()
        self.error: EngineError | None = None
        self._turns = turns
        self._outputs: deque[RequestOutput] = deque()

    def receive(self, output: RequestOutput | EngineError) -> None:
        """A Receiver."""
        if isinstance(output, EngineError):
            self.error = output
        elif output.finished:
            self._outputs.append(output)
        self._turns.excuse(self.place)

    def taken(self) -> list[RequestOutput]:
        """What has come since."""
        return [self._outputs.popleft() for _ in range(len(self._outputs))]


class _Route(NamedTuple):
    """Where the outputs of a request go; None leaves them to ``take``."""

    receiver: Receiver | None
    kind: OutputKind
    cursor: Cursor | None  # of deltas


class Deliveries:
    """The receivers of an engine's requests, and what has none. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._routes: dict[str, _Route] = {}
        self._kept: dict[str, RequestOutput] = {}

    @property
    def any_kept(self) -> bool:
        """Whether ``take`` has anything."""
        return bool(self._kept)

    def expect(self, output: RequestOutput, name: str, receiver: Receiver | None, kind: OutputKind) -> None:
        """Give a request's outputs, of this kind, to ``receiver``; None: keep them for ``take``."""
        cursor = Cursor([len(sample.token_ids) for sample in output.outputs]) if kind == "delta" else None
        with self._lock:
            self._routes[name] = _Route(receiver, kind, cursor)

    def drop(self, request_id: str) -> None:
        """Nobody waits for a request any more, which somebody did."""
        with self._lock:
            if request_id in self._routes:
                self._routes[request_id] = _Route(dropped, "final_only", None)

    def give(self, output: RequestOutput) -> bool:
        """Hand on a copy of an output; False if its receiver cannot be reached any more."""
        with self._lock:
            receiver, kind, cursor = self._routes.get(output.request_id, _Route(None, "cumulative", None))
            if output.finished:
                self._routes.pop(output.request_id, None)
        if kind == "final_only" and not output.finished:
            return True
        copy = copy_of(output) if cursor is None else cursor.delta(output)
        if receiver is None:
            with self._lock:
                before = self._kept.get(output.request_id)
                self._kept[output.request_id] = copy if cursor is None or before is None else joined(before, copy)
            return True
        try:
            receiver(copy)
        except Exception:  # a coroutine's loop that is closed, say: its neighbours go on
            return False
        return True

    def take(self) -> list[RequestOutput]:
        """Outputs without a receiver, the newest of each request, or its deltas as one."""
        with self._lock:
            kept, self._kept = self._kept, {}
        return list(kept.values())

    def fail(self, text: str, cause: BaseException) -> None:
        """Tell every receiver that nothing comes any more."""
        with self._lock:
            routes, self._routes = self._routes, {}
        for receiver in (route.receiver for route in routes.values() if route.receiver is not None):
            error = EngineError(text)  # one each: a traceback grows on it
            error.__cause__ = cause
            try:
                receiver(error)
            except Exception:
                continue
