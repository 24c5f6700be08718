"""KVCache: tensors of keys and values, with one block id space for all layers."""

import contextlib
import functools
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.runtime.device_memory import ran_out_of_memory
from detcompile.runtime.kv.block_pool import check_block_size
from detcompile.step import KVGroup, KVShape, ModelFacts, StateShape
from detcompile.templates.tokens.block_copies_gpu import copy_blocks_cuda

Kind = tuple[int, int]  # heads, head_dim
Place = tuple[Kind, int]  # kind, and index among the tensors of that kind


class KVCache:
    """Keys and values of every layer: ``k_caches[layer]`` is [num_blocks, block_size, kv_heads, head_dim].

    The i-th layers of all KV groups share one tensor. A block belongs to one group at a time, so no two layers ever use
    the same memory.

    Args:
        shapes: heads and widths of each layer.
        groups: groups of layers that share a block table (``step.kv_groups``).
        dtype: dtype of keys, values and states without a dtype of their own.
        device: device of the tensors.
        num_blocks: blocks of the cache, the reserved block 0 included.
        block_size: tokens per block, a multiple of 16.
        states: recurrent states of the model's layers; ``states[i]`` is [num_state_slots, *shape].

    Raises:
        InvalidInput: a size is invalid or does not fit in memory.
    """

    def __init__(
        self,
        shapes: Sequence[KVShape],
        groups: Sequence[KVGroup],
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        num_blocks: int,
        block_size: int,
        states: Sequence[StateShape] = (),
        num_state_slots: int = 0,
    ) -> None:
        check_block_size(block_size)
        if num_blocks <= 0:
            raise InvalidInput(f"num_blocks must be positive, got {num_blocks}")
        self.groups = tuple(groups)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = torch.device(device)

        # Uninitialized memory is fine: attention selects by position, so stale values (even NaN) are never used.
        counts, k_places, v_places = _places(tuple(shapes), self.groups)
        with _fitting(f"{num_blocks} KV blocks of {block_size} tokens", "num_blocks, or None to size it", self.device):
            self._storages = {
                (heads, dim): torch.empty(count, num_blocks, block_size, heads, dim, dtype=dtype, device=self.device)
                for (heads, dim), count in counts.items()
            }
        layers = {key: storage.unbind() for key, storage in self._storages.items()}
        self.k_caches = tuple(layers[key][index] for key, index in k_places)
        self.v_caches = tuple(layers[key][index] for key, index in v_places)
        with _fitting(f"the states of {num_state_slots} sequences", "max_num_seqs", self.device):
            self.states = tuple(
                torch.empty(num_state_slots, *state.shape, dtype=_dtype(state, dtype), device=self.device)
                for state in states
            )

    def copy_blocks(self, block_copies: Tensor) -> None:
        """Copy the first tokens of blocks over those of other blocks, in every layer.

        Args:
            block_copies: [3, N] int64 on the cache's device: source blocks, target blocks, numbers of tokens. No
                target may be another copy's source; entries of 0 tokens are padding.
        """
        copy = copy_blocks_cuda if self.device.type == "cuda" else _copy_blocks
        for storage in self._storages.values():
            copy(storage, block_copies)

    def read_blocks(self, tables: Sequence[Sequence[int]]) -> list[tuple[Tensor, Tensor]]:
        """Return keys and values of blocks (one table per KV group) on the CPU: [blocks, block_size, kv_heads, dim]."""
        return [
            (self.k_caches[layer][blocks].cpu(), self.v_caches[layer][blocks].cpu())
            for layer, blocks in self._blocks_of_layers(tables)
        ]

    def write_blocks(self, tables: Sequence[Sequence[int]], layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Write blocks as returned by ``read_blocks``."""
        for layer, blocks in self._blocks_of_layers(tables):
            for cache, part in zip((self.k_caches[layer], self.v_caches[layer]), layers[layer], strict=True):
                cache[blocks] = part.to(self.device)

    def _blocks_of_layers(self, tables: Sequence[Sequence[int]]) -> list[tuple[int, Tensor]]:
        every = ((layer, table) for group, table in zip(self.groups, tables, strict=True) for layer in group.layers)
        return [(layer, torch.tensor(table, dtype=torch.int64, device=self.device)) for layer, table in sorted(every)]

    @staticmethod
    def bytes_per_block(
        shapes: Sequence[KVShape], groups: Sequence[KVGroup], dtype: torch.dtype, block_size: int
    ) -> int:
        """Return the bytes of one block in all tensors together."""
        widest = max(groups, key=lambda group: len(group.layers)).layers
        elements = sum(shapes[i].kv_heads * (shapes[i].head_dim + shapes[i].v_head_dim) for i in widest)
        return elements * block_size * dtype.itemsize

    @staticmethod
    def bytes_per_state(states: Sequence[StateShape], dtype: torch.dtype) -> int:
        """Return the bytes of one sequence's states."""
        return sum(math.prod(state.shape) * _dtype(state, dtype).itemsize for state in states)


@contextlib.contextmanager
def _fitting(what: str, less: str, device: torch.device) -> Iterator[None]:
    """Turn running out of memory into an InvalidInput that says what to make smaller."""
    try:
        yield
    except RuntimeError as error:
        if not ran_out_of_memory(error):
            raise
        raise InvalidInput(f"{what} do not fit the memory of {device}: give a smaller {less}") from error


@functools.lru_cache(maxsize=64)
def _places(shapes: tuple[KVShape, ...], groups: tuple[KVGroup, ...]) -> tuple[Counter[Kind], list[Place], list[Place]]:
    """Return the number of tensors of each kind, and each layer's tensor for keys and for values."""
    place = {layer: index for group in groups for index, layer in enumerate(group.layers)}
    widest = max(groups, key=lambda group: len(group.layers)).layers
    shape = [shapes[layer] for layer in widest]
    kinds = [(s.kv_heads, s.head_dim) for s in shape] + [(s.kv_heads, s.v_head_dim) for s in shape]
    numbers: dict[Kind, Iterator[int]] = defaultdict(itertools.count)
    places = [(kind, next(numbers[kind])) for kind in kinds]
    of_layer = [place[layer] for layer in range(len(shapes))]
    return Counter(kinds), [places[i] for i in of_layer], [places[len(widest) + i] for i in of_layer]


def _copy_blocks(storage: Tensor, block_copies: Tensor) -> None:
    """Copy blocks on a CPU, like ``copy_blocks_cuda``."""
    for source, target, num_tokens in block_copies.T.tolist():
        if num_tokens:
            storage[:, target, :num_tokens] = storage[:, source, :num_tokens]


def _dtype(state: StateShape, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if state.float32 else dtype


def new_cache(facts: ModelFacts, num_blocks: int, block_size: int, num_states: int = 0) -> KVCache:
    """Return an empty KV cache of the model, with states for ``num_states`` sequences."""
    return KVCache(
        facts.kv_shapes,
        facts.kv_groups,
        dtype=facts.dtype,
        device=facts.device,
        num_blocks=num_blocks,
        block_size=block_size,
        states=facts.state_shapes,
        num_state_slots=num_states,
    )
