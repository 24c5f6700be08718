"""Delivery of outputs: to a request's receiver, as a copy, or to the next ``step``."""

import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from detcompile.errors import EngineError
from detcompile.runtime.requests.copies import Cursor, OutputKind, copy_of, joined
from detcompile.runtime.requests.outputs import RequestOutput
from detcompile.runtime.requests.turns import Place, Turns

Receiver = Callable[[RequestOutput | EngineError], None]


def dropped(_output: RequestOutput | EngineError) -> None:
    """Receiver of an abandoned request: discards its outputs."""


class Mailbox:
    """Finished outputs of one ``generate`` call, filled by whichever thread runs the steps.

    Args:
        turns: the lock in which ``place`` waits; the place is excused when an output arrives.
    """

    def __init__(self, turns: Turns) -> None:
        self.place = Place()
        self.error: EngineError | None = None
        self._turns = turns
        self._outputs: deque[RequestOutput] = deque()

    def receive(self, output: RequestOutput | EngineError) -> None:
        """Receive an output (a Receiver)."""
        if isinstance(output, EngineError):
            self.error = output
        elif output.finished:
            self._outputs.append(output)
        self._turns.excuse(self.place)

    def taken(self) -> list[RequestOutput]:
        """Remove and return the outputs that have arrived."""
        return [self._outputs.popleft() for _ in range(len(self._outputs))]


class _Route(NamedTuple):
    """Destination of a request's outputs; without a receiver, ``take`` returns them."""

    receiver: Receiver | None
    kind: OutputKind
    cursor: Cursor | None  # of deltas


class Deliveries:
    """Receivers of an engine's requests, and the outputs without a receiver. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._routes: dict[str, _Route] = {}
        self._kept: dict[str, RequestOutput] = {}

    @property
    def any_kept(self) -> bool:
        """True if ``take`` has anything to return."""
        return bool(self._kept)

    def expect(self, output: RequestOutput, name: str, receiver: Receiver | None, kind: OutputKind) -> None:
        """Route a request's outputs of this kind to ``receiver``; None keeps them for ``take``."""
        cursor = Cursor([len(sample.token_ids) for sample in output.outputs]) if kind == "delta" else None
        with self._lock:
            self._routes[name] = _Route(receiver, kind, cursor)

    def drop(self, request_id: str) -> None:
        """Discard further outputs of a request that has a receiver."""
        with self._lock:
            if request_id in self._routes:
                self._routes[request_id] = _Route(dropped, "final_only", None)

    def give(self, output: RequestOutput) -> bool:
        """Deliver a copy of an output. Return False if its receiver cannot be reached any more."""
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
        except Exception:  # for example a closed event loop: other requests continue
            return False
        return True

    def take(self) -> list[RequestOutput]:
        """Remove and return outputs without a receiver: the newest per request, or its merged deltas."""
        with self._lock:
            kept, self._kept = self._kept, {}
        return list(kept.values())

    def fail(self, text: str, cause: BaseException) -> None:
        """Tell every receiver that the engine has failed."""
        with self._lock:
            routes, self._routes = self._routes, {}
        for receiver in (route.receiver for route in routes.values() if route.receiver is not None):
            error = EngineError(text)  # one per receiver: raising it attaches a traceback
            error.__cause__ = cause
            try:
                receiver(error)
            except Exception:
                continue
