"""A pytest plugin that collects once, then runs the tests in forked processes.

    python -m pytest -p tests.forks --forks 15

Each worker of pytest-xdist imports torch and collects all tests; on a GPU machine with slow files, 15 workers needed
160 s for that. Forked processes inherit the collected tests. A fork cannot use CUDA if its parent already did, so no
test module may use CUDA while tests are collected (tests/gpus.py).

A process runs the tests of one file in order, so that they share fixtures and kernels. Then it takes a file that no
process has taken. If there is none, it helps with the file whose remaining tests would take longest, as estimated from
the mean duration of the file's finished tests.
"""

import math
import os
import signal
from collections import Counter, defaultdict, deque
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import pytest

from tests.gpus import may_fork, num_workers

GUESS = 10.0  # seconds of a test in a file without finished tests


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forks", default="0", help="number of forked processes that run the tests, or auto")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    count = session.config.getoption("forks")
    if count == "0" or session.testsfailed or session.config.option.collectonly:
        return None
    if not may_fork():
        raise pytest.UsageError("CUDA is in use before the tests run: set PYTORCH_NVML_BASED_CUDA_CHECK=1")
    session.config._tmp_path_factory.getbasetemp()  # before the forks, so that they share it
    _Dispatcher(session).run(num_workers() if count == "auto" else int(count))
    return True


class _Dispatcher:
    """Give tests to worker processes, and their reports to pytest."""

    def __init__(self, session: pytest.Session) -> None:
        self._session = session
        self._left: dict[str, deque[int]] = {}  # indices of each file's tests that no worker has
        for index, item in enumerate(session.items):
            self._left.setdefault(_file_of(item), deque()).append(index)
        self._workers: dict[Connection, tuple[int, deque[int]]] = {}  # process id, and its unfinished tests
        self._at: dict[Connection, str] = {}  # each worker's file
        self._ended: defaultdict[str, list[float]] = defaultdict(list)  # seconds of each file's finished tests

    def run(self, count: int) -> None:
        """Run all tests in up to ``count`` processes.

        Raises:
            Failed: --maxfail tests failed.
        """
        try:
            for _ in range(min(count, len(self._session.items))):
                self._start()
            while self._workers:
                for connection in wait(list(self._workers)):
                    self._read(connection)
        finally:
            for process, _ in self._workers.values():
                os.kill(process, signal.SIGKILL)
        if self._session.shouldfail:
            raise self._session.Failed(self._session.shouldfail)

    def _start(self) -> None:
        ours, theirs = Pipe()
        process = os.fork()
        if process == 0:
            status = 1
            try:
                _work(self._session, theirs)
                status = 0
            finally:
                os._exit(status)
        theirs.close()
        self._workers[ours] = process, deque()

    def _read(self, connection: Any) -> None:
        process, tests = self._workers[connection]
        hook = self._session.config.hook
        try:
            message = connection.recv()
        except EOFError:
            del self._workers[connection]
            _, status = os.waitpid(process, 0)
            if tests:
                item = self._session.items[tests.popleft()]
                hook.pytest_runtest_logreport(report=_lost(item, os.waitstatus_to_exitcode(status)))
                for index in reversed(tests):
                    self._left.setdefault(_file_of(self._session.items[index]), deque()).appendleft(index)
                self._start()
            return
        if message is None:
            index = self._next(connection)
            tests.extend([] if index is None else [index])
            connection.send(index)
            return
        report = hook.pytest_report_from_serializable(config=self._session.config, data=message)
        hook.pytest_runtest_logreport(report=report)
        if report.when == "call":
            self._ended[_file_of(report)].append(report.duration)
        if report.when == "teardown":
            tests.popleft()

    def _next(self, connection: Connection) -> int | None:
        """Return the index of a worker's next test; None if there is none or the run must stop."""
        file = self._at.pop(connection, "")
        if not self._left or self._session.shouldfail or self._session.shouldstop:
            return None
        if file not in self._left:
            workers = Counter(self._at.values())
            file = max(self._left, key=lambda other: self._seconds_left(other, workers[other]))
        self._at[connection] = file
        index = self._left[file].popleft()
        if not self._left[file]:
            del self._left[file]
        return index

    def _seconds_left(self, file: str, workers: int) -> float:
        """Estimate how long a file's tests would take with one more worker; infinite if nobody has begun the file."""
        ended = self._ended[file]
        if not workers and not ended:
            return math.inf
        mean = sum(ended) / len(ended) if ended else GUESS
        return len(self._left[file]) * mean / (1 + workers)


def _work(session: pytest.Session, connection: Connection) -> None:
    """Run tests. Receive each test before running the one ahead of it, so that pytest keeps shared fixtures."""
    manager = session.config.pluginmanager
    capture = manager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()  # in its own files: the parent's are shared
    manager.unregister(name="terminalreporter")
    manager.register(_Sender(session.config, connection))

    def following() -> pytest.Item | None:
        connection.send(None)
        index = connection.recv()
        return None if index is None else session.items[index]

    item = following()
    while item is not None:
        after = following()
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
        item = after


class _Sender:
    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config, self._connection = config, connection

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._connection.send(self._config.hook.pytest_report_to_serializable(config=self._config, report=report))


def _file_of(item: pytest.Item | pytest.TestReport) -> str:
    return item.nodeid.partition("::")[0]


def _lost(item: pytest.Item, status: int) -> pytest.TestReport:
    reason = f"its process ended with status {status}"
    return pytest.TestReport(item.nodeid, item.location, {}, "failed", reason, "call")
