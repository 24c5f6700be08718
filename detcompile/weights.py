"""Digests and memory addresses of a model's weights, and the reading of new ones.

A tensor's digest is two sums modulo 2^64 of word · odd(place) over its bytes in words of 32 bits, row-major:
multilinear hashing (Lemire and Kaser, "Strongly universal string hashing is fast", The Computer Journal 2014) with
fixed multipliers. Integer sums do not depend on order, so every device and thread count gives the same digest.
Accidental changes collide with probability 2^-64; members of an exported archive also have a sha256 each.

With tensor parallelism digests cover whole weights: ranks compute them before they take their shards.
"""

import bisect
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from detcompile.errors import InvalidInput
from detcompile.torch_internals.autograd import version_of

SAFETENSORS_DTYPES = {  # by their names in the format
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
MAPPINGS, SHARED_MEMORY = Path("/proc/self/maps"), ("/memfd:", "/dev/")  # mappings whose memory is shared on purpose
WORD = 4  # bytes: the product with a 64-bit multiplier then depends on every bit of a word
ROW = 1 << 14  # words in a row: a word is multiplied by its row's and its column's multiplier
BLOCK_ROWS = {"cpu": 16, "cuda": 256}  # rows per block: fits a CPU's cache; 64 MiB of products on a GPU
SALTS, ROWS_SALT = (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03), 0x2545F4914F6CDD1D
GOLDEN, MIX = np.uint64(0x9E3779B97F4A7C15), (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


class WeightView(NamedTuple):
    """A tensor as a view of another one, ``held_in``; ``offset`` counts elements from the first one of ``held_in``."""

    held_in: str
    shape: list[int]
    stride: list[int]
    offset: int


def named_weights(model: nn.Module, *, every_name: bool = False) -> dict[str, Tensor]:
    """Return all parameters and buffers, non-persistent ones too; tied ones once, or under every name."""
    parameters = model.named_parameters(remove_duplicate=not every_name)
    return {**dict(parameters), **dict(model.named_buffers(remove_duplicate=not every_name))}


def copy_mapped_weights(model: nn.Module) -> None:
    """Copy weights that are part of a mapped file into memory of this process.

    Loaders of safetensors map a file: writing to it later would change the weights, and truncating it would crash the
    process. Parameters stay the same objects, and tied ones stay tied.
    """
    copies: dict[tuple[int, torch.Size, tuple[int, ...], torch.dtype], Tensor] = {}
    for tensor in in_mapped_file(named_weights(model).values()):
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if place not in copies:
            copies[place] = tensor.detach().clone()
        tensor.data = copies[place]


def in_mapped_file(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the CPU tensors whose memory is part of a file that other processes can open by its path."""
    spans = []
    for line in MAPPINGS.read_text().splitlines():
        place, *_, path = line.split(maxsplit=5)  # start-end, rights, offset, device, inode and, for a file, its path
        if path.startswith("/") and not path.startswith(SHARED_MEMORY) and not path.endswith(" (deleted)"):
            start, end = (int(address, 16) for address in place.split("-"))
            spans.append((start, end))
    spans.sort()
    starts = [start for start, _ in spans]

    def is_inside(address: int) -> bool:
        index = bisect.bisect_right(starts, address) - 1
        return index >= 0 and address < spans[index][1]

    return [tensor for tensor in tensors if tensor.device.type == "cpu" and is_inside(tensor.data_ptr())]


def views_in(whole: Mapping[str, Tensor], parts: Mapping[str, Tensor]) -> dict[str, WeightView]:
    """Return each tensor of ``parts`` as a view of one in ``whole``; omit those that share no memory with it."""
    by_storage: dict[tuple[int, torch.dtype], list[tuple[str, Tensor]]] = {}
    for name, tensor in whole.items():
        by_storage.setdefault((tensor.untyped_storage().data_ptr(), tensor.dtype), []).append((name, tensor))
    views: dict[str, WeightView] = {}
    for name, part in parts.items():
        for held_in, tensor in by_storage.get((part.untyped_storage().data_ptr(), part.dtype), ()):
            offset = int(part.storage_offset() - tensor.storage_offset())
            if part.numel() and offset >= 0 and offset + _extent(part) <= _extent(tensor):
                views[name] = WeightView(held_in, list(part.shape), list(part.stride()), offset)
    return views


def _extent(tensor: Tensor) -> int:
    """Return the number of elements spanned in memory, from the first to the last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())) if tensor.numel() else 0


def weights_in_place(
    model: nn.Module, addresses: Mapping[str, int], constants: Mapping[str, Tensor], *, every_name: bool = False
) -> dict[str, Tensor]:
    """Return a model's parameters and buffers, and its graph's ``constants``.

    Args:
        addresses: addresses at compile time; InvalidInput is raised if a weight has moved.
        every_name: list tied weights under each of their names, and omit ``constants``.
    """
    require_weights_at(addresses, model)
    if every_name:
        return named_weights(model, every_name=True)
    return {**named_weights(model), **constants}


def weight_digests(weights: Mapping[str, Tensor], on_read: Callable[[int, int], None] | None = None) -> dict[str, str]:
    """Return the digest of each weight by name.

    Args:
        on_read: called with (bytes read, total bytes) at most 1000 times, and at the end.
    """
    digests: dict[str, str] = {}
    done, reported, total = 0, 0, sum(tensor.nbytes for tensor in weights.values())

    def read(num_bytes: int) -> None:
        nonlocal done, reported
        done += num_bytes
        if on_read is not None and (done == total or 1000 * (done - reported) >= total):
            on_read(done, total)
            reported = done

    for name, tensor in weights.items():
        digests[name] = tensor_digest(tensor, read)
    return digests


def tensor_digest(tensor: Tensor, on_read: Callable[[int], None] = lambda _: None) -> str:
    """Return a digest: dtype, shape, and the two sums over the bytes.

    Args:
        on_read: called with the number of bytes of each piece.
    """
    sums = torch.zeros(len(SALTS), dtype=torch.int64, device=tensor.device)
    at = 0
    with torch.no_grad():
        for piece in _pieces(tensor.detach()):
            on_read(piece.nbytes)
            words = _words(piece)
            sums += _sums(words, at // ROW)
            at += len(words)
    digits = "".join(f"{value % (1 << 64):016x}" for value in sums.tolist())
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} {digits}"


def weight_addresses(model: nn.Module) -> dict[str, int]:
    """Return the address of each parameter and buffer."""
    return {name: tensor.data_ptr() for name, tensor in named_weights(model).items()}


def require_weights_at(addresses: Mapping[str, int], model: nn.Module) -> None:
    """Raise InvalidInput if a weight has moved: a compiled graph keeps reading the original storage."""
    now = weight_addresses(model)
    moved = next((name for name, address in addresses.items() if now.get(name) != address), None)
    if moved is not None:
        raise InvalidInput(
            f"{moved} was given another storage after compile(), and the graph still runs the old one: change weights"
            " in place (param.copy_()), or load and compile the model again"
        )


def read_tensors(pairs: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Read all pairs of a name and a tensor.

    Raises:
        InvalidInput: a tensor was overwritten while later ones were read.
    """

    def num_writes(tensor: Any) -> int:
        return version_of(tensor) if isinstance(tensor, Tensor) else 0

    read = [(name, tensor, num_writes(tensor)) for name, tensor in pairs]
    for name, tensor, before in read:
        if num_writes(tensor) != before:
            raise InvalidInput(
                f"the tensor of {name} was overwritten while later ones were read, as a buffer that is used again: give"
                " each its own memory"
            )
    return [(name, tensor) for name, tensor, _ in read]


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensor's bytes in row-major order, whole rows of words at a time, without copying all of it."""
    block = BLOCK_ROWS.get(tensor.device.type, BLOCK_ROWS["cpu"]) * ROW * WORD
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.is_contiguous() or tensor.nbytes <= block:
        yield from tensor.contiguous().reshape(-1).view(torch.uint8).split(block)
        return
    line = tensor[0].numel() * tensor.element_size()
    whole = ROW * WORD // math.gcd(line, ROW * WORD)  # lines that fill whole rows of words
    for lines in tensor.split(whole * max(1, block // (whole * line))):
        yield from lines.contiguous().reshape(-1).view(torch.uint8).split(block)


def _words(piece: Tensor) -> Tensor:
    """Return the bytes as int32 words [n]; the last word is zero-padded."""
    if len(piece) % WORD:
        piece = torch.cat([piece, piece.new_zeros(-len(piece) % WORD)])
    aligned = piece.data_ptr() % WORD == 0 and piece.storage_offset() % WORD == 0
    return (piece if aligned else piece.clone()).view(torch.int32)


def _sums(words: Tensor, first_row: int) -> Tensor:
    """Return [SALTS]: Σ row multiplier · Σ column multiplier · word. ``words`` starts at a row boundary."""
    whole = len(words) // ROW
    wide = words.to(torch.int64)
    lines, rest = wide[: whole * ROW].view(whole, ROW), wide[whole * ROW :]
    totals = []
    for salt in SALTS:
        places = _places(salt, words.device)
        # integer mv: missing on GPUs, twice as fast on CPUs
        sums = lines.mv(places) if words.device.type == "cpu" else (lines * places).sum(1)
        if len(rest):
            sums = torch.cat([sums, (rest * places[: len(rest)]).sum().view(1)])
        rows = torch.from_numpy(_odd(first_row, len(sums), salt ^ ROWS_SALT)).to(words.device)
        totals.append((sums * rows).sum())
    return torch.stack(totals)


@functools.cache
def _places(salt: int, device: torch.device) -> Tensor:
    return torch.from_numpy(_odd(0, ROW, salt)).to(device)


def _odd(start: int, count: int, salt: int) -> NDArray[np.int64]:
    """Return odd 64-bit multipliers for indices from ``start`` on (splitmix64)."""
    x = np.arange(start, start + count, dtype=np.uint64) * GOLDEN + np.uint64(salt)
    x = (x ^ (x >> np.uint64(30))) * MIX[0]
    x = (x ^ (x >> np.uint64(27))) * MIX[1]
    return ((x ^ (x >> np.uint64(31))) | np.uint64(1)).view(np.int64)
