"""WorkerGroup: n processes, one per rank, that run the same commands in the same order; a lost process is detected.

The group is independent of models: a target is built in every process, and a command calls one of its methods.
"""

import contextlib
import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple, NoReturn

from detcompile.errors import DetcompileError, WorkerError
from detcompile.runtime.processes.process import DONE, NOTE, Channel, encode
from detcompile.runtime.processes.rank_process import DialedRank, RankProcess, end_processes

POLL_SECONDS = 0.2  # interval of checking processes and deadlines while nothing arrives
SETTLE_SECONDS = 0.5  # after a rank raised, wait this long for deaths: the error may be caused by another rank's death
REFUSAL_SECONDS = 30.0  # time for the other ranks to answer a command that one rank has rejected
STOPPED_SECONDS = 0.6  # longest that a process may be stopped, for example by a debugger


class _Fault(NamedTuple):
    """Failure of a rank. The smallest is reported: a death explains others' errors, an error their silence."""

    severity: int  # 0: died, 1: raised, 2: late
    rank: int
    text: str


class _Pending:
    """A command that some ranks have not answered yet."""

    def __init__(self, name: str, num_ranks: int, seconds: float) -> None:
        self.name = name
        self.seconds = seconds
        self.since = time.monotonic()
        self.missing = set(range(num_ranks))
        self.values: list[Any] = [None] * num_ranks
        self.refusals: dict[int, DetcompileError] = {}


class WorkerGroup:
    """Processes that live as long as this object, or until one of them fails. Thread-safe.

    Every command goes to all ranks. Several may be in progress; each rank runs them in order. A DetcompileError raised
    by a command is raised here too, and the group continues. Any other exception, a process that ends or is stopped, or
    a command that times out ends all processes.

    Args:
        target: "module:function". Every process calls function(rank, *args, note), where note(text) reports progress to
            the caller, and keeps the result, whose methods are the commands.
        args: arguments of the function after the rank.
        step_seconds: default time limit of a command, from its turn on.
        start_seconds: time limit for building the target.
        files: descriptors that the processes inherit under the same numbers.
        dialed: processes of the last ranks, started by someone else; the others are started here.

    Raises:
        WorkerError: from every call after a failure, with the rank and its traceback; all processes have ended.
    """

    def __init__(
        self,
        num_ranks: int,
        target: str,
        args: Sequence[Any] = (),
        *,
        step_seconds: float = 300.0,
        start_seconds: float = 3600.0,
        files: Sequence[int] = (),
        dialed: Sequence[DialedRank] = (),
    ) -> None:
        self.num_ranks = num_ranks
        self.step_seconds = step_seconds
        self.on_note: Callable[[int, str], None] = lambda rank, text: None
        self._lock = threading.RLock()
        self._tickets = count()
        self._pending: dict[int, _Pending] = {}
        self._answered: dict[int, _Pending] = {}
        self._last_answer = [time.monotonic()] * num_ranks
        self._stopped_since: dict[int, float] = {}
        self._failure: WorkerError | None = None
        self._processes: list[RankProcess | DialedRank] = []
        self._channels: list[Channel] = []  # of the processes
        self._ended = weakref.finalize(self, end_processes, self._processes, os.getpid())
        self._poller = select.poll()
        self._rank_of: dict[int, int] = {}
        with self._ending_on_interrupt():
            for _ in range(num_ranks - len(dialed)):
                self._processes.append(RankProcess(files))
            self._processes += dialed
            for rank, process in enumerate(self._processes):
                self._channels.append(process.channel)
                self._rank_of[process.channel.fileno()] = rank
                self._poller.register(process.channel.fileno(), select.POLLIN)
            self.started = next(self._tickets)
            self._pending[self.started] = _Pending("start", num_ranks, start_seconds)
            for rank in range(num_ranks):
                self._send([rank], encode((self.started, target, (rank, *args))))

    def post(self, name: str, *args: Any) -> None:
        """Call a method in every process without waiting. If it fails, a later call raises the error."""
        self._command(None, name, args)

    def submit(self, name: str, *args: Any, seconds: float | None = None) -> int:
        """Call a method in every process. Return a ticket, whose ``result`` must be fetched.

        Args:
            seconds: time limit; default: step_seconds.
        """
        ticket = next(self._tickets)
        self._command(ticket, name, args, self.step_seconds if seconds is None else seconds)
        return ticket

    def result(self, ticket: int) -> list[Any]:
        """Wait for a command and return its values, one per rank.

        Raises:
            DetcompileError: the error of the lowest rank that raised one.
        """
        with self._lock, self._ending_on_interrupt():
            self._check()
            assert ticket in self._pending or ticket in self._answered, "fetch the result of a ticket only once"
            self._wait(lambda: ticket in self._answered)
            answer = self._answered.pop(ticket)
        if answer.refusals:
            raise answer.refusals[min(answer.refusals)]
        return answer.values

    def call(self, name: str, *args: Any, seconds: float | None = None) -> list[Any]:
        """Call a method in every process and wait for the values."""
        return self.result(self.submit(name, *args, seconds=seconds))

    def close(self) -> None:
        """End the processes, whatever they do; repeated calls do nothing."""
        with self._lock:
            if self._failure is None:
                self._failure = WorkerError("the workers were closed: compile the model again to use it")
            self._ended()

    @property
    def failure(self) -> WorkerError | None:
        """The error that every call raises from now on, or None. Also detects a process that has just ended."""
        with contextlib.suppress(WorkerError), self._lock:
            self._check()
            self._check_processes()
        return self._failure

    @property
    def process_ids(self) -> list[int]:
        """Process ids, one per rank."""
        return [process.id for process in self._processes]

    def _command(self, ticket: int | None, name: str, args: tuple[Any, ...], seconds: float = 0.0) -> None:
        frame = encode((ticket, name, args))
        with self._lock, self._ending_on_interrupt():
            self._check()
            if ticket is not None:
                self._pending[ticket] = _Pending(name, self.num_ranks, seconds)
            self._send(range(self.num_ranks), frame)

    def _send(self, ranks: Sequence[int], frame: list[memoryview]) -> None:
        """Send a frame and read answers meanwhile, so that no two processes wait for each other to read."""
        unsent = {rank for rank in ranks if not self._push(rank, frame)}
        self._ask_for_room(unsent, select.POLLIN | select.POLLOUT)

        def sent() -> bool:
            done = {rank for rank in unsent if self._push(rank, [])}
            self._ask_for_room(done, select.POLLIN)
            unsent.difference_update(done)
            return not unsent

        if unsent:
            self._wait(sent, unsent)

    def _ask_for_room(self, ranks: Collection[int], events: int) -> None:
        for rank in ranks:
            self._poller.modify(self._channels[rank].fileno(), events)

    def _push(self, rank: int, frame: list[memoryview]) -> bool:
        try:
            return self._channels[rank].push(frame)
        except OSError:
            self._read(rank)  # it may have sent a last message
            self._fail(self._death_of(rank))

    def _wait(self, finished: Callable[[], bool], unsent: Collection[int] = ()) -> None:
        """Serve the channels until ``finished``; ``unsent`` are ranks that have not read a whole command yet."""
        since = looked = time.monotonic()
        self._stopped_since.clear()  # outdated: processes were not checked meanwhile
        while not finished():
            for fileno, event in self._poller.poll(POLL_SECONDS * 1000):
                if event != select.POLLOUT:
                    self._read(self._rank_of[fileno])
            now = time.monotonic()
            if now - looked > POLL_SECONDS:
                looked = now
                self._check_processes()
                self._check_deadlines()
                if unsent and not self._pending and now - since > self.step_seconds:
                    self._fail(_Fault(2, min(unsent), f"it has read no command for {self.step_seconds:g} s"))

    def _read(self, rank: int) -> None:
        try:
            messages = self._channels[rank].pull()
        except EOFError:
            self._fail(self._death_of(rank))
        for message in messages:
            self._take(rank, *message)

    def _take(self, rank: int, ticket: int | None, kind: str, value: Any) -> None:
        if kind == NOTE:
            self.on_note(rank, value)
            return
        self._last_answer[rank] = time.monotonic()
        if kind == DONE:
            assert ticket is not None
            self._pending[ticket].values[rank] = value
        else:
            error, trace = value
            if ticket is None or not isinstance(error, DetcompileError):
                self._fail(_Fault(1, rank, f"it raised\n{trace.rstrip()}"))
            pending = self._pending[ticket]
            error.add_note(f"In the worker of rank {rank}:\n{trace.rstrip()}")
            pending.refusals[rank] = error
            pending.seconds = min(pending.seconds, time.monotonic() - pending.since + REFUSAL_SECONDS)
        pending = self._pending[ticket]
        pending.missing.discard(rank)
        if not pending.missing:
            self._answered[ticket] = self._pending.pop(ticket)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure.with_traceback(None)

    def _check_processes(self) -> None:
        for rank, process in enumerate(self._processes):
            if process.ending is not None:
                self._read(rank)  # it may have sent the reason
                self._fail(self._death_of(rank))
            if not process.is_stopped:
                self._stopped_since.pop(rank, None)
            elif time.monotonic() - self._stopped_since.setdefault(rank, time.monotonic()) >= STOPPED_SECONDS:
                self._fail(_Fault(0, rank, "its process is stopped (SIGSTOP) and would never answer"))

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        for rank, answered in enumerate(self._last_answer):
            pending = next((pending for pending in self._pending.values() if rank in pending.missing), None)
            if pending is not None and self._processes[rank].is_silent(pending.since):
                self._fail(_Fault(0, rank, "no sign of life from it: its process is stopped, or its machine is gone"))
            if pending is not None and now - max(pending.since, answered) > pending.seconds:
                silent = sorted(pending.missing)
                others = f", like ranks {silent[1:]}," if len(silent) > 1 else ""
                refused = "".join(f"; rank {other} refused it: {error}" for other, error in pending.refusals.items())
                text = f"it{others} has not answered {pending.name!r} for {pending.seconds:g} s{refused}"
                self._fail(_Fault(2, rank, text))

    def _death_of(self, rank: int) -> _Fault:
        return _Fault(0, rank, self._processes[rank].death())

    def _fail(self, fault: _Fault) -> NoReturn:
        """End the group and raise the best explanation."""
        if self._failure is None:
            self._failure = WorkerError("the workers failed")  # for other threads, until the reason is known
            worst = min([fault, *(self._await_deaths() if fault.severity == 1 else [])])
            text = f"worker of rank {worst.rank} of {self.num_ranks} failed: {worst.text}"
            self._failure = WorkerError(f"{text}\nAll workers were ended: compile the model again", worst.rank)
            self._ended()
        raise self._failure

    def _await_deaths(self) -> list[_Fault]:
        """Return the ranks that die within SETTLE_SECONDS."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < deadline:
            if dead := [rank for rank, process in enumerate(self._processes) if process.ending is not None]:
                return [self._death_of(rank) for rank in dead]
            time.sleep(0.01)
        return []

    @contextlib.contextmanager
    def _ending_on_interrupt(self) -> Iterator[None]:
        """End the workers on an interrupt: it may have cut a message in two."""
        try:
            yield
        except WorkerError:
            raise
        except BaseException as error:
            if self._failure is None:
                cause = type(error).__name__
                self._failure = WorkerError(f"the workers were ended by {cause}: compile the model again")
            self._ended()
            raise
