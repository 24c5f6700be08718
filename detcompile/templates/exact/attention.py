"""exact_paged_attention and its relatives: causal attention over quantized keys and values; see docs/exact.md.

Legend: T tokens, B batch, Hq Hkv heads (Hkv divides Hq), D head dim, V width of a value, W words of a cached row.

A cached row is one head's key or value of one token: its digits (D or V bytes each), its float32 scale, and unused
bytes up to a multiple of 16. Caches are float32 tensors of W words, so they are stored and moved like any KV cache.
ExactRule describes scores and visible keys. A result row depends only on its query and the keys that it sees, in order
of position. So prefill, decode, any split of a prompt, any block size and placement, and dense keys give the same bits.

exact_rotated_attention norms (optional, exact_rms_norm) and rotates each head of q and k, then attends the same way.
A head x = (a, b, rest) is rotated to (a, b) * cos + (-b, a) * sin, followed by rest; cos and sin are as wide as (a, b).
"""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.step import PADDING_SLOT
from detcompile.templates.attention.op import KEYS, check_slots
from detcompile.templates.attention.operands import Caches, StepMetadata
from detcompile.templates.cpu import library as cpu_library
from detcompile.templates.exact.attention_gpu import ExactRule, attention_cuda
from detcompile.templates.exact.cache_gpu import Rotation
from detcompile.templates.exact.rows import quantize_cpu, rms_norm_cpu
from detcompile.templates.registration import define

QUERY_DIGITS = 2  # of queries and of the softmax's weights
_LOG2_E = 1.4426950216293335  # the float32
WIDEST_HEAD = 512  # an int32 holds the score of a head this wide


def row_words(head_dim: int, digits: int) -> int:
    """Return W, the float32 words of a cached row: a multiple of 4 that differs between one digit and two.

    head_dim is a multiple of 4.
    """
    return max(4 * digits, (digits * head_dim // 4 + 4) // 4 * 4)


def paged_attention_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    caches: Caches,
    slot_mapping: Tensor,
    step: StepMetadata,
    rule: ExactRule = ExactRule(),
    isa: str | None = None,
    rotation: Rotation | None = None,
) -> Tensor:
    """Quantize k [T, Hkv, D] and v [T, Hkv, V] into the caches [num_blocks, block_size, Hkv, W], then attend.

    q [T, Hq, D] -> [T, Hq, V], float32. Rows past cu_seqlens[S] are padding and get zeros.

    Args:
        rotation: how to norm and rotate q and k first.

    Raises:
        InvalidInput: sizes do not match, tables have an odd width or are wider than a head, or metadata points outside
            the caches; nothing is written.
    """
    if rotation is not None:
        _check_rotation(q, rotation)
        q, k = (_rotated(x, weight, rotation) for x, weight in ((q, rotation.q_weight), (k, rotation.k_weight)))
    digits = _digits_of(q, k, v, caches)
    _check_step(len(q), caches, slot_mapping, step, rule)
    (kept,) = torch.where(slot_mapping != PADDING_SLOT)
    slots, tokens = slot_mapping[kept], kept % max(1, len(q))
    for cache, x in ((caches.k, k), (caches.v, v)):
        cache[slots // cache.shape[1], slots % cache.shape[1]] = _packed(x, digits, isa)[tokens]
    (T, Hq, D), (_, Hkv, V) = q.shape, v.shape
    q_digits, q_scale = quantize_cpu(q, QUERY_DIGITS, False, isa)
    out = torch.empty((T, Hq, V), dtype=torch.float32, device="cpu")
    per_head = [None if given is None else given.contiguous() for given in (rule.sinks, rule.slopes)]
    S, max_blocks = step.block_table.shape
    strides = (ctypes.c_int64 * 6)(*(4 * stride for cache in caches for stride in cache.stride()[:3]))
    sizes = (T, S, Hq, Hkv, D, V, digits, caches.k.shape[1], max_blocks, cpu_library.thread_count())
    cpu_library.library(isa).detcompile_exact_attention(
        q_digits.data_ptr(), q_scale.data_ptr(), caches.k.data_ptr(), caches.v.data_ptr(), strides,
        *(tensor.data_ptr() for tensor in step), *(given if given is None else given.data_ptr() for given in per_head),
        out.data_ptr(), (ctypes.c_int64 * 12)(*sizes, rule.window, rule.chunk),
        _factor(D, rule.scale, rule.softcap > 0), rule.softcap,
    )  # fmt: skip
    return out


def dense_attention_cpu(
    q: Tensor, k: Tensor, v: Tensor, kv_digits: int, rule: ExactRule = ExactRule(), isa: str | None = None
) -> Tensor:
    """Attend without a cache, from position 0: q [B, Hq, T, D], k [B, Hkv, T, D], v [B, Hkv, T, V] -> [B, Hq, T, V]."""
    attend = functools.partial(paged_attention_cpu, rule=rule, isa=isa)
    return _over_pages(attend, q, k, v, kv_digits)


def _rotated(x: Tensor, weight: Tensor | None, rotation: Rotation) -> Tensor:
    x = x if weight is None else rms_norm_cpu(x, weight, rotation.eps)
    E = rotation.cos.shape[1]
    first = x[..., :E]
    half = torch.cat([-first[..., E // 2 :], first[..., : E // 2]], -1)
    return torch.cat([first * rotation.cos[:, None] + half * rotation.sin[:, None], x[..., E:]], -1)


def _packed(x: Tensor, digits: int, isa: str | None) -> Tensor:
    """Quantize x [..., D] to cached rows [..., W]."""
    planes, scale = quantize_cpu(x, digits, True, isa)
    num_words = row_words(x.shape[-1], digits) - digits * x.shape[-1] // 4  # of the scale, then unused ones
    tail = scale[..., None].expand(*scale.shape, num_words)
    return torch.cat([*(plane.view(torch.float32) for plane in planes), tail], -1)


def _over_pages(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, kv_digits: int) -> Tensor:
    """Run paged attention with one page for each sequence of the batch."""
    (B, Hq, T, _), device = q.shape, q.device
    tokens = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    words = [row_words(x.shape[3], kv_digits) for x in (k, v)]
    caches = Caches(*(torch.empty((B, max(1, T), k.shape[1], W), dtype=torch.float32, device=device) for W in words))
    places = torch.arange(B + 1, dtype=torch.int32, device=device)
    step = StepMetadata(places * T, torch.full_like(places[1:], T), places[:-1, None].contiguous())
    out = attend(*tokens, caches, torch.arange(B * T, device=device), step)
    return out.view(B, T, Hq, v.shape[3]).transpose(1, 2)


def _digits_of(q: Tensor, k: Tensor, v: Tensor, caches: Caches) -> int:
    (_, Hq, D), (_, Hkv, V) = q.shape, v.shape
    if Hq % Hkv or D % 4 or V % 4 or max(D, V) > WIDEST_HEAD:
        raise InvalidInput(
            f"detcompile::exact_paged_attention: {Hq} query heads and {Hkv} key heads of {D} features, values of {V}:"
            f" the key heads must divide the query heads, and features must be multiples of 4 up to {WIDEST_HEAD}"
        )
    given = [cache.shape[3] for cache in caches]
    for digits in (1, 2):
        if given == [row_words(width, digits) for width in (D, V)]:
            return digits
    raise InvalidInput(
        f"detcompile::exact_paged_attention: cached rows have {given} words; a key of {D} features needs"
        f" {row_words(D, 1)} or {row_words(D, 2)}, a value of {V} features {row_words(V, 1)} or {row_words(V, 2)}"
    )


def _check_rotation(q: Tensor, rotation: Rotation) -> None:
    E = rotation.cos.shape[1]
    if E % 2 or not 0 < E <= q.shape[2] or (rotation.q_weight is None) != (rotation.k_weight is None):
        raise InvalidInput(
            f"detcompile::exact_rotated_attention: tables of {E} features for heads of {q.shape[2]}, with"
            f" {sum(weight is not None for weight in rotation[2:4])} norms: give an even number of features, at most"
            " the head's, and the weights of both norms or of none"
        )


def _check_step(T: int, caches: Caches, slot_mapping: Tensor, step: StepMetadata, rule: ExactRule) -> None:
    """Raise InvalidInput if metadata points outside the caches or contradicts itself."""
    check_slots("exact_paged_attention", slot_mapping, T)
    num_blocks, block_size = caches.k.shape[:2]
    table, fault = step.block_table, ""
    used = slot_mapping[slot_mapping != PADDING_SLOT]
    counts, lengths = step.cu_seqlens.diff(), step.seq_lens
    first = torch.arange(table.shape[1], device=table.device) * block_size
    visible = (first < lengths[:, None]) & (counts > 0)[:, None]
    if rule.window:
        visible &= first + block_size > (lengths - counts - rule.window + 1)[:, None]
    if rule.chunk:
        visible &= first + block_size > ((lengths - counts) // rule.chunk * rule.chunk)[:, None]
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
    rule: ExactRule = ExactRule(),
    rotation: Rotation | None = None,
) -> Tensor:
    if rotation is not None:
        _check_rotation(q, rotation)
    digits = _digits_of(q, k, v, caches)
    check_slots("exact_paged_attention", slot_mapping, len(q))
    factor = _factor(q.shape[2], rule.scale, rule.softcap > 0)
    return attention_cuda(q, k, v, caches, slot_mapping, step, digits, factor, rule, rotation)


@functools.cache
def _factor(D: int, scale: float, capped: bool = False) -> float:
    """Return u * scale, or u / sqrt(D) if scale is 0, in float32 steps; u is 1 before a soft cap, else log2(e)."""
    unit, given, width = np.float32(1.0 if capped else _LOG2_E), np.float32(scale), np.float32(D)
    return float(unit * given if scale else unit / np.sqrt(width))


def _flat(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Adapt a function that takes records to the operation's flat arguments."""

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
        *rule: Any,
    ) -> Tensor:
        step = StepMetadata(cu_seqlens, seq_lens, block_table)
        return attend(q, k, v, Caches(k_cache, v_cache), slot_mapping, step, ExactRule(*rule))

    return flat


def _flat_rotated(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda q, k, v, cos, sin, q_weight, k_weight, eps, *rest: _flat(
        functools.partial(attend, rotation=Rotation(cos, sin, q_weight, k_weight, eps))
    )(q, k, v, *rest)


_RULE = (
    "float scale=0.0, int window=0, float softcap=0.0, Tensor? sinks=None, Tensor? alibi_slopes=None,"
    " int attention_chunk=0"
)
_RULE_OPERANDS: dict[str, str | range] = {
    "window": range(1 << 31),
    "sinks": "float32 Hq",
    "alibi_slopes": "float32 Hq",
    "attention_chunk": range(1 << 31),
}
_PAGED = (
    "Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, Tensor cu_seqlens, Tensor seq_lens,"
    f" Tensor block_table, {_RULE}) -> Tensor"
)
_PAGED_OPERANDS: dict[str, str | range] = {
    "q": "float32 T Hq>0 D>0",
    "k": "float32 T Hkv>0 D",
    "v": "float32 T Hkv V>0",
    "slot_mapping": "contiguous int64 Places",
    **KEYS,
    "k_cache": "unit float32 Blocks Size Hkv W",
    "v_cache": "unit float32 Blocks Size Hkv X",
    **_RULE_OPERANDS,
}
define(
    f"exact_paged_attention(Tensor q, Tensor k, Tensor v, {_PAGED}",
    _PAGED_OPERANDS,
    cpu=_flat(paged_attention_cpu),
    cuda=_flat(_paged_cuda),
    fake=lambda q, k, v, *rest: q.new_empty((*q.shape[:2], v.shape[2])),
)
define(
    "exact_rotated_attention(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor? q_weight, Tensor? k_weight,"
    f" float eps, {_PAGED}",
    _PAGED_OPERANDS | {"cos": "float32 T E", "sin": "float32 T E", "q_weight": "float32 D", "k_weight": "float32 D"},
    cpu=_flat_rotated(paged_attention_cpu),
    cuda=_flat_rotated(_paged_cuda),
    fake=lambda q, k, v, *rest: q.new_empty((*q.shape[:2], v.shape[2])),
)
define(
    f"exact_dense_attention(Tensor q, Tensor k, Tensor v, int kv_digits, {_RULE}) -> Tensor",
    {
        "q": "float32 N Hq>0 T D>0",
        "k": "float32 N Hkv>0 T D",
        "v": "float32 N Hkv T V>0",
        "kv_digits": range(1, 3),
        **_RULE_OPERANDS,
    },
    cpu=lambda q, k, v, kv_digits, *rule: dense_attention_cpu(q, k, v, kv_digits, ExactRule(*rule)),
    cuda=lambda q, k, v, kv_digits, *rule: _over_pages(
        functools.partial(_paged_cuda, rule=ExactRule(*rule)), q, k, v, kv_digits
    ),
    fake=lambda q, k, v, *rest: q.new_empty((*q.shape[:3], v.shape[3])),
)
