"""WorkerGroup: commands, results, and failures that name their rank and leave no process."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from detcompile.errors import InvalidInput, WorkerError
from detcompile.runtime.processes.group import WorkerGroup

TARGET = "tests.runtime.processes.rank_targets:Rank"
NOTICED = 2.0  # seconds within which a failure is known and every process gone
START = 30.0  # where processes start first
ROOT = Path(__file__).parents[3]


def new_group(start: str = "", num_ranks: int = 2, **seconds: float) -> WorkerGroup:
    return WorkerGroup(num_ranks, TARGET, (num_ranks, start), **seconds)


def started_group(**seconds: float) -> WorkerGroup:
    group = new_group(**seconds)
    group.result(group.started)
    return group


@pytest.fixture(scope="module")
def group() -> Iterator[WorkerGroup]:
    """One that nothing breaks."""
    group = started_group()
    yield group
    group.close()


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for yet does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def assert_gone(pids: list[int], seconds: float = NOTICED) -> None:
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)):
        assert time.monotonic() < deadline, f"{list(filter(alive, pids))} of {pids} still run"
        time.sleep(0.01)


def assert_fails(group: WorkerGroup, act: Callable[[], object], rank: int, text: str, within: float = NOTICED) -> None:
    """Fail unless ``act`` raises a WorkerError of this rank in time, every later call too, and no process is left."""
    pids = group.process_ids
    since = time.monotonic()
    with pytest.raises(WorkerError, match=text) as caught:
        act()
    assert time.monotonic() - since < within
    assert caught.value.rank == rank
    assert not any(map(alive, pids))
    for call in (lambda: group.call("echo", 1), lambda: group.post("see", 1), lambda: group.submit("see", 1)):
        since = time.monotonic()
        with pytest.raises(WorkerError) as again:
            call()
        assert time.monotonic() - since < 0.1
        assert str(again.value) == str(caught.value)
    group.close()


def test_every_rank_serves_every_command_in_order(group: WorkerGroup) -> None:
    for value in range(50):
        group.post("see", value)
    assert group.call("all_seen") == [(0, list(range(50))), (1, list(range(50)))]


@given(
    sizes=st.lists(st.sampled_from([0, 1, 1000, 1 << 14, (1 << 14) + 1, 3 << 20]), max_size=6),
    order=st.randoms(use_true_random=False),
)
def test_commands_of_any_size_may_be_in_flight(group: WorkerGroup, sizes: list[int], order) -> None:
    """Megabytes travel in both directions at once, more than the sockets hold, so both sides must read."""
    sent = [np.arange(size, dtype=np.uint8) for size in sizes]
    tickets = [(group.submit("echo", [array, index]), index) for index, array in enumerate(sent)]
    order.shuffle(tickets)
    for ticket, index in tickets:
        for actual, place in group.result(ticket):
            assert place == index and actual.tobytes() == sent[index].tobytes()
            actual += 1  # an array that came may be written to


def test_a_processes_signals_are_its_own(group: WorkerGroup) -> None:
    assert group.call("threads_and_group") == [(True, True)] * 2


def test_ranks_tell_how_they_get_on() -> None:
    notes = []
    group = new_group()
    group.on_note = lambda rank, text: notes.append((rank, text))
    group.result(group.started)
    assert sorted(notes) == [(0, "rank 0 starts"), (1, "rank 1 starts")]


FAULTS = {
    "killed": (lambda g: g.call("kill_on", 1), "SIGKILL"),
    "terminated": (lambda g: g.call("kill_on", 1, signal.SIGTERM), "SIGTERM"),
    "exits": (lambda g: g.call("exit_on", 1), "exit code 7"),
    "raises": (lambda g: g.call("raise_on", 1, ValueError("this")), "rank_targets.py(.|\n)*ValueError: this"),
    "raises before the next call": (
        lambda g: (g.post("raise_on", 1, ValueError("this")), g.call("echo", 1)),
        "ValueError: this",
    ),
    "hangs": (lambda g: g.call("sleep_on", 1, 60, seconds=0.5), "'sleep_on' for 0.5 s"),
    "hangs in a post": (lambda g: (g.post("sleep_on", 1, 60), g.call("echo", 1, seconds=0.5)), "'echo' for 0.5 s"),
    "dies while nobody calls": (
        lambda g: (os.kill(g.process_ids[1], signal.SIGKILL), time.sleep(0.1), g.call("echo", 1)),
        "SIGKILL",
    ),
}


@pytest.mark.parametrize(("act", "text"), FAULTS.values(), ids=FAULTS)
def test_a_fault_names_its_rank_and_ends_all(act: Callable, text: str) -> None:
    group = started_group()
    assert_fails(group, lambda: act(group), 1, text)


def test_errors_that_cannot_travel_are_told_in_text() -> None:
    group = new_group(num_ranks=1)
    assert_fails(group, lambda: group.call("raise_unreadable"), 0, "UnreadableError: unreadable", START)
    group = new_group(num_ranks=1)
    assert_fails(group, lambda: group.call("unpicklable"), 0, "pickle", START)


def test_a_rank_that_cannot_start() -> None:
    group = new_group("raise")
    assert_fails(group, lambda: group.result(group.started), 1, "ValueError: no such thing", START)
    group = new_group("sleep", start_seconds=1.0)
    assert_fails(group, lambda: group.result(group.started), 1, "'start' for 1 s", START)
    group = WorkerGroup(1, "tests.runtime.nowhere:Rank")
    assert_fails(group, lambda: group.result(group.started), 0, "No module named 'tests.runtime.nowhere'", START)


def test_a_rank_that_no_longer_reads() -> None:
    """It is busy, and the command is longer than its socket holds: neither sending nor waiting may last forever."""
    group = started_group(step_seconds=2.0)

    def act() -> None:
        group.post("sleep_on", 1, 60)
        time.sleep(0.3)  # so that it is not read in one go with what follows
        group.post("see", bytes(1 << 20))

    assert_fails(group, act, 1, "read no command for 2 s", 2.3 + NOTICED)


def stop(group: WorkerGroup, *ranks: int) -> None:
    for rank in ranks:
        os.kill(group.process_ids[rank], signal.SIGSTOP)


STOPPED = {
    "before a command": lambda g: (stop(g, 1), g.call("echo", 1)),
    "before a post that its socket cannot hold": lambda g: (stop(g, 1), g.post("see", bytes(1 << 20))),
    "in a command": lambda g: (g.submit("sleep_on", 1, 60), stop(g, 1), g.call("echo", 1)),
    "by itself": lambda g: g.call("stop_on", 1),
    "long before": lambda g: (stop(g, 1), time.sleep(1.0), g.call("echo", 1)),
    "with all others": lambda g: (stop(g, 1, 0), g.call("echo", 1)),
}


@pytest.mark.parametrize("act", STOPPED.values(), ids=STOPPED)
def test_a_stopped_rank_is_known_long_before_its_deadline(act: Callable) -> None:
    group = started_group(step_seconds=3600.0)
    rank = 0 if act is STOPPED["with all others"] else 1
    seconds = NOTICED + (1.0 if act is STOPPED["long before"] else 0.0)
    assert_fails(group, lambda: act(group), rank, r"is stopped \(SIGSTOP\)", seconds)


def test_rank_stopped_during_start_fails() -> None:
    group = new_group("sleep")
    stop(group, 1)
    assert_fails(group, lambda: group.result(group.started), 1, r"is stopped \(SIGSTOP\)")


def test_rank_stopped_briefly_or_busy_for_long_answers(group: WorkerGroup) -> None:
    ticket = group.submit("echo", 1)
    for _ in range(3):
        stop(group, 1)
        time.sleep(0.3)
        os.kill(group.process_ids[1], signal.SIGCONT)
    assert group.result(ticket) == [1, 1]
    assert group.call("hold_on", 1, 3.0, seconds=60.0) == [None, None]


def test_user_error_keeps_group_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("detcompile.runtime.processes.group.REFUSAL_SECONDS", 0.5)
    group = started_group()
    for rank in (0, 1):
        with pytest.raises(InvalidInput, match="too long") as caught:
            group.call("raise_on", rank, InvalidInput("too long"))
        assert "rank_targets.py" in caught.value.__notes__[0]
        assert group.call("echo", 3) == [3, 3]
    group.post("sleep_on", 1, 60)  # a rank that refuses does not let the others wait for ever
    assert_fails(group, lambda: group.call("raise_on", 0, InvalidInput("this")), 1, "rank 0 refused it: this")


def test_close_ends_processes_and_their_children() -> None:
    group = started_group()
    pids = [*group.process_ids, *group.call("start_child")]
    group.post("sleep_on", 1, 60)
    group.close()
    group.close()
    assert_gone(pids)
    with pytest.raises(WorkerError, match="closed") as caught:
        group.call("echo", 1)
    assert caught.value.rank is None


def test_a_group_that_nobody_holds_ends() -> None:
    group = started_group()
    pids = group.process_ids
    assert all(map(alive, pids))
    del group
    gc.collect()
    assert_gone(pids)


def run_script(body: str) -> "subprocess.Popen[str]":
    """A process whose main module has no guard, that starts a group and prints the ids of its processes."""
    start = f"""
        import os, signal, sys, time
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
        from detcompile.runtime.processes.group import WorkerGroup
        group_target = {TARGET!r}
        group = WorkerGroup(2, group_target, (2, ""))
        print(*group.process_ids, *group.call("start_child"), flush=True)
    """
    script = textwrap.dedent(start) + textwrap.dedent(body)
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, text=True, stdin=pipe, stdout=pipe)


def process_ids(script: "subprocess.Popen[str]") -> list[int]:
    assert script.stdout is not None
    return [int(word) for word in script.stdout.readline().split()]


def test_killed_parent_ends_its_workers() -> None:
    script = run_script('group.call("sleep_on", 1, 60)')
    pids = process_ids(script)
    assert len(pids) == 4
    time.sleep(0.1)
    assert all(map(alive, pids))
    script.kill()
    script.wait()
    assert_gone(pids[:2])


def test_an_interrupt_ends_the_workers_and_so_does_an_exit_but_not_that_of_a_fork() -> None:
    script = run_script(
        """
        if os.fork() == 0:
            sys.exit()
        os.wait()
        print(group.call("echo", "alive"), flush=True)
        other = WorkerGroup(1, group_target, (1, ""))
        print(*other.process_ids, flush=True)
        try:
            group.call("sleep_on", 1, 60)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        try:
            group.call("echo", 1)
        except Exception as error:
            print(error, flush=True)
        sys.stdin.readline()
        """
    )
    pids = process_ids(script)
    assert script.stdout is not None and script.stdin is not None
    assert script.stdout.readline() == "['alive', 'alive']\n"
    others = process_ids(script)
    time.sleep(0.2)
    script.send_signal(signal.SIGINT)
    assert script.stdout.readline() == "interrupted\n"
    assert "ended by KeyboardInterrupt" in script.stdout.readline()
    assert_gone(pids)
    assert all(map(alive, others))
    script.stdin.close()
    assert script.wait(timeout=60) == 0
    assert_gone(others)
