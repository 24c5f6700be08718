"""The front end's link to one engine process: starts it and notices when it is gone or hangs."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

from detcompile import errors
from detcompile.errors import DetcompileError, EngineError, InvalidInput, WorkerError
from detcompile.serving.engines.answers import Answer, AuxiliaryTask, WakeQueue, given_params
from detcompile.serving.engines.launchers import Connection, Launcher, LocalProcess
from detcompile.serving.engines.protocol import (
    LENGTH,
    Add,
    Broken,
    Cancel,
    Command,
    Control,
    Controlled,
    Delta,
    EngineSpec,
    Heartbeat,
    Hello,
    Holding,
    Pooled,
    Refused,
    Report,
    Statistics,
    Step,
    Tokens,
    Verified,
    decode_report,
    frame,
)

ERRORS: dict[str, type[DetcompileError]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, DetcompileError)
}
SILENCE_SECONDS = 10.0  # without a heartbeat, after which a ready process counts as hanging and is killed
CHECK_SECONDS = 0.25
TOGETHER = 256  # deltas handled before yielding to the event loop
KEPT_STEPS = 160
STOPPED_CHECKS = 3  # consecutive checks that find the process stopped by a signal before it is killed


class EngineLink:
    """One engine process, from start to end. All methods must be called in the event loop's thread.

    Args:
        on_progress: called with every extended answer and its delta; with None for a rejected answer or an
            auxiliary task.
        on_lost: called with the unfinished answers when the engine fails; the callee takes them over.
        launcher: opens the connection to the process.
        silence: seconds without a heartbeat after which the process counts as hanging.

    Attributes:
        hello: the engine's first message; None before it is ready.
        failure: why it no longer serves; None while it starts or serves.
        statistics: the latest counts.
        steps: the most recent steps, oldest first.
        holdings: KV blocks by request, as of the last heartbeat.
        answers: unfinished answers by try_id.
    """

    def __init__(
        self,
        on_progress: Callable[[Answer, Delta | None], None] = lambda answer, delta: None,
        on_lost: Callable[["EngineLink", list[Answer]], None] | None = None,
        launcher: Launcher | None = None,
        silence: float = SILENCE_SECONDS,
    ) -> None:
        self.hello: Hello | None = None
        self.failure: DetcompileError | None = None
        self.statistics = Statistics()
        self.steps: deque[Step] = deque(maxlen=KEPT_STEPS)
        self.holdings: list[Holding] = []
        self.answers: dict[str, Answer] = {}
        self._on_progress = on_progress
        self._on_lost = on_lost
        self._launcher = LocalProcess() if launcher is None else launcher
        self._silence = silence
        self._started = asyncio.Event()  # ready or failed
        self._tasks: list[asyncio.Task[None]] = []
        self._opening: asyncio.Task[Connection] | None = None
        self._connection: Connection | None = None
        self._known: Callable[[], Hello | None] = lambda: None
        self._heard = False  # a report arrived since the last check
        self._wake_queue = WakeQueue()
        self._call_ids = count()
        self._controls: dict[int, asyncio.Future[dict[str, Any]]] = {}

    @property
    def ready(self) -> bool:
        """Return True if it serves."""
        return self.hello is not None and self.failure is None

    @property
    def pid(self) -> int | None:
        """Return the process id of a local process; None otherwise."""
        process = None if self._connection is None else self._connection.process
        return None if process is None else process.pid

    async def open(self) -> None:
        """Launch a process, which imports its modules and waits for ``start``.

        Raises:
            DetcompileError: the launch failed, or ``stop`` was called meanwhile.
        """
        self._opening = asyncio.get_running_loop().create_task(self._launcher.open())
        connection = await self._opening
        if self.failure is not None:
            raise self.failure  # ``stop`` ends the process
        self._connection = connection
        self._tasks = [asyncio.create_task(self._read(connection)), asyncio.create_task(self._watch(connection))]

    def start(self, spec: EngineSpec, known: Callable[[], Hello | None] = lambda: None) -> None:
        """Send the spec to the open process; ``settled`` waits until it serves.

        Args:
            known: returns what is served now; an engine with another model fails.
        """
        self._known = known
        self._send(spec)

    async def settled(self) -> Hello:
        """Wait until the engine is ready.

        Raises:
            DetcompileError: it failed to start.
        """
        await self.start_ended()
        if self.failure is not None:
            raise self.failure
        assert self.hello is not None
        return self.hello

    async def start_ended(self) -> None:
        """Wait until the start has succeeded or failed."""
        await self._started.wait()

    def add(self, answer: Answer) -> None:
        """Queue an answer; one that has tokens continues after them.

        Raises:
            DetcompileError: the engine does not serve.
        """
        if self.failure is not None or self._connection is None:
            raise self.failure or WorkerError("the engine has not started")
        answer.tries += 1
        self.answers[answer.try_id] = answer
        if isinstance(answer, AuxiliaryTask):
            self._send(answer.command())
            return
        params, resume = given_params(answer.params), answer.resumption()
        drawn_with = answer.cache_salt, answer.loaded_adapter
        self._send(Add(answer.try_id, answer.prompt_ids, params, answer.priority, resume, *drawn_with))

    def cancel(self, answer: Answer) -> None:
        """Cancel an answer."""
        if self.answers.pop(answer.try_id, None) is not None and self.ready:
            self._send(Cancel(answer.try_id))

    def drain(self) -> list[Answer]:
        """Cancel all answers in the engine and return them, to continue elsewhere."""
        answers = list(self.answers.values())
        for answer in answers:
            self.cancel(answer)
        return answers

    async def control(self, action: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Run an action of the engine on its weights or caches; return the result.

        Raises:
            InvalidInput: the arguments are at fault; nothing was changed.
            DetcompileError: the engine failed, or does not serve.
        """
        if not self.ready:
            raise self.failure or WorkerError("the engine has not started")
        call_id, future = next(self._call_ids), asyncio.get_running_loop().create_future()
        self._controls[call_id] = future
        try:
            self._send(Control(call_id, action, dict(arguments)))
            result: dict[str, Any] = await future
            return result
        finally:
            self._controls.pop(call_id, None)

    def kill(self) -> None:
        """Kill the process as if it had crashed: its answers continue on other engines."""
        if self._connection is not None:
            self._connection.kill()

    async def stop(self) -> None:
        """End the process, even while it is launched, and wait for its end."""
        self._on_lost = None
        self._fail(WorkerError("the server stops"))
        if self._connection is None and self._opening is not None:
            self._opening.cancel()
            [opened] = await asyncio.gather(self._opening, return_exceptions=True)
            if isinstance(opened, Connection):
                self._connection = opened
                opened.kill()
        if self._connection is not None:
            await self._connection.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _send(self, command: Command) -> None:
        """Send a command. If the engine is gone the command is dropped; ``_fail`` hands its answers over."""
        assert self._connection is not None
        if not self._connection.writer.is_closing():  # uvloop would raise
            self._connection.writer.write(frame(command))

    async def _read(self, connection: Connection) -> None:
        reader = connection.reader
        try:
            while True:
                (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                report = decode_report(await reader.readexactly(size))
                if isinstance(report, Tokens):
                    await self._take_tokens(report.deltas)
                else:
                    self._take(report)
        except (asyncio.IncompleteReadError, OSError):
            self._fail(WorkerError(f"the engine process ended ({await connection.ending()})"))
        except Exception as error:  # such as an invalid frame
            self._fail(WorkerError(f"the engine process sent an invalid report: {error!r}"))

    async def _take_tokens(self, deltas: Sequence[Delta]) -> None:
        """Handle a step's tokens; yield to the event loop in between, because many streams take a while."""
        self._heard = True
        for place, delta in enumerate(deltas, 1):
            answer = self.answers.get(delta.request_id)
            if answer is None:
                continue  # canceled
            if delta.finished:
                del self.answers[delta.request_id]
            answer.extend(delta)
            self._wake_queue.put(answer.signal)
            self._on_progress(answer, delta)
            if place % TOGETHER == 0:
                await asyncio.sleep(0)

    def _take(self, report: Report) -> None:
        self._heard = True
        if isinstance(report, (Verified, Pooled)):
            task = self.answers.pop(report.request_id, None)
            if isinstance(task, AuxiliaryTask):
                task.finish(report)
                self._on_progress(task, None)
        elif isinstance(report, Heartbeat):
            self.statistics, self.holdings = report.statistics, report.holdings
            self.steps.extend(report.steps)
        elif isinstance(report, Hello):
            self._check_hello(report)
        elif isinstance(report, Refused):
            refused = self.answers.pop(report.request_id, None)
            if refused is not None:
                refused.fail(InvalidInput(report.message))
                self._on_progress(refused, None)
        elif isinstance(report, Controlled):
            self._settle(report)
        elif isinstance(report, Broken):
            self._fail(ERRORS.get(report.kind, WorkerError)(report.message))

    def _settle(self, report: Controlled) -> None:
        """Give the caller of ``control`` its result."""
        future = self._controls.get(report.call_id)
        if future is None or future.done():
            return
        if report.error is None:
            future.set_result(report.value)
        else:
            future.set_exception((InvalidInput if report.refused else EngineError)(report.error))

    def _check_hello(self, hello: Hello) -> None:
        """Mark the engine as ready, unless its model differs from the one served before."""
        known = self._known()
        differing = [] if known is None else known.differing(hello)
        if differing:
            message = f"a restarted engine has another model, which differs in {', '.join(differing)}"
            self._fail(WorkerError(f"{message}: restart the server to serve that model"))
            return
        self.hello = hello
        self._started.set()

    async def _watch(self, connection: Connection) -> None:
        """Kill a process that is stopped by a signal or whose threads hang; neither closes the socket.

        Checks are counted instead of seconds, so that pausing the whole machine does not look like a hang.
        """
        silent = stopped = 0
        while self.failure is None:
            await asyncio.sleep(CHECK_SECONDS)
            silent = 0 if self._heard or not self.ready else silent + 1
            stopped = stopped + 1 if connection.stopped else 0
            self._heard = False
            if stopped >= STOPPED_CHECKS:
                self._fail(WorkerError("the engine process was stopped by a signal and was ended"))
            elif silent * CHECK_SECONDS >= self._silence:
                self._fail(WorkerError(f"the engine process was silent for {self._silence:g} s and was ended"))

    def _fail(self, error: DetcompileError) -> None:
        """Kill the process and all its children; hand its answers to ``on_lost``, or fail them."""
        if self.failure is None:
            self.failure = error
        self._started.set()
        if self._connection is not None:
            self._connection.kill()
        for future in self._controls.values():
            if not future.done():
                future.set_exception(WorkerError(f"the engine failed: {self.failure}"))
        answers, self.answers = self.answers, {}
        if (on_lost := self._on_lost) is not None:
            self._on_lost = None
            on_lost(self, list(answers.values()))
            return
        for answer in answers.values():
            answer.fail(WorkerError(f"the engine failed: {self.failure}"))
