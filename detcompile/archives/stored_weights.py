"""Weights in safetensors format: streamed on writing, read from mapped pages."""

import json
import math
import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from detcompile.errors import ArchiveError
from detcompile.weights import SAFETENSORS_DTYPES

SUFFIX = ".safetensors"
MOST_SPREAD = 1024  # elements of memory that strides may span per stored element
DTYPE_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}


class StoredWeights(NamedTuple):
    """Weights to store in safetensors format.

    Attributes:
        strides: strides of the tensors that are not contiguous.
        content: the tensors, or the file that they were written to.
    """

    strides: dict[str, list[int]]
    content: Mapping[str, Tensor] | Path

    @classmethod
    def of(cls, weights: Mapping[str, Tensor]) -> "StoredWeights":
        """Wrap tensors that are not written yet."""
        strides = {name: list(tensor.stride()) for name, tensor in weights.items() if not tensor.is_contiguous()}
        return cls(strides, weights)

    def written_to(self, path: Path) -> "StoredWeights":
        """Write the weights to a file that another process can read; return its StoredWeights.

        Raises:
            OSError: the file cannot be written.
        """
        with path.open("wb") as file:
            for part in self.parts():
                file.write(part)
        return self._replace(content=path)

    def parts(self) -> Iterator[Any]:
        """Yield the bytes in pieces."""
        if isinstance(self.content, Path):
            yield memoryview(mapped(self.content))
        else:
            yield from _safetensors(self.content)


def files_beside(archive: Path, num_ranks: int) -> list[Path]:
    """Return the path of each rank's weights file next to the archive."""
    return [archive.with_suffix(SUFFIX if num_ranks == 1 else f".rank{rank}{SUFFIX}") for rank in range(num_ranks)]


def read_weights(path: Path, content: memoryview, strides: Mapping[str, list[int]]) -> Iterator[tuple[str, Tensor]]:
    """Yield a copy of each weight with its name. Non-contiguous weights get their strides back.

    Raises:
        ArchiveError: the content is not valid.
    """
    length = int.from_bytes(content[:8], "little")
    data = content[8 + length :]
    for name, dtype, shape, start, end in _entries(path, bytes(content[8 : 8 + length])):
        stride = strides.get(name, [])
        size = math.prod(shape)
        in_place = start <= end <= len(data) and end - start == size * dtype.itemsize
        if not in_place or (name in strides and not _valid_strides(stride, shape)):
            layout = f"shape {shape} and strides {stride or 'of its rows'}"
            raise _damaged_weights(path, f"{name} has {end - start} bytes, {layout}")
        tensor = torch.empty(size, dtype=dtype, device="cpu")
        if end > start:
            tensor.view(torch.uint8).copy_(torch.frombuffer(data[start:end], dtype=torch.uint8))
        tensor = tensor.view(shape)
        if name in strides:
            tensor = torch.empty_strided(shape, strides[name], dtype=dtype, device="cpu").copy_(tensor)
        yield name, tensor


def _valid_strides(strides: list[int], shape: list[int]) -> bool:
    """Return whether a tensor's elements do not overlap and span at most MOST_SPREAD times its size."""
    reach = sum(stride * (extent - 1) for stride, extent in zip(strides, shape))
    apart = all(stride or extent < 2 for stride, extent in zip(strides, shape))
    return len(strides) == len(shape) and apart and reach <= MOST_SPREAD * math.prod(shape)


def _entries(path: Path, header: bytes) -> Iterator[tuple[str, torch.dtype, list[int], int, int]]:
    """Yield name, dtype, shape, start and end of each weight."""
    try:
        for name, entry in json.loads(header).items():
            start, end = entry["data_offsets"]
            shape = entry["shape"]
            if not all(type(number) is int and number >= 0 for number in (start, end, *shape)):
                raise ValueError(f"{name} has {shape} at {start} to {end}")
            yield name, SAFETENSORS_DTYPES[entry["dtype"]], list(shape), start, end
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise _damaged_weights(path, f"{type(error).__name__}: {error}") from error


def _damaged_weights(path: Path, reason: str) -> ArchiveError:
    return ArchiveError(f"{path} is damaged: its weights are not what export wrote ({reason}): export it again")


def mapped(path: Path) -> mmap.mmap:
    """Map a file copy-on-write.

    Raises:
        ArchiveError: the file cannot be read, or is empty.
    """
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise ArchiveError(f"{path} cannot be read: {error.strerror}. Put the file that export wrote there.") from error
    except ValueError as error:
        raise ArchiveError(f"{path} is empty: copy or export it again") from error


def _safetensors(weights: Mapping[str, Tensor]) -> Iterator[Any]:
    """Yield a safetensors file in parts: header length and header, then each tensor's bytes, widest dtype first."""
    ordered = sorted(weights.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, tensor in ordered:
        yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
