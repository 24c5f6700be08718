"""Processes of this machine: a child process, its stop state, and a process that ends with its parent.

Run as ``python -m detcompile.serving.engines.processes MODULE ARGUMENT...``, this runs MODULE in a process that ends
with its parent.
"""

import ctypes
import runpy
import signal
import sys
from pathlib import Path

__all__ = ["BOUND", "end_with_parent", "is_stopped", "main"]

BOUND = (sys.executable, "-m", "detcompile.serving.engines.processes")  # append a module
STOPPED = "T"  # by a signal; a debugger's stop is "t"
SET_PARENT_DEATH_SIGNAL = 1  # prctl(2)


def end_with_parent() -> None:
    """On Linux, have the kernel kill this process when the thread that started it ends, even if it is stopped by a
    signal."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def is_stopped(pid: int) -> bool:
    """Return True if a process or a descendant is stopped by a signal."""
    waiting = [pid]
    while waiting:
        process = Path(f"/proc/{waiting.pop()}")
        try:
            if process.joinpath("stat").read_text().rpartition(")")[2].split()[0] == STOPPED:
                return True
            for thread in process.joinpath("task").iterdir():
                waiting += map(int, thread.joinpath("children").read_text().split())
        except OSError:
            continue  # it has ended
    return False


def main() -> None:
    """Run the module given as first argument."""
    end_with_parent()  # before the module's slow imports
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
