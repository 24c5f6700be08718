"""Child processes of the front end; starting one costs the same however much memory the front end has mapped."""

import asyncio
import subprocess
from collections.abc import Sequence

__all__ = ["Child"]

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

    async def wait(self) -> int:
        """Wait for the end; return the exit code."""
        while (code := self.returncode) is None:
            await asyncio.sleep(POLL_SECONDS)
        return code
