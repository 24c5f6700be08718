"""What the kernel knows of a process and of those that it has started."""

from pathlib import Path

__all__ = ["is_stopped"]

STOPPED = "T"  # by a signal; a debugger's stop is "t"


def is_stopped(pid: int) -> bool:
    """Whether a process, or one that descends from it, was stopped by a signal and has not gone on."""
    waiting = [pid]
    while waiting:
        process = Path(f"/proc/{waiting.pop()}")
        try:
            if process.joinpath("stat").read_text().rpartition(")")[2].split()[0] == STOPPED:
                return True
            for thread in process.joinpath("task").iterdir():
                waiting += map(int, thread.joinpath("children").read_text().split())
        except OSError:
            continue  # it has ended meanwhile
    return False
