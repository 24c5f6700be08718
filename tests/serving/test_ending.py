"""A server that is told to end or is killed ends soon, with all processes that it started."""

import asyncio
import contextlib
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from threading import Thread

import httpx
import pytest
import uvloop

from detcompile.errors import WorkerError
from detcompile.models.hub import TINY_FOLDER
from detcompile.runtime.grammars.grammar import Grammar
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.serving.engines import launchers
from detcompile.serving.engines.answers import Answer, AnswerSignal
from detcompile.serving.engines.engine_link import EngineLink
from detcompile.serving.engines.fleet import Fleet
from detcompile.serving.engines.launchers import Connection, DialIn, LocalProcess
from detcompile.serving.engines.spares import Spares
from detcompile.serving.grammar_check import GrammarCheck
from tests.exhaustive import EXHAUSTIVE, exhaustive_unless
from tests.serving.scripted_service import ENGINE, SPEC, scripted

pytestmark = pytest.mark.usefixtures("in_the_root")
DEAF = ["/bin/sleep", "1000"]  # a process that sees no end of its socket
LOOPS = pytest.mark.parametrize(
    "loop",
    [
        pytest.param(uvloop.new_event_loop, id="uvloop"),  # the server's
        pytest.param(asyncio.new_event_loop, id="asyncio", marks=EXHAUSTIVE),
    ],
)
TURNS = range(0, 24, 2)  # of the event loop, after which something is stopped


def run(loop, scenario) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(asyncio.wait_for(scenario, 60))


def descendants(pid: int) -> set[int]:
    actual, waiting = set(), [pid]
    while waiting:
        for path in Path(f"/proc/{waiting.pop()}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                started = [int(child) for child in path.read_text().split()]
                actual.update(started)
                waiting += started
    return actual


BEFORE: set[int] = set()  # processes of other tests


@pytest.fixture(autouse=True)
def before() -> None:
    BEFORE.clear()
    BEFORE.update(descendants(os.getpid()))


def started() -> set[int]:
    """Processes that this test has started, and that have not ended."""
    return descendants(os.getpid()) - BEFORE


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def assert_ended(pids: set[int], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while left := {pid for pid in pids if alive(pid)}:
        if time.monotonic() > end:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"{left} outlived the server")
        time.sleep(0.02)


@LOOPS
def test_cancelled_open_ends_process(loop) -> None:
    async def scenario() -> None:
        for turns in TURNS:
            opening = asyncio.create_task(LocalProcess(DEAF).open())
            for _ in range(turns):
                await asyncio.sleep(0)
            opening.cancel()
            [actual] = await asyncio.gather(opening, return_exceptions=True)
            if isinstance(actual, Connection):
                actual.kill()
            await asyncio.to_thread(assert_ended, started())

    run(loop, scenario())


@LOOPS
def test_stop_during_start_ends_all_processes(loop) -> None:
    async def scenario() -> None:
        for turns in TURNS:
            fleet = Fleet(launcher=LocalProcess(DEAF), replicas=3)
            starting = asyncio.create_task(fleet.start(SPEC))
            for _ in range(turns):
                await asyncio.sleep(0)
            await fleet.stop()
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await asyncio.to_thread(assert_ended, started())

    run(loop, scenario())


@LOOPS
def test_stop_ends_spare_that_is_opening(loop, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        for turns in TURNS:
            fleet = Fleet(launcher=LocalProcess(ENGINE), spare=True)
            await fleet.start(SPEC)
            settling = asyncio.create_task(fleet.settled())
            while fleet.hello is None:
                await asyncio.sleep(0)
            fleet._launcher._command = tuple(DEAF)
            for _ in range(turns):
                await asyncio.sleep(0)
            await fleet.stop()
            settling.cancel()
            await asyncio.gather(settling, return_exceptions=True)
            await asyncio.to_thread(assert_ended, started())

    run(loop, scenario())


async def test_spare_opening_beside_needed_process_is_kept() -> None:
    gates = [asyncio.Event(), asyncio.Event()]
    made: list[EngineLink] = []

    class Gated(EngineLink):
        async def open(self) -> None:
            await gates[made.index(self)].wait()

    def make() -> EngineLink:
        made.append(Gated())
        return made[-1]

    spares = Spares(make, keeps=True, most_lost=1)
    taking = asyncio.create_task(spares.take())
    await asyncio.sleep(0)
    keeping = asyncio.create_task(spares.keep())
    await asyncio.sleep(0)
    gates[1].set()
    await keeping
    gates[0].set()
    assert await taking is made[0]
    assert await spares.take() is made[1] and len(made) == 2


async def test_failed_spare_does_not_affect_serving() -> None:
    fleet = Fleet(launcher=LocalProcess(ENGINE), spare=True, most_restarts=1)
    await fleet.start(SPEC)
    fleet._launcher._command = ("/no/such/program",)
    await fleet.settled()
    assert fleet.ready and fleet.failure is None
    os.kill(fleet.links[0].pid, signal.SIGKILL)
    while fleet.failure is None:  # nothing is served any more, and that is told
        await asyncio.sleep(0.01)
    assert "could not be started" in str(fleet.failure)
    await fleet.stop()


async def test_engine_lost_during_start_is_reported() -> None:
    fleet = Fleet(launcher=LocalProcess(ENGINE), replicas=2)
    await fleet.start(SPEC)
    settled, gate = fleet.links[1].settled, asyncio.Event()

    async def late():
        await gate.wait()
        return await settled()

    fleet.links[1].settled = late
    settling = asyncio.create_task(fleet.settled())
    await fleet.links[0].settled()
    os.kill(fleet.links[0].pid, signal.SIGKILL)
    while fleet.links[0].failure is None:
        await asyncio.sleep(0.01)
    gate.set()
    with pytest.raises(WorkerError, match="SIGKILL"):
        await settling
    await fleet.stop()


@LOOPS
def test_answers_sent_to_dead_engine_move_elsewhere(loop, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        gate, lost = asyncio.Event(), []

        async def late(_connection: Connection) -> str:
            await gate.wait()
            return "late"

        monkeypatch.setattr(Connection, "ending", late)
        link = EngineLink(on_lost=lambda _link, answers: lost.extend(answers), launcher=LocalProcess(ENGINE))
        await link.open()
        link.start(SPEC)
        await link.settled()
        os.kill(link.pid, signal.SIGKILL)
        answers = [Answer(f"{index}", [5], SamplingParams(), AnswerSignal()) for index in range(20)]
        for answer in answers:
            link.add(answer)
            await asyncio.sleep(0.01)
        link.cancel(answers.pop())
        gate.set()
        while link.failure is None:
            await asyncio.sleep(0.01)
        assert lost == answers
        await link.stop()

    run(loop, scenario())


async def test_stop_does_not_wait_for_stuck_process(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hanging:
        pid, returncode = 1, None

        async def wait(self) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr(launchers, "ENDING_SECONDS", 0.05)
    connection = await LocalProcess(DEAF).open()
    connection.kill()
    await connection.wait()
    await Connection(connection.reader, connection.writer, Hanging()).wait()


@LOOPS
def test_process_starts_beside_huge_mappings(loop) -> None:
    """A fork would fail with ENOMEM, because the kernel counts neighboring mappings as one."""
    size = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE * 6 // 10
    mapped = [mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(4)]

    async def scenario() -> None:
        connection = await LocalProcess(DEAF).open()
        connection.kill()
        await connection.wait()
        assert connection.process.returncode == -signal.SIGKILL
        check = GrammarCheck((TINY_FOLDER / "tokenizer.json").read_text(), 60, lambda *_: nullcontext())
        await check.require(Grammar.regex("a"), "")
        await check.stop()

    try:
        run(loop, scenario())
    finally:
        for mapping in mapped:
            mapping.close()


async def test_late_dial_in_is_disconnected() -> None:
    dial = DialIn("127.0.0.1", 0, b"0123456789abcdef")
    host, port = await dial.address()
    reader, writer = await asyncio.open_connection(host, port)
    await reader.readexactly(32)
    await dial.close()
    writer.write(bytes(32))
    assert await reader.read() == b""
    writer.close()


def test_drain_ends_even_if_release_fails() -> None:
    code = (
        "import asyncio, types\n"
        "from detcompile.serving.server import Drain\n"
        "class Broken(dict):\n"
        "    def values(self): raise RuntimeError\n"
        "async def main():\n"
        "    service = types.SimpleNamespace(draining=False, open=Broken(), release=print)\n"
        "    server = types.SimpleNamespace(should_exit=False)\n"
        "    Drain(service, 0).signaled(server)\n"
        "    while not server.should_exit: await asyncio.sleep(0.01)\n"
        "asyncio.run(asyncio.wait_for(main(), 5))"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr


@contextlib.contextmanager
def server_process(*options: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """A server whose engine and spare are started or starting, and its output."""
    command = [sys.executable, "-m", "tests.serving.scripted_server", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines: list[str] = []
    reading = Thread(target=lambda: lines.extend(iter(process.stderr.readline, "")), daemon=True)
    reading.start()
    try:
        yield process, lines
    finally:
        process.kill()
        process.wait()


def url_of(lines: list[str]) -> str:
    end = time.monotonic() + 30
    while not any(line.startswith("serving ") for line in lines):
        assert time.monotonic() < end, lines
        time.sleep(0.02)
    return next(line for line in lines if line.startswith("serving ")).split()[3].rstrip(";")


def with_all_processes(process: subprocess.Popen[str], url: str) -> set[int]:
    """Wait for an engine, a spare and the grammar checker; return the server's processes."""
    requested = {"prompt": [5], "max_tokens": 1, "structured_outputs": {"regex": "[a-z]+"}}
    assert httpx.post(f"{url}/v1/completions", json=requested, timeout=30).status_code == 200
    while len(actual := descendants(process.pid)) < 3:
        time.sleep(0.02)
    return actual


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_stopped_processes_end_with_server(how: int) -> None:
    with server_process("5", "--spare") as (process, lines):
        actual = with_all_processes(process, url_of(lines))
        for pid in actual:
            os.kill(pid, signal.SIGSTOP)
        process.send_signal(how)
        assert process.wait(10) == (-how if how == signal.SIGKILL else 0)
        assert_ended(actual)


@pytest.mark.parametrize("seconds", exhaustive_unless((0.5).__eq__, [0.0, 0.2, 0.5, 1.0]))
@pytest.mark.parametrize("signals", [1, 2])
def test_signal_ends_starting_server(seconds: float, signals: int) -> None:
    with server_process("5", "--spare", "--replicas", "2") as (process, lines):
        while not descendants(process.pid):
            time.sleep(0.005)
        time.sleep(seconds)
        actual = descendants(process.pid)
        for _ in range(signals):
            process.send_signal(signal.SIGTERM)
        code = process.wait(15)
        assert code in (0, -signal.SIGTERM), "".join(lines)  # the second may find it about to end: it ends at once
        assert_ended(actual)


@pytest.mark.parametrize("case", ["engine lost", "isolation", "slow client"])
def test_signal_ends_server_in_any_state(case: str) -> None:
    with server_process("1", "--spare", "--restarts", "9") as (process, lines):
        url = url_of(lines)
        actual = with_all_processes(process, url)
        body = {"prompt": [5], "max_tokens": 2000, "stream": True}
        with contextlib.ExitStack() as stack:
            client = stack.enter_context(httpx.Client(timeout=30))
            answer = stack.enter_context(client.stream("POST", f"{url}/v1/completions", json=body))
            next(answer.iter_bytes())  # and no more is read
            if case == "isolation":
                poison = body | {"prompt": [666]}
                stack.enter_context(httpx.Client(timeout=30).stream("POST", f"{url}/v1/completions", json=poison))
                end = time.monotonic() + 60
                while sum("lost an engine" in line for line in lines) < 2:
                    assert time.monotonic() < end, lines
                    time.sleep(0.01)
            if case == "engine lost":
                for pid in actual:
                    os.kill(pid, signal.SIGSTOP)
                time.sleep(0.9)  # about when they are ended, and others are started
            actual |= descendants(process.pid)
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        assert_ended(actual)


async def test_concurrent_stops_end_all_processes() -> None:
    service = scripted(spare=True)
    await service.start(SPEC)
    await asyncio.gather(service.fleet.stop(), service.fleet.stop())
    assert not started()
    await service.stop()
