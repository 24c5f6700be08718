"""EngineLink: the front's end of an engine process, which starts one and notices when it is gone or hangs."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields

from detcompile.errors import (
    ArchiveError,
    DetcompileError,
    InvalidInput,
    StorageError,
    UncertifiedOp,
    UnsupportedModel,
    WorkerError,
)
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.serving.engines.answers import Answer
from detcompile.serving.engines.protocol import (
    LENGTH,
    Add,
    Broken,
    Cancel,
    Delta,
    EngineSpec,
    Heartbeat,
    Hello,
    Refused,
    Statistics,
    Tokens,
    decode_report,
    frame,
)

__all__ = ["COMMAND", "EngineLink"]

COMMAND = (sys.executable, "-m", "detcompile.serving.engines.engine_process")
PARAMETERS = tuple(own.name for own in fields(SamplingParams))
DEFAULTS = {name: getattr(SamplingParams(), name) for name in PARAMETERS}
ERRORS = {kind.__name__: kind for kind in (ArchiveError, InvalidInput, StorageError, UncertifiedOp, UnsupportedModel)}
SILENCE_SECONDS = 10.0  # a process that is ready and sends no heartbeat for so long hangs, and is ended
LOOKS = 8  # for a heartbeat, in that time


class EngineLink:
    """One engine process, from its start to its end. All methods are for the event loop's thread.

    Args:
        on_delta: called with every answer and its delta, once the answer has taken it.
        command: what to run as the engine process; the number of its socket is appended.
        silence: seconds without a heartbeat after which the process counts as hanging.

    Attributes:
        hello: what the engine said when it was ready; None before.
        failure: why it serves no more; None while it starts or serves.
        statistics: the engine's newest counts.
    """

    def __init__(
        self,
        on_delta: Callable[[Answer, Delta], None] = lambda answer, delta: None,
        command: Sequence[str] = COMMAND,
        silence: float = SILENCE_SECONDS,
    ) -> None:
        self.hello: Hello | None = None
        self.failure: DetcompileError | None = None
        self.statistics = Statistics()
        self.pid: int | None = None
        self._on_delta = on_delta
        self._command = tuple(command)
        self._silence = silence
        self._answers: dict[str, Answer] = {}
        self._over = asyncio.Event()  # ready, or failed
        self._tasks: list[asyncio.Task[None]] = []
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._heard = False  # since the last look

    @property
    def ready(self) -> bool:
        """Whether it serves."""
        return self.hello is not None and self.failure is None

    async def start(self, spec: EngineSpec) -> None:
        """Start the process; ``settled`` waits until it serves."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the front, which ends it
            )
        self.pid = self._process.pid
        ours.setblocking(False)
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._writer.write(frame(spec))
        self._tasks = [asyncio.create_task(self._read(reader)), asyncio.create_task(self._watch())]

    async def settled(self) -> Hello:
        """Wait until the engine is ready.

        Raises:
            DetcompileError: why it is not.
        """
        await self._over.wait()
        if self.failure is not None:
            raise self.failure
        assert self.hello is not None
        return self.hello

    def add(self, answer: Answer, *, priority: int = 0, resume: dict[int, list[int]] | None = None) -> None:
        """Have an answer made; what comes is given to it.

        Raises:
            DetcompileError: the engine does not serve.
        """
        if self.failure is not None or self._writer is None:
            raise self.failure or WorkerError("the engine has not started")
        self._answers[answer.request_id] = answer
        given = {name: value for name in PARAMETERS if (value := getattr(answer.params, name)) != DEFAULTS[name]}
        self._writer.write(frame(Add(answer.request_id, answer.prompt_ids, given, priority, resume)))

    def cancel(self, answer: Answer) -> None:
        """Nobody waits for an answer any more."""
        if self._answers.pop(answer.request_id, None) is not None and self._writer is not None and self.ready:
            self._writer.write(frame(Cancel(answer.request_id)))

    async def stop(self) -> None:
        """End the process and wait for its end."""
        self._fail(WorkerError("the server stops"))
        if self._process is not None:
            await self._process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._writer is not None:
            self._writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                self._take(decode_report(await reader.readexactly(size)))
        except (asyncio.IncompleteReadError, OSError):
            assert self._process is not None
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._process.wait(), 1.0)
            self._fail(WorkerError(f"the engine process ended ({_ending(self._process.returncode)})"))
        except Exception as error:  # no frame of this protocol, above all
            self._fail(WorkerError(f"the engine process sent what is no report: {error!r}"))

    def _take(self, report: Hello | Tokens | Refused | Heartbeat | Broken) -> None:
        self._heard = True
        if isinstance(report, Tokens):
            for delta in report.deltas:
                answer = self._answers.get(delta.request_id)
                if answer is None:
                    continue  # cancelled
                if delta.finished:
                    del self._answers[delta.request_id]
                answer.extend(delta)
                self._on_delta(answer, delta)
        elif isinstance(report, Heartbeat):
            self.statistics = report.statistics
        elif isinstance(report, Hello):
            self.hello = report
            self._over.set()
        elif isinstance(report, Refused):
            refused = self._answers.pop(report.request_id, None)
            if refused is not None:
                refused.fail(InvalidInput(report.message))
        else:
            self._fail(_error_of(report))

    async def _watch(self) -> None:
        """A process that is stopped, or whose threads do not run, closes no socket.

        Looks are counted and not seconds: a machine that was paused, and both processes with it, hangs not.
        """
        silent = 0
        while self.failure is None:
            await asyncio.sleep(self._silence / LOOKS)
            silent = 0 if self._heard or not self.ready else silent + 1
            self._heard = False
            if silent >= LOOKS:
                self._fail(WorkerError(f"the engine process was silent for {self._silence:g} s and was ended"))

    def _fail(self, error: DetcompileError) -> None:
        """It serves no more: the process and all that it has started end, and every answer is told."""
        if self.failure is None:
            self.failure = error
        self._over.set()
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            answer.fail(WorkerError(f"the engine failed: {self.failure}"))


def _ending(code: int | None) -> str:
    if code is None:
        return "it closed its socket"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _error_of(report: Broken) -> DetcompileError:
    """The exception of this package by the name that was sent, or else a WorkerError that says it."""
    return ERRORS.get(report.kind, WorkerError)(report.message)
