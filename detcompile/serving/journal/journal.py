"""Journal: requests in an SQLite file, which survives the server. It holds texts, so only its owner may read it."""

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

APPLICATION = 0x64746A6C  # "dtjl", in the file's header
FORMAT = 2
BATCH = 64  # requests to drop at a time to free space
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
    """Unfinished requests fill the journal."""


class DamagedRecord(StorageError):
    """A row of the journal has been changed."""


class Journal:
    """Requests by their idempotency keys. One server at a time can open the file.

    Writes survive a kill of the server. After a power loss the last seconds may be missing, but the file is consistent.

    Args:
        path: the file; created if missing, readable only by its owner.
        most_bytes: size limit; beyond it the oldest finished requests are dropped.
        seconds: lifetime of a request. Expired requests are not found; they are dropped at the next open or add.
        clock: returns Unix seconds.

    Raises:
        InvalidInput: the file is in use, or not a journal of this version.
        StorageError: the file is damaged or cannot be written.
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
        with self._translated_errors():
            _make_private(path)
            self._file = sqlite3.connect(path, timeout=0.2, isolation_level=None, check_same_thread=False)
            try:
                self._begin()
                self._drop_old()
            except BaseException:
                self._file.close()
                raise

    def find(self, owner: str, *, key: str | None = None, name: str | None = None) -> Record | None:
        """Return an owner's request by its key or its answer's id; None if there is none.

        Raises:
            DamagedRecord: the row has been changed.
            StorageError: the file cannot be read.
        """
        column, value = ("key", key) if name is None else ("name", name)
        with self._translated_errors():
            row = self._file.execute(
                f"SELECT {COLUMNS}, digest FROM requests WHERE owner = ? AND {column} = ? AND created >= ?",
                (owner, value, self._oldest),
            ).fetchone()
            if row is None:
                return None
            *request, outcome, digest = row
            *columns, work = request
            expected = _digest(request)
            is_whole = digest == (expected if outcome is None else _digest([expected, outcome]))
            if not (is_whole and owner in request and value in request):  # a damaged index may lead to another row
                raise DamagedRecord(f"--journal {self._path}: the record of {column} {value!r} is not what was written")
            decoded = None if outcome is None else msgspec.msgpack.decode(outcome, type=Outcome)
            fields = dict(zip(COLUMNS.split(", "), columns))
            return Record(**fields, work=msgspec.msgpack.decode(work, type=Work), outcome=decoded)

    def add(self, record: Record) -> None:
        """Write a new request. It is stored when this returns.

        Raises:
            JournalFull: there is no space.
            StorageError: the file cannot be written.
        """
        with self._translated_errors():
            self._drop_old()
            self._make_room()
            request = (*msgspec.structs.astuple(record)[:6], msgspec.msgpack.encode(record.work))
            row = (*request, None, _digest(request))
            self._file.execute(f"INSERT INTO requests ({COLUMNS}, digest) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)

    def finish(self, name: str, outcome: Outcome) -> None:
        """Write a request's outcome.

        Raises:
            StorageError: the file cannot be written.
        """
        with self._translated_errors():
            data = msgspec.msgpack.encode(outcome)
            row = self._file.execute("SELECT digest FROM requests WHERE name = ?", (name,)).fetchone()
            if row is not None:
                values = (data, _digest([*row, data]), name)
                self._file.execute("UPDATE requests SET outcome = ?, digest = ? WHERE name = ?", values)

    def drop(self, name: str) -> None:
        """Delete a request.

        Raises:
            StorageError: the file cannot be written.
        """
        with self._translated_errors():
            self._file.execute("DELETE FROM requests WHERE name = ?", (name,))

    def require_writable(self) -> None:
        """Rewrite the format version to test that the file is writable.

        Raises:
            StorageError: the file cannot be written.
        """
        with self._translated_errors():
            self._file.execute(f"PRAGMA user_version = {FORMAT}")

    @property
    def num_bytes(self) -> int:
        """Return the bytes in use."""
        return (self._number("page_count") - self._number("freelist_count")) * self._number("page_size")

    def close(self) -> None:
        """Close the file; another server may open it."""
        self._file.close()

    @property
    def _oldest(self) -> float:
        """Return the Unix time before which requests are expired."""
        return self._clock() - self._seconds

    def _drop_old(self) -> None:
        self._file.execute("DELETE FROM requests WHERE created < ?", (self._oldest,))

    def _make_room(self) -> None:
        """Drop the oldest finished requests over the size limit."""
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
        self._file.execute("COMMIT")  # takes the exclusive lock until the file is closed
        (num_tables,) = self._file.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        if num_tables == 0 and self._number("application_id") == 0:
            self._file.executescript(
                f"BEGIN; {TABLES} PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {FORMAT}; COMMIT;"
            )
        if (self._number("application_id"), self._number("user_version")) != (APPLICATION, FORMAT):
            raise InvalidInput(f"--journal {self._path}: not a journal of this version; give another file")
        messages = [text for (text,) in self._file.execute("PRAGMA integrity_check(1)")]
        if messages != ["ok"]:
            raise self._damaged(messages[0])

    def _number(self, pragma: str) -> int:
        (value,) = self._file.execute(f"PRAGMA {pragma}").fetchone()
        return int(value)

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        """Raise errors of SQLite and the disk as this package's errors, with the file's path."""
        try:
            yield
        except sqlite3.OperationalError as error:
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY:  # absent in Python's errors
                raise InvalidInput(f"--journal {self._path}: another server uses it; give each its own") from error
            raise StorageError(f"--journal {self._path}: {error}") from error
        except (sqlite3.DatabaseError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._damaged(str(error)) from error
        except OSError as error:
            raise StorageError(f"--journal {self._path}: {error.strerror}") from error

    def _damaged(self, reason: str) -> StorageError:
        return StorageError(
            f"--journal {self._path} is damaged or not a journal ({reason}): to start a new one, move it away together"
            " with its -wal and -shm files; its requests are then lost"
        )


def _digest(columns: Sequence[Any]) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode(columns)).digest()


def _make_private(path: Path) -> None:
    """Create the file if missing, and make it readable only by its owner."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise InvalidInput(f"--journal {path}: not a regular file: give a file or a new name")
        os.fchmod(file, 0o600)
    finally:
        os.close(file)
