"""File writes: cache folders that only this user can write, and disk errors that name the path."""

import contextlib
import errno
import os
import pwd
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from detcompile import config
from detcompile.errors import StorageError

CACHE_ADVICE = "Free space there or make it writable, or set DETCOMPILE_CACHE to a folder of yours with room."
TEMPORARY_ADVICE = "Free space there or make it writable, or set TMPDIR to another folder."
INDUCTOR_ADVICE = "Free space there or make it writable, or set TORCHINDUCTOR_CACHE_DIR, or TMPDIR, to another folder."
PLACE_ADVICE = "Free space there or make it writable, or pass another path."
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EIO}
DISK_WORDS = tuple(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS))
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def cache_folder(name: str) -> Path:
    """Return a folder of the cache; create it if needed.

    Its files are loaded as code, so only this user and root may be able to write to it.

    Raises:
        StorageError: the folder cannot be created, or others can write to it.
    """
    root = config.cache_directory()
    for folder in (root, root / name):
        with naming(folder, CACHE_ADVICE):
            folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            reason = distrust(folder, sticky=folder == root)
        if reason:
            raise StorageError(
                f"{reason}, and code is loaded from that folder: run `chmod go-w` on it if it is yours, or set"
                " DETCOMPILE_CACHE to a folder that only you can write"
            )
    return root / name


def distrust(path: Path, *, sticky: bool = False) -> str:
    """Return why another user may have written ``path``; empty if only this user and root could.

    Args:
        sticky: accept a folder that others can write if its sticky bit is set, as for /tmp.

    Raises:
        OSError: the path does not exist or cannot be read.
    """
    status = path.stat()
    if status.st_uid not in (0, os.geteuid()):
        return f"{path} belongs to {_user(status.st_uid)}, not to {_user(os.geteuid())}"
    if status.st_mode & OTHERS_WRITE and not (sticky and status.st_mode & stat.S_ISVTX):
        return f"{path} can be written by others (mode {stat.S_IMODE(status.st_mode):o})"
    return ""


def put(path: Path, content: bytes) -> None:
    """Write a cache file atomically, writable by this user only. Several processes may write the same file.

    Raises:
        OSError: the file cannot be written.
    """
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            os.fchmod(file.fileno(), 0o755)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


@contextlib.contextmanager
def naming(path: Path, advice: str = PLACE_ADVICE) -> Iterator[None]:
    """Turn an OSError inside the block into a StorageError that names ``path`` and ends with ``advice``."""
    try:
        yield
    except OSError as error:
        raise _failed(path, error.strerror or str(error), advice) from error


@contextlib.contextmanager
def in_temporary_folder() -> Iterator[None]:
    """Turn a failure to write temporary files inside the block into a StorageError."""
    try:
        yield
    except OSError as error:
        place = Path(str(error.filename or tempfile.tempdir or "TMPDIR"))
        raise _failed(place, error.strerror or str(error), TEMPORARY_ADVICE) from error
    except RuntimeError as error:  # torch reports disk errors in its message only
        failed = disk_failure(error, Path(tempfile.gettempdir()), TEMPORARY_ADVICE)
        if failed is None:
            raise
        raise failed from error


def disk_failure(error: BaseException, folder: Path, advice: str = PLACE_ADVICE) -> StorageError | None:
    """Return a StorageError if an exception, or one of its causes, reports a full or unwritable disk.

    Args:
        folder: path to name if the exception has none.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in FULL | REFUSED:
            place = Path(os.fsdecode(seen.filename)) if isinstance(seen.filename, str | bytes) else folder
            return _failed(place, seen.strerror or str(seen), advice)
        words = next((words for words in DISK_WORDS if words in str(seen)), None)
        if words is not None:
            return _failed(folder, words, advice)
        seen = getattr(seen, "inner_exception", None) or seen.__cause__ or seen.__context__
    return None


def _failed(path: Path, reason: str, advice: str) -> StorageError:
    return StorageError(f"{path} cannot be used: {reason}. {advice}")


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"
