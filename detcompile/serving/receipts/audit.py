"""Audits: a receipt log's chain and signatures, all of them, and which of its receipts are replayed."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from detcompile.errors import InvalidInput
from detcompile.serving.receipts.envelope import unsealed
from detcompile.serving.receipts.keys import VerifyKey
from detcompile.serving.receipts.log import Line, read_log

__all__ = ["checked_lines", "is_sampled", "miss_probability"]


def checked_lines(path: Path, key: VerifyKey | None, head: str | None) -> Iterator[Line]:
    """The lines of a log whose chain and signatures hold.

    Args:
        key: public key of whoever signed every line; None checks no signature.
        head: sha256 of a line, or of a receipt, that has to be in it: one that was published, or given to a client. A
            log that was cut off at a line's end is whole in itself, and only this shows it.

    Raises:
        InvalidInput: the line at which one of them does not hold.
    """
    seen = head is None
    for line in read_log(path):
        fault = None if key is None else unsealed(line.envelope, key)
        if fault is not None:
            raise InvalidInput(f"{path}, line {line.number + 1}: {fault}")
        seen = seen or head in (line.digest, line.payload)
        yield line
    if not seen:
        raise InvalidInput(f"{path} does not hold {head}: the log was cut off before it, or is another")


def is_sampled(line: Line, share: float, seed: int) -> bool:
    """Whether a line is among those to replay: a function of its contents and the auditor's seed.

    So a server that does not know the seed cannot tell which of its answers will be looked at.
    """
    drawn = hashlib.sha256(f"{seed} {line.digest}".encode()).digest()
    return int.from_bytes(drawn[:8], "big") < share * 2**64


def miss_probability(share: float, num_replayed: int) -> float:
    """The probability that a sample of so many receipts holds none of those that are wrong.

    Args:
        share: wrong receipts among all.
    """
    return float((1 - share) ** num_replayed)
