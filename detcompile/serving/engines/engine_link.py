"""EngineLink: the front's end of an engine process, which starts one and notices when it is gone or hangs."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from detcompile.errors import (
    ArchiveError,
    DetcompileError,
    InvalidInput,
    StorageError,
    UncertifiedOp,
    UnsupportedModel,
    WorkerError,
)
from detcompile.serving.engines.answers import Answer, Errand, given_params
from detcompile.serving.engines.launchers import Connection, Launcher, LocalProcess
from detcompile.serving.engines.notices import Notices
from detcompile.serving.engines.protocol import (
    LENGTH,
    Add,
    Broken,
    Cancel,
    Command,
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

__all__ = ["EngineLink"]

ERRORS = {kind.__name__: kind for kind in (ArchiveError, InvalidInput, StorageError, UncertifiedOp, UnsupportedModel)}
SILENCE_SECONDS = 10.0  # a process that is ready and sends no heartbeat for so long hangs, and is ended
LOOK_SECONDS = 0.25
TOGETHER = 256  # deltas that are taken in one turn of the event loop
KEPT_STEPS = 160
STOPPED_LOOKS = 3  # in a row that find it stopped, after which it is ended


class EngineLink:
    """One engine process, from its start to its end. All methods are for the event loop's thread.

    Args:
        on_news: called with every answer that has news, once the answer has taken them: with its delta, or with None
            where it is refused or an errand.
        on_lost: called with the answers that had not ended where it serves no more; they are the callee's then.
        launcher: gives the connection to the process.
        silence: seconds without a heartbeat after which the process counts as hanging.

    Attributes:
        hello: what the engine said when it was ready; None before.
        failure: why it serves no more; None while it starts or serves.
        statistics: the engine's newest counts.
        steps: the newest steps, oldest first.
        holdings: blocks of the KV cache by request, at the last heartbeat.
        answers: what the engine has and has not ended, by the names of their tries.
    """

    def __init__(
        self,
        on_news: Callable[[Answer, Delta | None], None] = lambda answer, delta: None,
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
        self._on_news = on_news
        self._on_lost = on_lost
        self._launcher = LocalProcess() if launcher is None else launcher
        self._silence = silence
        self._over = asyncio.Event()  # ready, or failed
        self._tasks: list[asyncio.Task[None]] = []
        self._opening: asyncio.Task[Connection] | None = None
        self._connection: Connection | None = None
        self._known: Hello | None = None
        self._heard = False  # since the last look
        self._notices = Notices()

    @property
    def ready(self) -> bool:
        """Whether it serves."""
        return self.hello is not None and self.failure is None

    @property
    def pid(self) -> int | None:
        """The process, where it is one of this machine that the front has started."""
        process = None if self._connection is None else self._connection.process
        return None if process is None else process.pid

    async def open(self) -> None:
        """Come by a process, which imports what it needs and waits for ``start``.

        Raises:
            DetcompileError: there is none to be had, or this was stopped meanwhile.
        """
        self._opening = asyncio.get_running_loop().create_task(self._launcher.open())
        connection = await self._opening
        if self.failure is not None:
            raise self.failure  # ``stop`` ends the process
        self._connection = connection
        self._tasks = [asyncio.create_task(self._read(connection)), asyncio.create_task(self._watch(connection))]

    def start(self, spec: EngineSpec, known: Hello | None = None) -> None:
        """Tell the process, which is open, what to serve; ``settled`` waits until it does.

        Args:
            known: what was served before: an engine of another model fails.
        """
        self._known = known
        self._send(spec)

    async def settled(self) -> Hello:
        """Wait until the engine is ready.

        Raises:
            DetcompileError: why it is not.
        """
        await self.over()
        if self.failure is not None:
            raise self.failure
        assert self.hello is not None
        return self.hello

    async def over(self) -> None:
        """Wait until its start is: it serves then, or has failed."""
        await self._over.wait()

    def add(self, answer: Answer) -> None:
        """Have an answer made, or gone on with at the tokens that it has; what comes is given to it.

        Raises:
            DetcompileError: the engine does not serve.
        """
        if self.failure is not None or self._connection is None:
            raise self.failure or WorkerError("the engine has not started")
        answer.tries += 1
        self.answers[answer.try_id] = answer
        if isinstance(answer, Errand):
            self._send(answer.command())
            return
        given, resume = given_params(answer.params), answer.resumption()
        self._send(Add(answer.try_id, answer.prompt_ids, given, answer.priority, resume, answer.cache_salt))

    def cancel(self, answer: Answer) -> None:
        """The engine makes an answer no more."""
        if self.answers.pop(answer.try_id, None) is not None and self.ready:
            self._send(Cancel(answer.try_id))

    def take_back(self) -> list[Answer]:
        """The engine makes no answer of those that it has any more: these, to go on elsewhere."""
        answers = list(self.answers.values())
        for answer in answers:
            self.cancel(answer)
        return answers

    def kill(self) -> None:
        """Kill the process, as if it had ended by itself: its answers go on as those of any engine that is lost."""
        if self._connection is not None:
            self._connection.kill()

    async def stop(self) -> None:
        """End the process, also one that is being opened, and wait for its end."""
        self._on_lost = None
        self._fail(WorkerError("the server stops"))
        if self._connection is None and self._opening is not None:
            self._opening.cancel()
            [found] = await asyncio.gather(self._opening, return_exceptions=True)
            if isinstance(found, Connection):
                self._connection = found
                found.kill()
        if self._connection is not None:
            await self._connection.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _send(self, command: Command) -> None:
        """Send a command. One to an engine that is gone is lost: what it had is handed over once that is read."""
        assert self._connection is not None
        if not self._connection.writer.is_closing():  # uvloop raises there
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
        except Exception as error:  # no frame of this protocol, above all
            self._fail(WorkerError(f"the engine process sent what is no report: {error!r}"))

    async def _take_tokens(self, deltas: Sequence[Delta]) -> None:
        """A step's tokens. The event loop has its turn in between: with many streams these take a while."""
        self._heard = True
        for place, delta in enumerate(deltas, 1):
            answer = self.answers.get(delta.request_id)
            if answer is None:
                continue  # cancelled
            if delta.finished:
                del self.answers[delta.request_id]
            answer.extend(delta)
            self._notices.put(answer.news)
            self._on_news(answer, delta)
            if place % TOGETHER == 0:
                await asyncio.sleep(0)

    def _take(self, report: Report) -> None:
        self._heard = True
        if isinstance(report, (Verified, Pooled)):
            errand = self.answers.pop(report.request_id, None)
            if isinstance(errand, Errand):
                errand.settle(report)
                self._on_news(errand, None)
        elif isinstance(report, Heartbeat):
            self.statistics, self.holdings = report.statistics, report.holdings
            self.steps.extend(report.steps)
        elif isinstance(report, Hello):
            self._greeted(report)
        elif isinstance(report, Refused):
            refused = self.answers.pop(report.request_id, None)
            if refused is not None:
                refused.fail(InvalidInput(report.message))
                self._on_news(refused, None)
        elif isinstance(report, Broken):
            self._fail(_error_of(report))

    def _greeted(self, hello: Hello) -> None:
        """It is ready, unless it would go on with other bits than those that were told."""
        others = [] if self._known is None else self._known.differing(hello)
        if others:
            said = f"an engine that was started again has another model, which differs in {', '.join(others)}"
            self._fail(WorkerError(f"{said}: start the server anew to serve that one"))
            return
        self.hello = hello
        self._over.set()

    async def _watch(self, connection: Connection) -> None:
        """A process that is stopped, or whose threads do not run, closes no socket.

        Looks are counted and not seconds: a machine that was paused, and both processes with it, hangs not.
        """
        silent = stopped = 0
        while self.failure is None:
            await asyncio.sleep(LOOK_SECONDS)
            silent = 0 if self._heard or not self.ready else silent + 1
            stopped = stopped + 1 if connection.stopped else 0
            self._heard = False
            if stopped >= STOPPED_LOOKS:
                self._fail(WorkerError("the engine process was stopped by a signal and was ended"))
            elif silent * LOOK_SECONDS >= self._silence:
                self._fail(WorkerError(f"the engine process was silent for {self._silence:g} s and was ended"))

    def _fail(self, error: DetcompileError) -> None:
        """It serves no more: the process and all that it has started end, and its answers are handed over, or told."""
        if self.failure is None:
            self.failure = error
        self._over.set()
        if self._connection is not None:
            self._connection.kill()
        answers, self.answers = self.answers, {}
        if (on_lost := self._on_lost) is not None:
            self._on_lost = None
            on_lost(self, list(answers.values()))
            return
        for answer in answers.values():
            answer.fail(WorkerError(f"the engine failed: {self.failure}"))


def _error_of(report: Broken) -> DetcompileError:
    """The exception of this package by the name that was sent, or else a WorkerError that says it."""
    return ERRORS.get(report.kind, WorkerError)(report.message)
