"""A WorkerGroup with a rank that somebody else started and that connects over TCP."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from detcompile.errors import InvalidInput, WorkerError
from detcompile.runtime.processes.group import WorkerGroup
from detcompile.runtime.processes.rank_process import DialedRank

ROOT = Path(__file__).parents[3]
TARGET = "tests.runtime.processes.rank_targets:Rank"
SERVE = """
import socket, sys
from detcompile.runtime.processes.process import serve
serve(socket.create_connection(("127.0.0.1", int(sys.argv[1]))), dialed=True)
"""


class Started(NamedTuple):
    """A group of two ranks, and the process of the second, which the group has not started."""

    group: WorkerGroup
    dialed: DialedRank
    process: "subprocess.Popen[bytes]"


@pytest.fixture
def started() -> Iterator[Started]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process = subprocess.Popen([sys.executable, "-c", SERVE, str(listener.getsockname()[1])], cwd=ROOT)
        connection, _ = listener.accept()
    dialed = DialedRank(connection, process.pid)
    group = WorkerGroup(2, TARGET, (2, ""), dialed=[dialed])
    group.result(group.started)
    yield Started(group, dialed, process)
    group.close()
    process.kill()
    process.wait()


def assert_fails(started: Started, text: str, within: float) -> None:
    since = time.monotonic()
    with pytest.raises(WorkerError, match=text) as caught:
        started.group.call("sleep_on", 1, 60.0)
    assert time.monotonic() - since < within and caught.value.rank == 1
    assert not Path(f"/proc/{started.group.process_ids[0]}").exists()  # the other one was ended


def test_it_serves_as_the_others_and_ends_with_the_group(started: Started) -> None:
    group = started.group
    array = np.arange(3 << 20, dtype=np.uint8)
    for value in range(50):
        group.post("see", value)
    tickets = [group.submit("echo", array) for _ in range(3)]
    assert group.call("all_seen") == [(0, list(range(50))), (1, list(range(50)))]
    for ticket in tickets:
        assert all(np.array_equal(actual, array) for actual in group.result(ticket))
    with pytest.raises(InvalidInput, match="too long"):
        group.call("raise_on", 1, InvalidInput("too long"))
    assert group.process_ids[1] == started.process.pid
    group.post("sleep_on", 1, 60.0)
    group.close()
    assert started.process.wait(2) == 1


def test_its_end_is_noticed_at_once(started: Started) -> None:
    started.process.kill()
    assert_fails(started, f"process {started.process.pid} at 127.0.0.1 was closed", 2.0)


def test_stopped_rank_is_silent_busy_rank_is_not(started: Started) -> None:
    started.dialed.silence_seconds = 1.0
    started.group.call("sleep_on", 1, 2.0)
    time.sleep(1.2)  # nothing is heard of a rank that has nothing to do
    assert started.group.call("echo", 1) == [1, 1]
    started.process.send_signal(signal.SIGSTOP)
    assert_fails(started, "no sign of life from it", 3.0)
    started.process.send_signal(signal.SIGCONT)
    assert started.process.wait(2) == 1


def test_lost_machine_ends_the_group(started: Started) -> None:
    """What the system says where nothing answers its probes."""
    channel = started.dialed.channel

    class Unanswered:
        def recv_into(self, _memory: memoryview) -> int:
            raise TimeoutError(110, "Connection timed out")

    whole, channel._socket = channel._socket, Unanswered()
    with pytest.raises(EOFError):
        channel.pull()
    channel._socket = whole


def test_a_rank_of_a_caller_that_was_killed_ends() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process = subprocess.Popen([sys.executable, "-c", SERVE, str(listener.getsockname()[1])], cwd=ROOT)
        connection, _ = listener.accept()
        connection.close()
    assert process.wait(5) == 1
