"""Compile Triton kernels for a GPU that this machine does not have.

Triton needs an active driver in a process that runs kernels, as the test process does. So programs run in a separate
process, which imports Triton once for all of them.
"""

import contextlib
import io
import json
import os
import runpy
import subprocess
import sys
import traceback
from pathlib import Path

__all__ = ["OfflineCompiler"]


class OfflineCompiler:
    """A process that runs programs one after another.

    Args:
        folder: where programs and Triton's cache are written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        environment = os.environ | {"TRITON_CACHE_DIR": str(folder / "cache"), "TRITON_INTERPRET": "0"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def run(self, program: str, *arguments: str) -> str:
        """Return what a program prints; fail with its traceback if it raises."""
        assert self._process.stdin is not None and self._process.stdout is not None
        source = self._folder / "program.py"  # Triton reads the source of a kernel from its file
        source.write_text(program)
        self._process.stdin.write(json.dumps([str(source), *arguments]) + "\n")
        self._process.stdin.flush()
        printed, error = json.loads(self._process.stdout.readline())
        assert not error, error
        return printed

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def _serve() -> None:
    for line in sys.stdin:
        sys.argv = json.loads(line)
        printed, error = io.StringIO(), ""
        try:
            with contextlib.redirect_stdout(printed):
                runpy.run_path(sys.argv[0], run_name="__main__")
        except Exception:
            error = traceback.format_exc()
        print(json.dumps([printed.getvalue(), error]), flush=True)


if __name__ == "__main__":
    _serve()
