"""The receipt log: one envelope per line; each receipt holds the digest of the line before, so none can be removed."""

import fcntl
import hashlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from detcompile.errors import InvalidInput, StorageError
from detcompile.serving.receipts.envelope import Envelope, payload_digest, payload_of, read_envelope, unsealed
from detcompile.serving.receipts.keys import VerifyKey
from detcompile.serving.receipts.receipt import LogPlace, Receipt, decode_receipt

logger = logging.getLogger(__name__)
LINE_START = b'{"payloadType":"'
PROBE = 4096  # bytes to write to test for free space
TAIL = 1 << 16  # bytes to read at a time to find the last line


class Line(NamedTuple):
    """A line of a log.

    Attributes:
        number: index of the line.
        digest: sha256 in hex of the line without its newline.
        payload: sha256 in hex of its receipt.
    """

    number: int
    digest: str
    payload: str
    envelope: Envelope
    receipt: Receipt


class ReceiptLog:
    """Appends to a log exclusively.

    An incomplete last line, left by a killed server, is cut off: no client has its receipt.

    Attributes:
        place: position of the next receipt.

    Raises:
        InvalidInput: the end is not a receipt, or another server writes to the log.
        StorageError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            raise StorageError(f"--receipt-log {path} cannot be opened: {error.strerror}") from error
        self.place = LogPlace(index=0, previous=None)
        self._failed = False  # the last write failed
        try:
            self._begin(path)
        except BaseException:
            self.close()
            raise

    def append(self, envelope: Envelope) -> None:
        """Write the envelope of the receipt at ``place``.

        Raises:
            StorageError: the write failed; nothing of it remains.
        """
        line = msgspec.json.encode(envelope)
        self._write(line + b"\n")
        self._size += len(line) + 1
        self.place = LogPlace(index=self.place.index + 1, previous=_digest(line))

    def require_writable(self) -> None:
        """Test whether the log can be written again after a failure.

        The test bytes are cut off here or at the next start.

        Raises:
            StorageError: the write failed.
        """
        if self._failed:
            self._write(LINE_START + bytes(PROBE))
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
        """Close the file; another server may open it."""
        os.close(self._file)

    def _begin(self, path: Path) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InvalidInput(f"--receipt-log {path}: another server writes to it; give each its own") from error
        size = os.fstat(self._file).st_size
        last, self._size = _last_line(self._file, size)
        if last is not None:
            self.place = _next_place(last, path)
        num_cut = size - self._size
        if num_cut:
            if os.pread(self._file, len(LINE_START), self._size) != LINE_START[:num_cut]:
                raise InvalidInput(f"--receipt-log {path}: its end is not a receipt; give another file")
            os.ftruncate(self._file, self._size)
            logger.warning("%s: cut off %d bytes of a line without an end", path, num_cut)


def read_log(path: Path) -> Iterator[Line]:
    """Yield the lines of a log, verifying the chain.

    Raises:
        InvalidInput: the file cannot be read, or a line is cut short, not a receipt, or does not follow the previous
            one.
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


def checked_lines(path: Path, key: VerifyKey | None, head: str | None) -> Iterator[Line]:
    """Yield the lines of a log while its chain and signatures are valid.

    Args:
        key: public key that must have signed every line; None checks no signatures.
        head: sha256 of a line or receipt that the log must contain, such as one that was published or given to a
            client. Only this detects a log that was cut off at the end of a line.

    Raises:
        InvalidInput: names the first invalid line.
    """
    has_head = head is None
    for line in read_log(path):
        fault = None if key is None else unsealed(line.envelope, key)
        if fault is not None:
            raise InvalidInput(f"{path}, line {line.number + 1}: {fault}")
        has_head = has_head or head in (line.digest, line.payload)
        yield line
    if not has_head:
        raise InvalidInput(f"{path} does not contain {head}: the log was cut off before it, or is another log")


def is_sampled(line: Line, share: float, seed: int) -> bool:
    """Return True if a line is to be replayed: a function of its contents and the auditor's seed.

    A server that does not know the seed cannot predict which of its answers will be checked.
    """
    drawn = hashlib.sha256(f"{seed} {line.digest}".encode()).digest()
    return int.from_bytes(drawn[:8], "big") < share * 2**64


def miss_probability(share: float, num_replayed: int) -> float:
    """Return the probability that a sample of so many receipts contains no wrong one.

    Args:
        share: share of wrong receipts among all.
    """
    return float((1 - share) ** num_replayed)


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
        raise InvalidInput(f"{where}: its receipt was not issued for a log")
    if receipt.log.index != number:
        raise InvalidInput(f"{where} was line {receipt.log.index + 1}: lines were removed, added or moved")
    if receipt.log.previous != previous:
        raise InvalidInput(f"{where} does not follow the line before it, which was changed or replaced")
    return Line(number, _digest(content), payload_digest(envelope), envelope, receipt)


def _last_line(file: int, size: int) -> tuple[bytes | None, int]:
    """Return the last complete line, and its end."""
    tail, start = b"", size
    while start and tail.count(b"\n") < 2:
        start = max(0, start - TAIL)
        tail = os.pread(file, size - start, start)
    end = tail.rfind(b"\n")
    if end < 0:
        return None, 0
    return tail[tail.rfind(b"\n", 0, end) + 1 : end], start + end + 1


def _next_place(line: bytes, path: Path) -> LogPlace:
    try:
        place = decode_receipt(payload_of(read_envelope(line))).log
    except InvalidInput as error:
        raise InvalidInput(f"--receipt-log {path}: its end is not a receipt: {error}. Give another file") from error
    if place is None:
        raise InvalidInput(f"--receipt-log {path}: its last receipt was not issued for a log; give another file")
    return LogPlace(index=place.index + 1, previous=_digest(line))


def _digest(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()
