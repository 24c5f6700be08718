"""Where detcompile writes: folders of the cache that are this user's alone, and what a disk refuses, by its path."""

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

__all__ = [
    "CACHE_ADVICE", "INDUCTOR_ADVICE", "TEMPORARY_ADVICE", "cache_folder", "disk_failure", "distrust",
    "in_temporary_folder", "naming", "put",
]  # fmt: skip

CACHE_ADVICE = "Free space there or make it writable, or set DETCOMPILE_CACHE to a folder of yours with room."
TEMPORARY_ADVICE = "Free space there or make it writable, or set TMPDIR to another folder."
INDUCTOR_ADVICE = "Free space there or make it writable, or set TORCHINDUCTOR_CACHE_DIR, or TMPDIR, to another folder."
PLACE_ADVICE = "Free space there or make it writable, or give another place."
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EIO}
DISK_WORDS = tuple(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS))
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def cache_folder(name: str) -> Path:
    """A folder of the cache, made if there is none, which nobody but this user and root can write.

    What lies there is loaded as code or believed, so a folder that others could have filled is refused.

    Raises:
        StorageError: it cannot be made, or is not this user's alone.
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
    """Why what lies at ``path`` may be somebody else's than this user's or root's; empty if it cannot.

    Args:
        sticky: others may write to a folder where they cannot rename what is ours, as in /tmp.

    Raises:
        OSError: there is nothing, or it cannot be looked at.
    """
    found = path.stat()
    if found.st_uid not in (0, os.geteuid()):
        return f"{path} belongs to {_user(found.st_uid)}, not to {_user(os.geteuid())}"
    if found.st_mode & OTHERS_WRITE and not (sticky and found.st_mode & stat.S_ISVTX):
        return f"{path} can be written by others (mode {stat.S_IMODE(found.st_mode):o})"
    return ""


def put(path: Path, content: bytes) -> None:
    """Write a file of the cache: whole or absent, however many processes do, and writable by this user alone.

    Raises:
        OSError: it cannot be written.
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
    """What fails here for the disk's sake fails as a StorageError that names ``path`` and says what to do."""
    try:
        yield
    except OSError as error:
        raise _failed(path, error.strerror or str(error), advice) from error


@contextlib.contextmanager
def in_temporary_folder() -> Iterator[None]:
    """What fails here for want of room, or of a folder, for temporary files fails as a StorageError that says so."""
    try:
        yield
    except OSError as error:
        place = Path(str(error.filename or tempfile.tempdir or "TMPDIR"))
        raise _failed(place, error.strerror or str(error), TEMPORARY_ADVICE) from error
    except RuntimeError as error:  # of torch, which tells by its text what the disk has said
        failed = disk_failure(error, Path(tempfile.gettempdir()), TEMPORARY_ADVICE)
        if failed is None:
            raise
        raise failed from error


def disk_failure(error: BaseException, folder: Path, advice: str = PLACE_ADVICE) -> StorageError | None:
    """The full or unwritable disk that an exception of other people's code, or what it was made of, complains about.

    Args:
        folder: where it was written to, if the exception says no path.
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
