"""A process that the front has started, in a way that costs the same however much memory the front has mapped."""

import asyncio
import subprocess
from collections.abc import Sequence

__all__ = ["Child"]

LOOK_SECONDS = 0.01  # between two looks at a process whose end is waited for


class Child:
    """A process in a session of its own: Ctrl-C is for the front, which ends it.

    asyncio's way under uvloop forks, which copies the page tables and fails with ENOMEM where a mapping is larger than
    the machine's memory; subprocess does not (vfork). It is started by the thread that calls, as the kernel ends some
    processes with the thread that has started them.

    Args:
        command: what to run.
        stdin: descriptor of what it reads.
        stdout: descriptor of what it writes to; None for what the front writes to.
        passed: other descriptors that it has, by the same numbers.

    Raises:
        OSError: it could not be started.

    Attributes:
        pid: number of the process, also of its process group.
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
        """How it ended, minus the signal's number where that was by one; None while it runs."""
        return self._process.poll()

    def kill(self) -> None:
        """End it; nothing happens where it has ended."""
        self._process.kill()

    async def wait(self) -> int:
        """Wait for its end; returns how it ended."""
        while (code := self.returncode) is None:
            await asyncio.sleep(LOOK_SECONDS)
        return code
