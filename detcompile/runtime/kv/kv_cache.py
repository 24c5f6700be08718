"""The tensors that hold keys and values, one block id space for all layers."""

import contextlib
import functools
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.facts import ModelFacts
from detcompile.runtime.device_memory import ran_out_of_memory
from detcompile.runtime.kv.block_pool import check_block_size
from detcompile.step import KVGroup, KVShape, StateShape
from detcompile.templates.tokens.block_copies_gpu import copy_blocks_cuda

__all__ = ["KVCache", "KVShape", "new_cache"]

Kind = tuple[int, int]  # heads, head_dim
Place = tuple[Kind, int]  # which of the tensors of a kind


class KVCache:
    """Keys and values of every layer: ``k_caches[layer]`` is [num_blocks, block_size, kv_heads, head_dim].

    Layer i of every KV group is the same tensor: a block belongs to one group at a time, so that no two layers ever
    use one place of it.

    Args:
        shapes: heads and widths of each layer.
        groups: groups of layers that share a block table (``step.kv_groups``).
        dtype: dtype of keys, values and states that do not name their own.
        device: where the tensors are.
        num_blocks: blocks of the cache, the reserved block 0 included.
        block_size: tokens a block, a multiple of 16.
        states: what the model's layers carry from token to token; ``states[i]`` is [num_state_slots, *shape].

    Raises:
        InvalidInput: a size that cannot be, or finds no memory.
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
            raise InvalidInput(f"a cache of {num_blocks} blocks can hold nothing: num_blocks must be positive")
        self.groups = tuple(groups)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = torch.device(device)

        # What a slot holds before it is written does not matter: attention selects by position, NaN or not.
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
        """Copy the first tokens of blocks over those of others, in every layer.

        Args:
            block_copies: [3, N] int64 where the cache is: blocks, those written to, none of which is another's source,
                and the number of tokens; entries of 0 tokens are padding.
        """
        copy = copy_blocks_cuda if self.device.type == "cuda" else _copy_blocks
        for storage in self._storages.values():
            copy(storage, block_copies)

    def read_blocks(self, tables: Sequence[Sequence[int]]) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of blocks, one table a KV group, on the CPU: [blocks, block_size, kv_heads, head_dim]."""
        return [
            (self.k_caches[layer][blocks].cpu(), self.v_caches[layer][blocks].cpu())
            for layer, blocks in self._blocks_of_layers(tables)
        ]

    def write_blocks(self, tables: Sequence[Sequence[int]], layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Write what ``read_blocks`` gives."""
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
        """Memory that one block takes in all tensors together."""
        widest = max(groups, key=lambda group: len(group.layers)).layers
        elements = sum(shapes[i].kv_heads * (shapes[i].head_dim + shapes[i].v_head_dim) for i in widest)
        return elements * block_size * dtype.itemsize

    @staticmethod
    def bytes_per_state(states: Sequence[StateShape], dtype: torch.dtype) -> int:
        """Memory that the states of one sequence take."""
        return sum(math.prod(state.shape) * _dtype(state, dtype).itemsize for state in states)


@contextlib.contextmanager
def _fitting(what: str, less: str, device: torch.device) -> Iterator[None]:
    """Say what found no memory, and what to give less of."""
    try:
        yield
    except RuntimeError as error:
        if not ran_out_of_memory(error):
            raise
        raise InvalidInput(f"{what} do not fit the memory of {device}: give a smaller {less}") from error


@functools.lru_cache(maxsize=64)
def _places(shapes: tuple[KVShape, ...], groups: tuple[KVGroup, ...]) -> tuple[Counter[Kind], list[Place], list[Place]]:
    """How many tensors of each kind there are, and which of them holds each layer's keys, and its values."""
    place = {layer: index for group in groups for index, layer in enumerate(group.layers)}
    widest = max(groups, key=lambda group: len(group.layers)).layers
    shape = [shapes[layer] for layer in widest]
    kinds = [(s.kv_heads, s.head_dim) for s in shape] + [(s.kv_heads, s.v_head_dim) for s in shape]
    numbers: dict[Kind, Iterator[int]] = defaultdict(itertools.count)
    places = [(kind, next(numbers[kind])) for kind in kinds]
    of_layer = [place[layer] for layer in range(len(shapes))]
    return Counter(kinds), [places[i] for i in of_layer], [places[len(widest) + i] for i in of_layer]


def _copy_blocks(storage: Tensor, block_copies: Tensor) -> None:
    """``copy_blocks_cuda``, on a CPU."""
    for source, target, num_tokens in block_copies.T.tolist():
        if num_tokens:
            storage[:, target, :num_tokens] = storage[:, source, :num_tokens]


def _dtype(state: StateShape, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if state.float32 else dtype


def new_cache(facts: ModelFacts, num_blocks: int, block_size: int, num_states: int = 0) -> KVCache:
    """An empty KV cache of the model, with the states of so many sequences."""
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
