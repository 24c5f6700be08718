"""Compile C++ sources to a shared object in the cache, atomically, with any number of processes.

One process builds and the others wait; otherwise ranks that start together would each run every compiler. A file ends
with the SHA-256 of its content, so a damaged one is never loaded, and is renamed into place. A file that other users
could have written is never loaded.
"""

import contextlib
import fcntl
import functools
import hashlib
import os
import shlex
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from detcompile import config
from detcompile.errors import CompilerNotFound
from detcompile.storage import CACHE_ADVICE, disk_failure, distrust, naming, put

_DIGEST_BYTES = 32
_LONGEST_WAIT = 300.0  # seconds to wait for another process's build; that process may be stopped


@functools.cache
def compiler_version() -> str:
    """Return the first line of the C++ compiler's version output.

    Raises:
        CompilerNotFound: no compiler runs under config.cxx_compiler().
    """
    command = config.cxx_compiler()
    try:
        output = subprocess.run([*shlex.split(command), "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise CompilerNotFound(
            f"The CPU templates are compiled on first use, but the C++ compiler {command!r} does not run ({error}). "
            "Install one (Debian, Ubuntu: apt-get install g++) or name yours in CXX."
        ) from error
    return output.splitlines()[0] if output else command


def compiler_if_any() -> str:
    """Return compiler_version(), or an empty string if no compiler runs; for cache keys."""
    try:
        return compiler_version()
    except CompilerNotFound:
        return ""


def is_intact(path: Path) -> bool:
    """Return True if only this user (or root) can write the file and it ends with the digest of its content.

    Loading a truncated library would crash the process; loading another user's would run their code.

    Raises:
        StorageError: the file exists and cannot be read.
    """
    with naming(path, CACHE_ADVICE):
        if path.is_symlink() or not path.is_file() or distrust(path):
            return False
        content = path.read_bytes()
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


def build(path: Path, sources: Iterable[Path], flags: Sequence[str], libraries: Sequence[str] = ()) -> None:
    """Compile the sources in parallel and link them into ``path``, in a folder of storage.cache_folder.

    Returns at once if another process has put the file there.

    Args:
        flags: compiler flags, for compiling and linking.
        libraries: linker arguments after the objects.

    Raises:
        CompilerNotFound: the compiler ends with an error.
        StorageError: the folder is full or cannot be written.
    """
    command = [*shlex.split(config.cxx_compiler()), *flags]
    with (
        naming(path.parent, CACHE_ADVICE),
        _alone_in(path.parent),
        tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as folder,
    ):
        if is_intact(path):
            return
        objects = [(source, Path(folder, source.stem + ".o")) for source in sources]
        _run_all([[*command, "-c", str(source), "-o", str(target)] for source, target in objects], folder)
        linked = Path(folder, "linked.so")
        parts = [str(target) for _, target in objects]
        _run_all([[*command, "-shared", *parts, "-o", str(linked), *libraries]], folder)
        content = linked.read_bytes()
        put(path, content + hashlib.sha256(content).digest())


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Hold the folder's build lock; give up after _LONGEST_WAIT, or if the file system has no locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        end = time.monotonic() + _LONGEST_WAIT
        while time.monotonic() < end:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
            except OSError:  # NFS cannot lock files opened for reading
                break
        yield
    finally:
        os.close(descriptor)


def _run_all(commands: Sequence[Sequence[str]], folder: str) -> None:
    """Run compiler commands, one per core at a time; their temporary files go to ``folder``."""
    environment = config.compiler_environment(folder)

    def run(command: Sequence[str]) -> None:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
        if done.returncode != 0:
            failed = CompilerNotFound(
                f"C++ could not be compiled: {shlex.join(command)} ended with {done.returncode}:\n"
                f"{done.stdout.decode(errors='replace')[-2000:]}\n"
                "Install a C++20 compiler with OpenMP (g++ 11 or later) or name one in CXX."
            )
            raise disk_failure(failed, Path(folder).parent, CACHE_ADVICE) or failed

    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), "compilers") as pool:
        for done in [pool.submit(run, command) for command in commands]:
            done.result()
