"""The header of a GGUF file: metadata and places of tensors, with every size checked against the file's before use.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

from detcompile.errors import InvalidInput, UnsupportedModel

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
ALIGNMENT = 32  # where the metadata state none
# Bounds that no model comes near. gguf's and transformers' readers take 13 µs an item.
MOST_ITEMS = 1 << 21  # of all arrays: tokens, their types and merges
MOST_TENSORS = 1 << 16
MOST_DIMS = 4
AGAIN = "fetch the file again"


class TensorType(NamedTuple):
    """Storage format of a tensor.

    Attributes:
        block: values of a block.
        size: bytes of a block.
    """

    name: str
    block: int
    size: int

    @property
    def is_quantized(self) -> bool:
        """False for floats, each a block."""
        return self.block > 1


# By the number in the file. Tests compare the dequantized values of each type with the package gguf's, by bytes.
TENSOR_TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    20: TensorType("IQ4_NL", 32, 18),
    23: TensorType("IQ4_XS", 256, 136),
    30: TensorType("BF16", 1, 2),
}


class TensorView(NamedTuple):
    """The place of a tensor.

    Attributes:
        shape: in torch's order, the last dimension contiguous.
        start: its first byte in the file.
    """

    name: str
    shape: tuple[int, ...]
    type: TensorType
    start: int

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) // self.type.block * self.type.size


class Header(NamedTuple):
    """Metadata and tensor list of a GGUF file, which come before its weights."""

    metadata: dict[str, Any]
    tensors: list[TensorView]

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the model's architecture."""
        return str(self.metadata["general.architecture"])


class _Damaged(Exception):
    """The header contradicts the file; the message completes a sentence that begins with the file's name."""


class _Cursor:
    """Reads values of a file one after the other; a value beyond the end raises _Damaged."""

    def __init__(self, data: mmap.mmap | bytes) -> None:
        self.data, self.at, self.items = data, 0, 0

    def take(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            raise _Damaged(f"is truncated or damaged: {len(self.data)} bytes, but its header needs {self.at + count}")
        self.at += count
        return self.data[self.at - count : self.at]

    def numbers(self, code: str, count: int = 1) -> tuple[Any, ...]:
        layout = struct.Struct("<" + code)
        if count == 1:
            return layout.unpack(self.take(layout.size))
        return struct.unpack(f"<{count}{code}", self.take(count * layout.size))

    def number(self, code: str) -> Any:
        return self.numbers(code)[0]

    def text(self) -> str:
        content = self.take(self.number("Q"))
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise _Damaged(f"is damaged: byte {self.at - len(content)} begins no text") from error

    def value(self) -> Any:
        kind = self.number("I")
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            raise _Damaged(f"is damaged: a value has the type {kind}")
        kind, count = self.numbers("IQ")
        self.items += count
        if self.items > MOST_ITEMS:
            raise _Damaged(f"is damaged: its metadata name {self.items} items")
        if kind in SCALARS:
            return list(self.numbers(SCALARS[kind], count) if count else ())
        if kind != STRING:
            raise _Damaged(f"is damaged: an array has items of the type {kind}")
        return [self.text() for _ in range(count)]


def read_header(path: Path) -> Header:
    """Read and check the header of a GGUF file.

    Raises:
        InvalidInput: the file is missing, cannot be read, is not a GGUF file, is truncated or damaged, or is one part
            of a model.
        UnsupportedModel: a tensor's type is not supported.
    """
    try:
        with path.open("rb") as file:
            start = file.read(len(MAGIC))
            if start != MAGIC:
                raise InvalidInput(f"{path} is not a GGUF file: {_instead(start)}")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _checked(path, _Cursor(data))
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror or error}") from error
    except _Damaged as error:
        raise InvalidInput(f"{path} {error}: {AGAIN}") from error


def _instead(start: bytes) -> str:
    if not start:
        return f"it is empty; {AGAIN}"
    if start == b"vers":
        return "it is a Git LFS pointer instead of the file (run git lfs pull)"
    return f"it begins with {start!r} instead of {MAGIC!r}"


def _checked(path: Path, cursor: _Cursor) -> Header:
    cursor.take(len(MAGIC))
    version = cursor.number("I")
    if version not in VERSIONS:
        order = " (perhaps of a big-endian machine)" if version & 0xFFFF == 0 else ""
        raise UnsupportedModel(
            f"{path} has version {version} of GGUF{order}; versions 2 and 3 are read: convert it again"
        )
    num_tensors, num_values = cursor.numbers("QQ")
    if num_tensors > MOST_TENSORS:
        raise _Damaged(f"is damaged: its header names {num_tensors} tensors")
    metadata: dict[str, Any] = {}
    for _ in range(num_values):  # each has some bytes, so the file ends first
        key = cursor.text()
        if key in metadata:
            raise _Damaged(f"is damaged: {key} occurs twice")
        metadata[key] = cursor.value()
    _require_whole_model(path, metadata)
    tensors = [_tensor(path, cursor) for _ in range(num_tensors)]
    return Header(metadata, _placed(tensors, cursor, metadata.get("general.alignment", ALIGNMENT)))


def _require_whole_model(path: Path, metadata: dict[str, Any]) -> None:
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        raise _Damaged("is damaged: it has no general.architecture")
    if metadata.get("general.type", "model") != "model":
        raise InvalidInput(f"{path} does not hold a model but {metadata['general.type']!r}: pass the model's file")
    count = metadata.get("split.count", 0)
    if count not in (0, 1):
        raise InvalidInput(
            f"{path} is one of {count} parts of a model: join them by `llama-gguf-split --merge`, or use a file in one"
            " part"
        )


def _tensor(path: Path, cursor: _Cursor) -> TensorView:
    """Read a tensor's entry; ``start`` is still relative to the weights."""
    name = cursor.text()
    num_dims = cursor.number("I")
    if not 1 <= num_dims <= MOST_DIMS:
        raise _Damaged(f"is damaged: {name} has {num_dims} dimensions")
    shape = tuple(reversed(cursor.numbers("Q", num_dims)))
    kind, start = cursor.numbers("IQ")
    if kind not in TENSOR_TYPES:
        supported = ", ".join(each.name for each in TENSOR_TYPES.values())
        raise UnsupportedModel(
            f"{path}: {name} has ggml's type {kind}, which is not supported; use a file of these types: {supported}"
        )
    if min(shape) < 1 or shape[-1] % TENSOR_TYPES[kind].block:
        raise _Damaged(f"is damaged: {name} is {TENSOR_TYPES[kind].name} of the shape {list(shape)}")
    return TensorView(name, shape, TENSOR_TYPES[kind], start)


def _placed(tensors: list[TensorView], cursor: _Cursor, alignment: Any) -> list[TensorView]:
    """Return the tensors with their places in the file, after checking that each has its own."""
    if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise _Damaged(f"is damaged: general.alignment is {alignment}")
    first = -(-cursor.at // alignment) * alignment
    placed = [each._replace(start=first + each.start) for each in tensors]
    end, names = first, set()
    for each in sorted(placed, key=lambda each: each.start):
        if each.name in names:
            raise _Damaged(f"is damaged: {each.name} occurs twice")
        if each.start < end or each.start % alignment:
            raise _Damaged(f"is damaged: {each.name} begins at byte {each.start}")
        names.add(each.name)
        end = each.start + each.num_bytes
    if end > len(cursor.data):
        raise _Damaged(f"is truncated or damaged: {len(cursor.data)} bytes, but its tensors need {end}")
    return placed
