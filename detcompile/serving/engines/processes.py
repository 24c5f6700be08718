"""What the kernel knows of a process and of those that it has started, and a process that ends with its parent.

Run as ``python -m detcompile.serving.engines.processes MODULE ARGUMENT...`` this is that process: it runs MODULE.
"""

import ctypes
import runpy
import signal
import sys
from pathlib import Path

__all__ = ["BOUND", "end_with_parent", "is_stopped", "main"]

BOUND = (sys.executable, "-m", "detcompile.serving.engines.processes")  # and a module: a command of such a process
STOPPED = "T"  # by a signal; a debugger's stop is "t"
SET_PARENT_DEATH_SIGNAL = 1  # prctl(2)


def end_with_parent() -> None:
    """Have the kernel kill this process when the thread that has started it ends, also while a signal has stopped it.

    Nothing happens where the system is not Linux.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


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


def main() -> None:
    """Run the module that is named first, which ends with whoever has started this process."""
    end_with_parent()  # before what the module imports takes its time
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
