"""One forward step: the KV tensors, and CUDA graphs for the small steps of decoding.

Legend: T tokens of a step, S sequences, R rows of logits, V vocabulary size, W width of the block table.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from detcompile.errors import InvalidInput
from detcompile.runtime.block_pool import check_block_size
from detcompile.step import PADDING_SLOT, StepInputs

__all__ = ["Forward", "KVCache", "KVShape", "PackedStep", "Runner", "TOKEN_BUCKETS", "pad_step"]

TOKEN_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
NUM_WARMUPS = 2  # compile kernels and settle workspaces before a capture

Forward = Callable[[Tensor, Tensor, StepInputs, Tensor], Tensor]


class KVShape(NamedTuple):
    """One layer's share of a cache slot."""

    kv_heads: int
    head_dim: int
    v_head_dim: int


class PackedStep(NamedTuple):
    """The arguments of one forward."""

    input_ids: Tensor  # [1, T] int64
    position_ids: Tensor  # [1, T] int64
    step: StepInputs
    logits_to_keep: Tensor  # [R] int64, indices of packed tokens


class KVCache:
    """Keys and values of every layer: ``k_caches[layer]`` is [num_blocks, block_size, kv_heads, head_dim].

    Args:
        shapes: one a layer.
        block_size: tokens a block, a multiple of 16.

    Raises:
        InvalidInput: a size that cannot be.
    """

    def __init__(
        self,
        shapes: Sequence[KVShape],
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        num_blocks: int,
        block_size: int,
    ) -> None:
        check_block_size(block_size)
        if num_blocks <= 0:
            raise InvalidInput(f"a cache of {num_blocks} blocks can hold nothing: num_blocks must be positive")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = torch.device(device)
        self.k_caches = tuple(self._unfilled(s.kv_heads, s.head_dim, dtype) for s in shapes)
        self.v_caches = tuple(self._unfilled(s.kv_heads, s.v_head_dim, dtype) for s in shapes)

    def _unfilled(self, heads: int, dim: int, dtype: torch.dtype) -> Tensor:
        """What a slot holds before it is written does not matter: attention selects by position, NaN or not."""
        return torch.empty(self.num_blocks, self.block_size, heads, dim, dtype=dtype, device=self.device)


class Runner:
    """Runs steps of ``forward`` over one KV cache.

    With ``cuda_graphs``, a step whose tokens, sequences and logits fit a bucket is padded to it and replayed from a
    graph, captured when first needed: one a (bucket, width of the block table rounded up to a power of two). Larger
    steps are plain calls. Padding takes part in no live row's arithmetic, so both give the same bits.

    Args:
        forward: (input_ids [1, T], position_ids [1, T], StepInputs, logits_to_keep [R]) -> logits [R, V].
        kv_cache: its tensors must be those of every StepInputs.
        cuda_graphs: needs a cache on a CUDA device.

    Raises:
        InvalidInput: CUDA graphs without a CUDA device.
    """

    def __init__(self, forward: Forward, kv_cache: KVCache, cuda_graphs: bool) -> None:
        if cuda_graphs and kv_cache.device.type != "cuda":
            raise InvalidInput(f"CUDA graphs need a GPU, the KV cache is on {kv_cache.device}: turn them off")
        self.forward = forward
        self.kv_cache = kv_cache
        self.cuda_graphs = cuda_graphs
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._memory_pool = torch.cuda.graph_pool_handle() if cuda_graphs else None

    @torch.no_grad()
    def run(self, input_ids: Tensor, position_ids: Tensor, step: StepInputs, logits_to_keep: Tensor) -> Tensor:
        """Write the step's keys and values into the cache; return logits [R, V] of the tokens ``logits_to_keep``."""
        packed = PackedStep(input_ids, position_ids, step, logits_to_keep)
        bucket = _bucket(packed) if self.cuda_graphs else None
        if bucket is None:
            return self.forward(*packed)
        same_cache = step.k_caches is self.kv_cache.k_caches and step.v_caches is self.kv_cache.v_caches
        assert same_cache, "a graph writes into the cache that it was captured with, and into no other"
        num_blocks = 1 << (step.block_table.shape[1] - 1).bit_length()
        padded = pad_step(packed, bucket, num_blocks)
        graph = self._graphs.get((bucket, num_blocks))
        if graph is None:
            graph = self._graphs[bucket, num_blocks] = _Graph(self.forward, padded, self._memory_pool)
        return graph.replay(padded)[: len(logits_to_keep)].clone()


def pad_step(packed: PackedStep, bucket: int, num_blocks: int) -> PackedStep:
    """The same step with T = S = R = ``bucket`` and a block table ``num_blocks`` wide; its first logits are the step's.

    A padding token is token 0 at position 0 and is written nowhere; a padding sequence has no tokens and no keys; a
    padding row of logits is row 0 again.
    """
    step = packed.step
    more_tokens = bucket - packed.input_ids.shape[1]
    more_sequences = bucket - len(step.seq_lens)
    more_blocks = num_blocks - step.block_table.shape[1]
    assert min(more_tokens, more_sequences, more_blocks, bucket - len(packed.logits_to_keep)) >= 0
    return PackedStep(
        pad(packed.input_ids, (0, more_tokens)),
        pad(packed.position_ids, (0, more_tokens)),
        step._replace(
            slot_mapping=pad(step.slot_mapping, (0, more_tokens), value=PADDING_SLOT),
            cu_seqlens=torch.cat([step.cu_seqlens, step.cu_seqlens[-1:].expand(more_sequences)]),
            seq_lens=pad(step.seq_lens, (0, more_sequences)),
            block_table=pad(step.block_table, (0, more_blocks, 0, more_sequences)),
        ),
        pad(packed.logits_to_keep, (0, bucket - len(packed.logits_to_keep))),
    )


class _Graph:
    """A captured forward over tensors whose addresses never change."""

    def __init__(self, forward: Forward, padded: PackedStep, memory_pool: Any) -> None:
        self.inputs = padded
        warmup_stream = torch.cuda.Stream()
        warmup_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warmup_stream):
            for _ in range(NUM_WARMUPS):  # these steps write what the replay will write again
                forward(*padded)
        torch.cuda.current_stream().wait_stream(warmup_stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=memory_pool):
            self.logits = forward(*padded)

    def replay(self, padded: PackedStep) -> Tensor:
        """Logits [bucket, V], overwritten by the next replay of any graph that shares the memory pool."""
        for buffer, value in zip(_changing(self.inputs), _changing(padded)):
            buffer.copy_(value)
        self.graph.replay()
        return self.logits


def _changing(packed: PackedStep) -> list[Tensor]:
    """Every tensor that differs between steps: all but the caches."""
    step = packed.step
    metadata = [step.slot_mapping, step.cu_seqlens, step.seq_lens, step.block_table]
    return [packed.input_ids, packed.position_ids, packed.logits_to_keep, *metadata]


def _bucket(packed: PackedStep) -> int | None:
    """The smallest bucket that holds the step's tokens, sequences and logits."""
    size = max(packed.input_ids.shape[1], len(packed.step.seq_lens), len(packed.logits_to_keep))
    return next((bucket for bucket in TOKEN_BUCKETS if size <= bucket), None)
