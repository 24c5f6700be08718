"""Journal: requests in an SQLite file, which survives the server. Texts are in it: it is for its owner's eyes alone."""

import hashlib
import os
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from detcompile.errors import InvalidInput, StorageError
from detcompile.serving.journal.records import Outcome, Record, Work

__all__ = ["DamagedRecord", "Journal", "JournalFull"]

APPLICATION = 0x64746A6C  # "dtjl", in the file's header
FORMAT = 2
BATCH = 64  # requests that are dropped at a time where there is no room
TABLES = """
    CREATE TABLE requests (
        name TEXT PRIMARY KEY, owner TEXT NOT NULL, key TEXT NOT NULL, endpoint TEXT NOT NULL, body BLOB NOT NULL,
        created INTEGER NOT NULL, work BLOB NOT NULL, outcome BLOB, digest BLOB NOT NULL,
        UNIQUE (owner, key));
    CREATE INDEX by_age ON requests (created);
"""
SETTINGS = """
    PRAGMA locking_mode = EXCLUSIVE;
    PRAGMA auto_vacuum = INCREMENTAL;
    PRAGMA journal_mode = WAL;
    PRAGMA synchronous = NORMAL;
    PRAGMA secure_delete = ON;
    PRAGMA journal_size_limit = 4194304;
"""
COLUMNS = "name, owner, key, endpoint, body, created, work, outcome"


class JournalFull(StorageError):
    """Requests that are open fill the journal."""


class DamagedRecord(StorageError):
    """A row of the journal is not what was written."""


class Journal:
    """Requests by the keys that their clients gave them. One server has it at a time.

    What is written is there after a kill of the server; of a machine that loses power the last seconds may be missing,
    and the file is whole.

    Args:
        path: the file; it is made where there is none, and can be read by its owner alone.
        most_bytes: bytes that it may have; beyond, the oldest requests that have ended are dropped.
        seconds: time that a request is kept for. It is not found after that, and dropped when the file is opened or
            added to.
        clock: returns seconds since 1970.

    Raises:
        InvalidInput: the file is in use, or is no journal of this version.
        StorageError: it is damaged, or cannot be written.
    """

    def __init__(
        self,
        path: Path,
        most_bytes: int = 1 << 30,
        seconds: float = 86400.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._path = path
        self._most_bytes = most_bytes
        self._seconds = seconds
        self._clock = clock
        with self._explained():
            _make_private(path)
            self._file = sqlite3.connect(path, timeout=0.2, isolation_level=None, check_same_thread=False)
            try:
                self._begin()
                self._drop_old()
            except BaseException:
                self._file.close()
                raise

    def find(self, owner: str, *, key: str | None = None, name: str | None = None) -> Record | None:
        """A request of this owner, by its key or by the id of its answer; None where there is none.

        Raises:
            DamagedRecord: its row is not what was written. StorageError: the file cannot be read.
        """
        column, value = ("key", key) if name is None else ("name", name)
        with self._explained():
            found = self._file.execute(
                f"SELECT {COLUMNS}, digest FROM requests WHERE owner = ? AND {column} = ? AND created >= ?",
                (owner, value, self._oldest),
            ).fetchone()
            if found is None:
                return None
            *request, outcome, digest = found
            *columns, work = request
            expected = _digest(request)
            is_whole = digest == (expected if outcome is None else _digest([expected, outcome]))
            if not (is_whole and owner in request and value in request):  # a damaged index may lead to another row
                raise DamagedRecord(f"--journal {self._path}: the record of {column} {value!r} is not what was written")
            kept = None if outcome is None else msgspec.msgpack.decode(outcome, type=Outcome)
            named = dict(zip(COLUMNS.split(", "), columns))
            return Record(**named, work=msgspec.msgpack.decode(work, type=Work), outcome=kept)

    def add(self, record: Record) -> None:
        """Write a request that has begun; it is there when this returns.

        Raises:
            JournalFull: there is no room. StorageError: the file cannot be written.
        """
        with self._explained():
            self._drop_old()
            self._make_room()
            request = (*msgspec.structs.astuple(record)[:6], msgspec.msgpack.encode(record.work))
            row = (*request, None, _digest(request))
            self._file.execute(f"INSERT INTO requests ({COLUMNS}, digest) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)

    def finish(self, name: str, outcome: Outcome) -> None:
        """Write what came of a request.

        Raises:
            StorageError: the file cannot be written.
        """
        with self._explained():
            data = msgspec.msgpack.encode(outcome)
            row = self._file.execute("SELECT digest FROM requests WHERE name = ?", (name,)).fetchone()
            if row is not None:
                values = (data, _digest([*row, data]), name)
                self._file.execute("UPDATE requests SET outcome = ?, digest = ? WHERE name = ?", values)

    def drop(self, name: str) -> None:
        """Forget a request that nothing came of.

        Raises:
            StorageError: the file cannot be written.
        """
        with self._explained():
            self._file.execute("DELETE FROM requests WHERE name = ?", (name,))

    def require_writable(self) -> None:
        """Write what is there already.

        Raises:
            StorageError: the file cannot be written.
        """
        with self._explained():
            self._file.execute(f"PRAGMA user_version = {FORMAT}")

    @property
    def num_bytes(self) -> int:
        """Bytes that the requests take."""
        return (self._number("page_count") - self._number("freelist_count")) * self._number("page_size")

    def close(self) -> None:
        """Let another server have the file."""
        self._file.close()

    @property
    def _oldest(self) -> float:
        """When the oldest requests were made that are kept, in seconds since 1970."""
        return self._clock() - self._seconds

    def _drop_old(self) -> None:
        self._file.execute("DELETE FROM requests WHERE created < ?", (self._oldest,))

    def _make_room(self) -> None:
        """Drop the oldest that have ended."""
        oldest = "SELECT name FROM requests WHERE outcome IS NOT NULL ORDER BY created LIMIT ?"
        while self.num_bytes > self._most_bytes:
            dropped = self._file.execute(f"DELETE FROM requests WHERE name IN ({oldest})", (BATCH,)).rowcount
            if dropped == 0:
                raise JournalFull(f"--journal {self._path}: open requests fill it, over {self._most_bytes} bytes")
        if self._number("freelist_count"):
            self._file.execute("PRAGMA incremental_vacuum").fetchall()

    def _begin(self) -> None:
        self._file.executescript(SETTINGS)
        self._file.execute("BEGIN IMMEDIATE")
        self._file.execute("COMMIT")  # the lock is ours, as long as the file is open
        (num_tables,) = self._file.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        if num_tables == 0 and self._number("application_id") == 0:
            self._file.executescript(
                f"BEGIN; {TABLES} PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {FORMAT}; COMMIT;"
            )
        if (self._number("application_id"), self._number("user_version")) != (APPLICATION, FORMAT):
            raise InvalidInput(f"--journal {self._path}: this is no journal of this version: give another file")
        said = [text for (text,) in self._file.execute("PRAGMA integrity_check(1)")]
        if said != ["ok"]:
            raise self._damaged(said[0])

    def _number(self, pragma: str) -> int:
        (found,) = self._file.execute(f"PRAGMA {pragma}").fetchone()
        return int(found)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """What SQLite and the disk refuse, by the file's path."""
        try:
            yield
        except sqlite3.OperationalError as error:
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY:  # the sqlite3 module's own have none
                raise InvalidInput(f"--journal {self._path}: another server writes to it; give each its own") from error
            raise StorageError(f"--journal {self._path}: {error}") from error
        except (sqlite3.DatabaseError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._damaged(str(error)) from error
        except OSError as error:
            raise StorageError(f"--journal {self._path}: {error.strerror}") from error

    def _damaged(self, said: str) -> StorageError:
        return StorageError(
            f"--journal {self._path} is damaged or no journal ({said}): move it away, with the files -wal and -shm"
            " beside it, to begin a new one; what is in it cannot be asked for again"
        )


def _digest(columns: Sequence[Any]) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode(columns)).digest()


def _make_private(path: Path) -> None:
    """Make the file, if there is none, and have its owner alone read it.

    Raises:
        InvalidInput: it is no file, such as a device, whose rights are not ours to change.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise InvalidInput(f"--journal {path}: this is no file on a disk: give one, or the name of a new one")
        os.fchmod(file, 0o600)
    finally:
        os.close(file)
