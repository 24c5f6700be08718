"""The folder of kept programs. Each is one file, named by its key, written whole or not at all."""

import contextlib
import hashlib
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from detcompile import storage

FOLDER = "programs"
MAGIC = b"detcompile program 1"
KEY_PART = "key: "  # prefix of a key's parts in a label


class Entry(NamedTuple):
    """A kept program's file.

    Attributes:
        label: the label passed to `write`; empty if the file is damaged.
        size: bytes.
        made: when it was written, in seconds since 1970.
    """

    path: Path
    label: Mapping[str, str]
    size: int
    made: float


def read(key: str) -> bytes | None:
    """Return the program of a key; None if it is missing, unreadable or damaged. A damaged file is removed.

    Raises:
        StorageError: the cache cannot be used.
    """
    path = _path(key)
    try:
        content = path.read_bytes()
        reason = storage.distrust(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        why = f"{path} cannot be read: {error.strerror or error}. {storage.CACHE_ADVICE}"
        warnings.warn(f"a kept program is not used: {why}", stacklevel=2)
        return None
    head, _, program = content.partition(b"\n\n")
    magic, digest, *_ = [*head.split(b"\n"), b""]
    if not reason and magic == MAGIC and digest.decode("ascii", "replace") == _digest(program):
        return program
    warnings.warn(f"a kept program is not used: {reason or f'{path} is damaged'}", stacklevel=2)
    if not reason:
        with contextlib.suppress(OSError):
            path.unlink()
    return None


def write(key: str, program: bytes, label: Mapping[str, str]) -> None:
    """Keep a program. Warn if the disk fails: the compiled program runs anyway.

    Args:
        label: description for lists of programs.

    Raises:
        StorageError: the cache's folder cannot be used.
    """
    path = _path(key)
    head = b"\n".join([MAGIC, _digest(program).encode(), json.dumps(dict(label)).encode()])
    try:
        storage.put(path, head + b"\n\n" + program)
    except OSError as error:
        reason = error.strerror or str(error)
        warnings.warn(f"{path}: a compiled program is not kept: {reason}. {storage.CACHE_ADVICE}", stacklevel=2)


def entries() -> list[Entry]:
    """Return the kept programs, latest last, without unreadable files."""
    result = []
    for path in storage.cache_folder(FOLDER).glob("*.program"):
        try:
            with path.open("rb") as file:
                head = file.read(1 << 16).partition(b"\n\n")[0].split(b"\n")
            status = path.stat()
        except OSError:  # removed by another process, or not a file
            continue
        label = _label(head[2]) if head[0] == MAGIC and len(head) == 3 else {}
        result.append(Entry(path, label, status.st_size, status.st_mtime))
    return sorted(result, key=lambda entry: entry.made)


def _label(written: bytes) -> dict[str, str]:
    try:
        label = json.loads(written)
    except (ValueError, RecursionError):
        return {}
    return {name: str(value) for name, value in label.items()} if isinstance(label, dict) else {}


def _path(key: str) -> Path:
    return storage.cache_folder(FOLDER) / f"{key}.program"


def _digest(program: bytes) -> str:
    return hashlib.sha256(program).hexdigest()
