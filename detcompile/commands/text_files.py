"""Reads and writes text files: UTF-8, or the encoding of a byte order mark. Other content is rejected."""

import codecs
import sys
from pathlib import Path

from detcompile.errors import InvalidInput
from detcompile.storage import naming

MARKS = (  # UTF-32 before UTF-16, whose mark is a prefix of it
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)


def read_text_file(path: Path) -> str:
    """Return a file's text without the byte order mark; lines end with a line feed.

    Raises:
        InvalidInput: it cannot be read, or is not text.
    """
    try:
        content = path.read_bytes()
    except (OSError, ValueError) as error:  # a name with a null character is a ValueError
        raise InvalidInput(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    return _text(content, str(path))


def read_input() -> str:
    """Read standard input as ``read_text_file`` reads a file."""
    where = "standard input"
    if sys.stdin is None:
        raise InvalidInput(f"{where} cannot be read: it is closed")
    try:
        stream = getattr(sys.stdin, "buffer", None)
        return _text(sys.stdin.read().encode() if stream is None else stream.read(), where)
    except (OSError, ValueError) as error:  # closed in the meantime
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput(f"{where} cannot be read: {error}") from error


def require_place(path: Path, option: str) -> None:
    """Raise InvalidInput early if the output file of ``option`` cannot be written."""
    if not path.parent.is_dir() or path.is_dir():
        raise InvalidInput(f"{option} {path}: give the name of a file in a folder that exists")


def write_text_file(path: Path, text: str) -> None:
    """Write a UTF-8 file; characters that cannot be encoded are escaped.

    Raises:
        StorageError: the file cannot be written.
    """
    with naming(path):
        path.write_text(text, encoding="utf-8", errors="backslashreplace")


def _text(content: bytes, where: str) -> str:
    mark, encoding = next(((mark, name) for mark, name in MARKS if content.startswith(mark)), (b"", "utf-8"))
    try:
        text = content[len(mark) :].decode(encoding)
    except UnicodeDecodeError as error:
        at = len(mark) + error.start
        raise InvalidInput(
            f"{where} is not {encoding.upper()} text: byte {at} is 0x{content[at : at + 1].hex()} ({error.reason})."
            " Convert it, as by `iconv -f LATIN1 -t UTF-8`"
        ) from error
    if "\0" in text:
        raise InvalidInput(
            f"{where} holds a null character at {text.index(chr(0))}: it is binary, or UTF-16 without a byte order"
            " mark. Convert it to UTF-8"
        )
    return text.replace("\r\n", "\n").replace("\r", "\n")
