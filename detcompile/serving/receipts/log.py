"""The receipt log: an envelope a line, whose receipt holds the digest of the line before: none can be taken out."""

import fcntl
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from detcompile.errors import InvalidInput, StorageError
from detcompile.serving.receipts.envelope import Envelope, payload_digest, payload_of, read_envelope
from detcompile.serving.receipts.receipt import LogPlace, Receipt, decode_receipt

__all__ = ["Line", "ReceiptLog", "read_log"]

BEGINNING = b'{"payloadType":"'  # of a line
PROBE = 4096  # bytes that are written to see whether there is room
TAIL = 1 << 16  # bytes that are read at a time to find the last line


class Line(NamedTuple):
    """A line of a log.

    Attributes:
        number: counts from 0.
        digest: sha256, in hex, of the line without its end.
        payload: the same of the receipt in it.
    """

    number: int
    digest: str
    payload: str
    envelope: Envelope
    receipt: Receipt


class ReceiptLog:
    """Appends to a log, alone. What a server that was killed left unfinished at its end is cut off: nobody has it.

    Attributes:
        place: where the next receipt stands.
        num_cut: bytes that were cut off.

    Raises:
        InvalidInput: it ends with what is no receipt, or another server writes to it.
        StorageError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            raise StorageError(f"--receipt-log {path} cannot be opened: {error.strerror}") from error
        self.place = LogPlace(index=0, previous=None)
        self._failed = False  # at the last write
        try:
            self._begin(path)
        except BaseException:
            self.close()
            raise

    def append(self, envelope: Envelope) -> None:
        """Write the envelope of a receipt that stands at ``place``.

        Raises:
            StorageError: it cannot be written; nothing of it is left then.
        """
        line = msgspec.json.encode(envelope)
        self._write(line + b"\n")
        self._size += len(line) + 1
        self.place = LogPlace(index=self.place.index + 1, previous=_digest(line))

    def require_writable(self) -> None:
        """Try to write again, if the last try failed. What is written is cut off again, here or at the next start.

        Raises:
            StorageError: it cannot be written.
        """
        if self._failed:
            self._write(BEGINNING + bytes(PROBE))
            os.ftruncate(self._file, self._size)

    def _write(self, data: bytes) -> None:
        self._failed = True
        try:
            written = os.write(self._file, data)
            if written < len(data):
                raise OSError(0, "the disk is full")
        except OSError as error:
            os.ftruncate(self._file, self._size)
            raise StorageError(f"the receipt log cannot be written: {error.strerror}") from error
        self._failed = False

    def close(self) -> None:
        """Let another server write to it; nothing is appended any more."""
        os.close(self._file)

    def _begin(self, path: Path) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InvalidInput(f"--receipt-log {path}: another server writes to it; give each its own") from error
        size = os.fstat(self._file).st_size
        last, self._size = _last_line(self._file, size)
        if last is not None:
            self.place = _behind(last, path)
        self.num_cut = size - self._size
        if self.num_cut:
            if os.pread(self._file, len(BEGINNING), self._size) != BEGINNING[: self.num_cut]:
                raise InvalidInput(f"--receipt-log {path} ends with what is no receipt: give another file")
            os.ftruncate(self._file, self._size)


def read_log(path: Path) -> Iterator[Line]:
    """The lines of a log, checked as a chain.

    Raises:
        InvalidInput: the file cannot be read; or a line is cut short, is no receipt, or does not follow the one before.
    """
    previous = None
    try:
        with path.open("rb") as file:
            for number, data in enumerate(file):
                line = _line(number, data, previous, path)
                previous = line.digest
                yield line
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from error


def _line(number: int, data: bytes, previous: str | None, path: Path) -> Line:
    where = f"{path}, line {number + 1}"
    if not data.endswith(b"\n"):
        raise InvalidInput(f"{where} is cut short: the log ends within it")
    content = data[:-1]
    try:
        envelope = read_envelope(content)
        receipt = decode_receipt(payload_of(envelope))
    except InvalidInput as error:
        raise InvalidInput(f"{where}: {error}") from error
    if receipt.log is None:
        raise InvalidInput(f"{where} was made for no log: its receipt names no line before")
    if receipt.log.index != number:
        raise InvalidInput(f"{where} was line {receipt.log.index + 1}: lines were taken out, put in, or moved")
    if receipt.log.previous != previous:
        raise InvalidInput(f"{where} does not follow the line before it, which was changed since, or another")
    return Line(number, _digest(content), payload_digest(envelope), envelope, receipt)


def _last_line(file: int, size: int) -> tuple[bytes | None, int]:
    """The last whole line, and where it ends."""
    tail, start = b"", size
    while start and tail.count(b"\n") < 2:
        start = max(0, start - TAIL)
        tail = os.pread(file, size - start, start)
    end = tail.rfind(b"\n")
    if end < 0:
        return None, 0
    return tail[tail.rfind(b"\n", 0, end) + 1 : end], start + end + 1


def _behind(line: bytes, path: Path) -> LogPlace:
    try:
        place = decode_receipt(payload_of(read_envelope(line))).log
    except InvalidInput as error:
        raise InvalidInput(f"--receipt-log {path} ends with what is no receipt: {error}. Give another file") from error
    if place is None:
        raise InvalidInput(f"--receipt-log {path} ends with a receipt that was made for no log: give another file")
    return LogPlace(index=place.index + 1, previous=_digest(line))


def _digest(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()
