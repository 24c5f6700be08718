"""C++ sources -> a shared object in the cache: whole or absent, however many processes build it at once.

A file ends with the SHA-256 of its own bytes, so that a damaged one is never loaded, and is renamed into place. One
that somebody else could have written is never loaded either.
"""

import functools
import hashlib
import shlex
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from detcompile import config
from detcompile.errors import CompilerNotFound
from detcompile.storage import CACHE_ADVICE, disk_failure, distrust, naming, put

__all__ = ["build", "compiler_version", "is_intact"]

_DIGEST_BYTES = 32


@functools.cache
def compiler_version() -> str:
    """First line that the C++ compiler prints about itself.

    Raises:
        CompilerNotFound: no compiler runs under config.cxx_compiler().
    """
    command = config.cxx_compiler()
    try:
        output = subprocess.run([*shlex.split(command), "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise CompilerNotFound(
            f"The CPU templates are compiled on first use, and the C++ compiler {command!r} does not run ({error}). "
            "Install one (Debian, Ubuntu: apt-get install g++) or name yours in CXX."
        ) from error
    return output.splitlines()[0] if output else command


def is_intact(path: Path) -> bool:
    """Whether the file is this user's (or root's) alone, and ends with the digest of what precedes: loading a truncated
    library would crash the process, and loading somebody else's would run their code.

    Raises:
        StorageError: it is there and cannot be read.
    """
    with naming(path, CACHE_ADVICE):
        if path.is_symlink() or not path.is_file() or distrust(path):
            return False
        content = path.read_bytes()
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


def build(path: Path, sources: Iterable[Path], flags: Sequence[str], libraries: Sequence[str] = ()) -> None:
    """Compile the sources side by side and link them into ``path``, in a folder of storage.cache_folder.

    Args:
        flags: the compiler's, for compiling and linking.
        libraries: the linker's arguments behind the objects.

    Raises:
        CompilerNotFound: the compiler ends with an error.
        StorageError: the folder is full or cannot be written.
    """
    command = [*shlex.split(config.cxx_compiler()), *flags]
    with naming(path.parent, CACHE_ADVICE), tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as folder:
        objects = [(source, Path(folder, source.stem + ".o")) for source in sources]
        _run_all([[*command, "-c", str(source), "-o", str(target)] for source, target in objects], folder)
        linked = Path(folder, "linked.so")
        parts = [str(target) for _, target in objects]
        _run_all([[*command, "-shared", *parts, "-o", str(linked), *libraries]], folder)
        content = linked.read_bytes()
        put(path, content + hashlib.sha256(content).digest())


def _run_all(commands: Sequence[Sequence[str]], folder: str) -> None:
    """Runs compiler commands side by side; what they write meanwhile is in ``folder`` too."""
    environment = config.compiler_environment(folder)
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
        for command in commands
    ]
    outputs = [process.communicate()[0].decode(errors="replace") for process in running]
    for process, command, output in zip(running, commands, outputs, strict=True):
        if process.returncode != 0:
            failed = CompilerNotFound(
                f"C++ could not be compiled: {shlex.join(command)} ended with {process.returncode}:\n"
                f"{output[-2000:]}\nInstall a C++20 compiler with OpenMP (g++ 11 or later) or name one in CXX."
            )
            raise disk_failure(failed, Path(folder).parent, CACHE_ADVICE) or failed
