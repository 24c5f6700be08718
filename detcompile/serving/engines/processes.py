"""Processes of this machine: a child process, its stop state, and a process that ends with its parent.

Run as ``python -m detcompile.serving.engines.processes MODULE ARGUMENT...``, this runs MODULE in a process that ends
with its parent.
"""

import asyncio
import ctypes
import runpy
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

BOUND = (sys.executable, "-m", "detcompile.serving.engines.processes")  # append a module
STOPPED = "T"  # by a signal; a debugger's stop is "t"
SET_PARENT_DEATH_SIGNAL = 1  # prctl(2)
POLL_SECONDS = 0.01  # while waiting for a process to end


class Child:
    """A process in its own session, so that Ctrl-C reaches only the front end, which then ends it.

    asyncio under uvloop forks, which copies the page tables and fails with ENOMEM if a mapping exceeds the machine's
    memory; subprocess uses vfork. The calling thread starts the process, because with PR_SET_PDEATHSIG the kernel kills
    the process when that thread ends.

    Args:
        command: program and arguments.
        stdin: file descriptor of the input.
        stdout: file descriptor of the output; None inherits the front end's.
        passed: further file descriptors to inherit.

    Raises:
        OSError: the process could not be started.

    Attributes:
        pid: process id; also the process group.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: int = subprocess.DEVNULL,
        stdout: int | None = None,
        passed: Sequence[int] = (),
    ) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=stdout,
            pass_fds=passed,
            start_new_session=True,
        )
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """Return the exit code, or minus the signal number; None while it runs."""
        return self._process.poll()

    def kill(self) -> None:
        """Kill the process if it runs."""
        self._process.kill()

    async def wait(self) -> None:
        """Wait for the end."""
        while self.returncode is None:
            await asyncio.sleep(POLL_SECONDS)


def end_with_parent() -> None:
    """On Linux, have the kernel kill this process when the thread that started it ends, even if it is stopped."""
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
