"""EngineLoop: a thread that drives an engine, and the way from it to coroutines.

The engine itself has one driver at a time. Once a stream was asked for, this thread is it; ``generate`` then waits for
the thread instead of stepping.
"""

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import Protocol

from detcompile.errors import EngineError
from detcompile.runtime.outputs import RequestOutput

__all__ = ["EngineLoop", "OutputQueue", "Steppable", "finishing"]

Listener = Callable[[RequestOutput | EngineError], None]
OutputQueue = queue.SimpleQueue[RequestOutput | EngineError]
IDLE_SECONDS = 60.0  # an idle thread ends, so that an engine which nobody holds can be freed


class Steppable(Protocol):
    """The side of an engine that its thread sees."""

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether there is anything left to do."""

    def advance(self) -> list[RequestOutput]:
        """Do some of it."""

    def cancel(self, request_id: str) -> None:
        """Give a request up."""


class EngineLoop:
    """Steps an engine in a thread of its own while it has work.

    Args:
        engine: nobody else may step it from now on.
    """

    def __init__(self, engine: Steppable) -> None:
        self._engine = engine
        self._listeners: dict[str, Listener] = {}
        self._work = threading.Condition()
        self._thread: threading.Thread | None = None

    def listen(self, request_id: str, listener: Listener, add: Callable[[], object]) -> None:
        """Queue a request with ``add``; the thread calls ``listener`` with each of its outputs, or an error."""
        with self._work:
            self._listeners[request_id] = listener
            try:
                add()
            except BaseException:
                del self._listeners[request_id]
                raise
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="detcompile engine", daemon=True)
                self._thread.start()
            self._work.notify()

    async def stream(self, request_id: str, add: Callable[[], object]) -> AsyncIterator[RequestOutput]:
        """Outputs of one request as they grow; leaving the iteration early cancels it."""
        loop, outputs = asyncio.get_running_loop(), asyncio.Queue[RequestOutput | EngineError]()

        def listener(output: RequestOutput | EngineError) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(outputs.put_nowait, output)

        self.listen(request_id, listener, add)
        finished = False
        try:
            while not finished:
                output = await outputs.get()
                if isinstance(output, EngineError):
                    finished = True
                    raise output
                finished = output.finished
                yield output
        finally:
            if not finished:
                self._engine.cancel(request_id)
                with self._work:
                    self._listeners.pop(request_id, None)

    def _run(self) -> None:
        while True:
            with self._work:
                if not self._engine.has_unfinished_requests and not self._work.wait_for(
                    lambda: self._engine.has_unfinished_requests, IDLE_SECONDS
                ):
                    self._thread = None
                    return
            try:
                outputs = self._engine.advance()
            except EngineError as error:
                self._fail(error)
                return
            for output in outputs:
                self._tell(output)

    def _tell(self, output: RequestOutput) -> None:
        with self._work:
            listener = self._listeners.get(output.request_id)
            if output.finished:
                self._listeners.pop(output.request_id, None)
        if listener is not None:
            listener(_snapshot(output))

    def _fail(self, error: EngineError) -> None:
        with self._work:
            listeners, self._listeners = self._listeners, {}
            self._thread = None
        for listener in listeners.values():
            listener(error)


def finishing(outputs: OutputQueue, names: set[str]) -> Iterator[RequestOutput]:
    """The last outputs of these requests, which the thread serves."""
    left = set(names)
    while left:
        output = outputs.get()
        if isinstance(output, EngineError):
            raise output
        if output.finished:
            left.remove(output.request_id)
            yield output


def _snapshot(output: RequestOutput) -> RequestOutput:
    """The output as it is now; the engine goes on to change its own."""
    samples = [
        replace(
            sample,
            token_ids=list(sample.token_ids),
            logprobs=None if sample.logprobs is None else list(sample.logprobs),
        )
        for sample in output.outputs
    ]
    return replace(output, outputs=samples)
