"""exact_paged_attention and exact_dense_attention: causal attention over quantized keys and values; see docs/exact.md.

Legend: T tokens, B batch, Hq Hkv heads (Hkv divides Hq), D head dim, W words of a cached row.

A cached row is one head's key or value of one token: its digits (D bytes each), then its float32 scale. Caches are
float32 tensors of W = D / 4 + 1 or D / 2 + 1 words, so that they are stored and moved as any KV cache; all words but
the last hold bytes. Scores are multiplied by `scale`, or by 1 / sqrt(D) if it is 0. A token sees the newest `window`
keys, itself included, or all keys if `window` is 0. A row of the result depends on its query and the keys that it
sees, in position order.
Prefill, decode, any split of a prompt, any block size and placement, and dense keys agree.
"""

import ctypes
import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.step import PADDING_SLOT
from detcompile.templates.attention.op import KEYS, check_slots
from detcompile.templates.attention.operands import Caches, StepMetadata
from detcompile.templates.cpu import library as cpu_library
from detcompile.templates.exact.attention_gpu import attention_cuda
from detcompile.templates.exact.rows import quantize_cpu
from detcompile.templates.registration import define

QUERY_DIGITS = 2  # of queries and of the softmax's weights
_LOG2_E = 1.4426950216293335  # the float32
_WIDEST_HEAD = 512  # int32 holds a score of such a head


def row_words(head_dim: int, digits: int) -> int:
    """Return W, the float32 words of a cached row. A head has a multiple of 4 features."""
    return digits * head_dim // 4 + 1


def paged_attention_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    caches: Caches,
    slot_mapping: Tensor,
    step: StepMetadata,
    scale: float = 0.0,
    window: int = 0,
    isa: str | None = None,
) -> Tensor:
    """Quantize k and v [T, Hkv, D] into the caches [num_blocks, block_size, Hkv, W] at slot_mapping, then attend.

    q [T, Hq, D] -> [T, Hq, D], float32. Rows past cu_seqlens[S] are padding and get zeros.

    Raises:
        InvalidInput: sizes do not match, or metadata points outside the caches; nothing is written.
    """
    digits = _digits_of(q, k, caches)
    _check_step(len(q), caches, slot_mapping, step, window)
    (kept,) = torch.where(slot_mapping != PADDING_SLOT)
    slots, tokens = slot_mapping[kept], kept % max(1, len(q))
    for cache, x in ((caches.k, k), (caches.v, v)):
        cache[slots // cache.shape[1], slots % cache.shape[1]] = _packed(x, digits, isa)[tokens]
    T, Hq, D = q.shape
    q_digits, q_scale = quantize_cpu(q, QUERY_DIGITS, False, isa)
    out = torch.empty((T, Hq, D), dtype=torch.float32, device="cpu")
    S, max_blocks = step.block_table.shape
    strides = (ctypes.c_int64 * 6)(*(4 * stride for cache in caches for stride in cache.stride()[:3]))
    sizes = (T, S, Hq, k.shape[1], D, digits, caches.k.shape[1], max_blocks, cpu_library.thread_count(), window)
    cpu_library.library(isa).detcompile_exact_attention(
        q_digits.data_ptr(), q_scale.data_ptr(), caches.k.data_ptr(), caches.v.data_ptr(), strides,
        *(tensor.data_ptr() for tensor in step), out.data_ptr(), (ctypes.c_int64 * 10)(*sizes), _factor(D, scale),
    )  # fmt: skip
    return out


def dense_attention_cpu(
    q: Tensor, k: Tensor, v: Tensor, kv_digits: int, scale: float = 0.0, window: int = 0, isa: str | None = None
) -> Tensor:
    """Attend without a cache, from position 0: q [B, Hq, T, D], k and v [B, Hkv, T, D] -> [B, Hq, T, D]."""
    attend = functools.partial(paged_attention_cpu, scale=scale, window=window, isa=isa)
    return _over_pages(attend, q, k, v, kv_digits)


def _packed(x: Tensor, digits: int, isa: str | None) -> Tensor:
    """Return the cached rows [..., W] of x [..., D]."""
    planes, scale = quantize_cpu(x, digits, True, isa)
    return torch.cat([*(plane.view(torch.float32) for plane in planes), scale[..., None]], -1)


def _over_pages(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, kv_digits: int) -> Tensor:
    """Run paged attention over one page a sequence of the batch."""
    (B, _, T, D), device = q.shape, q.device
    tokens = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    shape = (B, max(1, T), k.shape[1], row_words(D, kv_digits))
    caches = Caches(*(torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2)))
    places = torch.arange(B + 1, dtype=torch.int32, device=device)
    step = StepMetadata(places * T, torch.full_like(places[1:], T), places[:-1, None].contiguous())
    out = attend(*tokens, caches, torch.arange(B * T, device=device), step)
    return out.view(B, T, *q.shape[1::2]).transpose(1, 2)


def _digits_of(q: Tensor, k: Tensor, caches: Caches) -> int:
    (_, Hq, D), Hkv, W = q.shape, k.shape[1], caches.k.shape[3]
    if Hq % Hkv or D % 4 or D > _WIDEST_HEAD:
        raise InvalidInput(
            f"detcompile::exact_paged_attention: {Hq} query heads over {Hkv} key heads of {D}: the heads must divide,"
            f" and a head must be a multiple of 4 up to {_WIDEST_HEAD}"
        )
    for digits in (1, 2):
        if row_words(D, digits) == W:
            return digits
    raise InvalidInput(
        f"detcompile::exact_paged_attention: cached rows of {W} words; a head of {D} takes {row_words(D, 1)} or"
        f" {row_words(D, 2)}"
    )


def _check_step(T: int, caches: Caches, slot_mapping: Tensor, step: StepMetadata, window: int) -> None:
    """Raise InvalidInput if metadata points outside the caches or contradicts itself."""
    check_slots("exact_paged_attention", slot_mapping, T)
    num_blocks, block_size = caches.k.shape[:2]
    table, fault = step.block_table, ""
    used = slot_mapping[slot_mapping != PADDING_SLOT]
    counts, lengths = step.cu_seqlens.diff(), step.seq_lens
    first = torch.arange(table.shape[1]) * block_size
    visible = (first < lengths[:, None]) & (counts > 0)[:, None]
    if window:
        visible &= first + block_size > (lengths - counts - window + 1)[:, None]
    if len(used) and not 0 <= int(used.min()) <= int(used.max()) < num_blocks * block_size:
        fault = "slot_mapping names a slot outside the caches"
    elif len(used.unique()) < len(used):
        fault = "slot_mapping repeats a slot"
    elif step.cu_seqlens[0] or (counts < 0).any() or step.cu_seqlens[-1] > T:
        fault = "cu_seqlens must start at 0 and ascend to at most T"
    elif ((counts > 0) & ((lengths < counts) | (lengths > table.shape[1] * block_size))).any():
        fault = "seq_lens has less than a sequence's tokens in this step, or more than its block_table row holds"
    elif (visible & ((table < 0) | (table >= num_blocks))).any():
        fault = "block_table names a block outside the caches, at a position that a token sees"
    if fault:
        raise InvalidInput(
            f"detcompile::exact_paged_attention: {fault} ({num_blocks} blocks of {block_size}, T = {T}). Build the"
            " metadata as step.StepInputs describes."
        )


def _paged_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    caches: Caches,
    slot_mapping: Tensor,
    step: StepMetadata,
    scale: float = 0.0,
    window: int = 0,
) -> Tensor:
    digits = _digits_of(q, k, caches)
    check_slots("exact_paged_attention", slot_mapping, len(q))
    return attention_cuda(q, k, v, caches, slot_mapping, step, digits, _factor(q.shape[2], scale), window)


@functools.cache
def _factor(D: int, scale: float) -> float:
    """Return log2(e) times the scale, or over sqrt(D) if it is 0; each operation is rounded to float32."""
    log2_e, given, width = np.float32(_LOG2_E), np.float32(scale), np.float32(D)
    return float(log2_e * given if scale else log2_e / np.sqrt(width))


def _flat(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a function that takes records as the operation, whose arguments are flat."""

    def flat(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        cu_seqlens: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        scale: float = 0.0,
        window: int = 0,
    ) -> Tensor:
        step = StepMetadata(cu_seqlens, seq_lens, block_table)
        return attend(q, k, v, Caches(k_cache, v_cache), slot_mapping, step, scale, window)

    return flat


define(
    "exact_paged_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, "
    "Tensor cu_seqlens, Tensor seq_lens, Tensor block_table, float scale=0.0, int window=0) -> Tensor",
    {
        "q": "float32 T Hq>0 D>0",
        "k": "float32 T Hkv>0 D",
        "v": "float32 T Hkv D",
        "slot_mapping": "contiguous int64 Places",
        "window": range(1 << 31),
        **KEYS,
        "k_cache": "unit float32 Blocks Size Hkv W",
        "v_cache": "unit float32 Blocks Size Hkv W",
    },
    cpu=_flat(paged_attention_cpu),
    cuda=_flat(_paged_cuda),
    fake=lambda q, *rest: q.new_empty(q.shape),
)
define(
    "exact_dense_attention(Tensor q, Tensor k, Tensor v, int kv_digits, float scale=0.0, int window=0) -> Tensor",
    {
        "q": "float32 N Hq>0 T D>0",
        "k": "float32 N Hkv>0 T D",
        "v": "float32 N Hkv T D",
        "kv_digits": range(1, 3),
        "window": range(1 << 31),
    },
    cpu=dense_attention_cpu,
    cuda=lambda q, k, v, kv_digits, scale=0.0, window=0: _over_pages(
        functools.partial(_paged_cuda, scale=scale, window=window), q, k, v, kv_digits
    ),
    fake=lambda q, k, v, kv_digits, scale=0.0, window=0: q.new_empty(q.shape),
)
