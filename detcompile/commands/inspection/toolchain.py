"""Tests the compilers and the cache: compiles a small program, writes and removes a file."""

import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

from detcompile import config
from detcompile.errors import CompilerNotFound, StorageError
from detcompile.storage import CACHE_ADVICE, distrust, naming
from detcompile.templates.cpu.shared_objects import compiler_version

KINDS = ("cpu", "programs", "schedules")  # folders of the cache
TRIAL = """
#include <omp.h>
#include <span>
extern "C" int trial(const int *x, int n) {
  int sum = 0;
#pragma omp parallel for reduction(+ : sum)
  for (int i = 0; i < n; ++i) sum += std::span(x, n)[i];
  return sum;
}
"""
TRIAL_FLAGS = ("-std=c++20", "-fopenmp", "-shared", "-fPIC", "-x", "c++")


@dataclass(frozen=True, kw_only=True)
class Compilers:
    """The C++ and C compilers.

    Attributes:
        cxx: the C++ command.
        version: its version text; None if it does not run.
        failure: why it cannot compile C++20 with OpenMP for the CPU kernels; empty if it can.
        c: path of the C compiler for Triton's kernel launchers; None if there is no compiler.
        python_headers: the folder of Python.h; None if it is missing.
    """

    cxx: str
    version: str | None
    failure: str
    c: str | None
    python_headers: str | None


@dataclass(frozen=True, kw_only=True)
class Cache:
    """The cache folder.

    Attributes:
        folder: the path; None if this user has no home folder.
        num_bytes: size of its files.
        free: free bytes on its disk.
        failure: why it cannot be used, and what to do; empty if it can.
    """

    folder: str | None
    num_bytes: int = 0
    free: int = 0
    failure: str = ""


def look_at_compilers() -> Compilers:
    """Test the compilers."""
    command = config.cxx_compiler()
    try:
        version, failure = compiler_version(), _trial(command)
    except CompilerNotFound as error:
        version, failure = None, str(error)
    wanted = config.c_compiler()
    names = shlex.split(wanted)[:1] if wanted else ["gcc", "clang"]
    c_path = next((path for name in names if (path := shutil.which(name))), None)
    headers = Path(sysconfig.get_path("include"))
    there = (headers / "Python.h").is_file()
    return Compilers(
        cxx=command, version=version, failure=failure, c=c_path, python_headers=str(headers) if there else None
    )


def look_at_cache() -> Cache:
    """Measure the cache, and test that it can be written."""
    folder = None
    try:
        folder = config.cache_directory()
        with naming(folder, CACHE_ADVICE):
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            place = next(there for there in (folder, *folder.absolute().parents) if there.exists())
            free = shutil.disk_usage(place).free
        return Cache(folder=str(folder), num_bytes=size, free=free, failure=_obstacle(folder, place))
    except StorageError as error:
        return Cache(folder=None if folder is None else str(folder), failure=str(error))


def _trial(command: str) -> str:
    """Return why a small C++ program cannot be compiled; empty if it can."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [*shlex.split(command), *TRIAL_FLAGS, "-", "-o", str(Path(folder, "trial.so"))],
                input=TRIAL,
                capture_output=True,
                text=True,
                check=False,
                env=config.compiler_environment(folder),
            )
    except OSError as error:
        return f"a program could not be compiled: {error}"
    if done.returncode == 0:
        return ""
    message = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[-200:])
    return f"{command!r} fails on C++20 with OpenMP: {message.strip()}. Install g++ 11 or later, or name it in CXX."


def _obstacle(folder: Path, place: Path) -> str:
    """Return why code must not be loaded from the cache; empty if it may.

    Args:
        place: the folder, or its nearest existing parent.
    """
    for path in (place, *(folder / kind for kind in KINDS)):
        if not path.exists():
            continue
        if path.is_relative_to(folder) and (reason := distrust(path, sticky=path == folder)):
            return f"{reason}, and code is loaded from it: run `chmod go-w` on it, or set DETCOMPILE_CACHE."
        with naming(path, CACHE_ADVICE), tempfile.TemporaryFile(dir=path):
            pass
    if os.statvfs(place).f_flag & os.ST_NOEXEC:
        return f"{place} is on a disk that runs no code (noexec): set DETCOMPILE_CACHE to a folder elsewhere."
    return ""
