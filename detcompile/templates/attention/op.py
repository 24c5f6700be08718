"""paged_attention and dense_attention: causal attention in one KV order, both with the same bits.

Legend: T tokens, S sequences, B batch, Hq Hkv query and key heads (Hkv divides Hq), D Dv head dims.

Keys have absolute positions. Blocks of 64 keys, at multiples of 64, are processed in ascending order with an online
softmax. Its float32 state (m, l, o) is reset at each multiple of kv_chunk; the chunks' states are merged in ascending
order. A head's sink, if any, is added to l last, as a key without a value; out = round(o / l + 0.0). The query at
position p sees all keys up to p; with sliding_window > 0 only those in (p - sliding_window, p]; with attention_chunk >
0 (not part of the order) those from p // attention_chunk * attention_chunk to p.

A score is scale * q.k. With softcap > 0 it becomes softcap * tanh(score / softcap). With ALiBi, slope[head] * (key - p)
is added; the softmax cannot distinguish it from slope[head] * key, and it stays small for near keys in long sequences.
relative_bias has E values for each row of q: value p - key is added if p - key < E.

A row's bits depend only on its query and on the keys it sees, in position order. Prefill, decode, any split of a prompt
into steps, any block size and placement, and dense keys agree. Keys and values are used as the cache stores them. The
contents of slots that a row does not see, even NaN, have no effect.
"""

import ctypes
import math
from collections.abc import Callable

import torch
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.templates.attention.gpu import dense_attention_cuda, paged_attention_cuda
from detcompile.templates.attention.operands import Caches, StepMetadata, unit_rows
from detcompile.templates.attention.scores import RULE, AttentionRule, rule_operands
from detcompile.templates.cpu import library as cpu_library
from detcompile.templates.registration import define

_LOG2_E = math.log2(math.e)
_FAULTS = {  # enum Fault of attention.cpp
    1: "slot_mapping[{where}] is neither PADDING_SLOT nor a slot of the caches",
    2: "cu_seqlens must start at 0 and ascend to at most T; sequence {where} violates this",
    3: "seq_lens[{where}] is less than the sequence's tokens in this step, or more than its block_table row holds",
    4: "block_table[{where}] is not a block of the caches, at a position that a token sees",
    5: "slot_mapping[{where}] repeats an earlier slot",
}


def paged_attention_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    caches: Caches,
    slot_mapping: Tensor,
    step: StepMetadata,
    rule: AttentionRule,
    *,
    isa: str | None = None,
) -> Tensor:
    """Write k and v into the caches at slot_mapping [C T], then attend from the caches.

    q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv], caches [num_blocks, block_size, Hkv, D | Dv] -> [T, Hq, Dv], q.dtype.
    Rows past cu_seqlens[S] are padding and get zeros.

    Raises:
        InvalidInput: head counts do not match, or metadata points outside the caches; nothing is written.
    """
    T, Hq, D = q.shape
    Hkv, Dv = v.shape[1], v.shape[2]
    rule.check("detcompile::paged_attention", Hq, Hkv)
    check_slots("paged_attention", slot_mapping, T)
    num_blocks, block_size = caches.k.shape[:2]
    out = torch.empty((T, Hq, Dv), dtype=q.dtype, device="cpu")
    q, k, v = unit_rows(q), unit_rows(k), unit_rows(v)
    S, max_blocks = step.block_table.shape
    strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *caches.k.stride()[:3], *caches.v.stride()[:3])
    scores, limits = CpuScores(rule), (rule.sliding_window, rule.kv_chunk, rule.attention_chunk)
    sizes = (T, S, Hq, Hkv, D, Dv, num_blocks, block_size, max_blocks, *limits, scores.extent, len(slot_mapping))
    where = ctypes.c_int64()
    fault = cpu_library.library(isa).detcompile_paged_attention(
        q, k, v, *caches, slot_mapping, *step, out,
        (ctypes.c_int64 * 12)(*strides), (ctypes.c_int64 * 14)(*sizes), *scores.operands,
        cpu_library.dtype_code(q), cpu_library.dtype_code(caches.k), cpu_library.thread_count(), ctypes.byref(where),
    )  # fmt: skip
    if fault:
        raise InvalidInput(
            f"detcompile::paged_attention: {_FAULTS[fault].format(where=where.value)} ({num_blocks} blocks of "
            f"{block_size}, T = {T}). Build the metadata as step.StepInputs describes."
        )
    return out


def dense_attention_cpu(q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, *, isa: str | None = None) -> Tensor:
    """Attend without a cache; token t is at position t.

    q [B, Hq, T, D], k [B, Hkv, T, D], v [B, Hkv, T, Dv] -> [B, Hq, T, Dv], q.dtype.

    Raises:
        InvalidInput: head counts do not match.
    """
    B, Hq, T, D = q.shape
    Hkv, Dv = v.shape[1], v.shape[3]
    rule.check("detcompile::dense_attention", Hq, Hkv)
    out = torch.empty((B, Hq, T, Dv), dtype=q.dtype, device="cpu")
    q, k, v = unit_rows(q), unit_rows(k), unit_rows(v)
    scores = CpuScores(rule)
    cpu_library.library(isa).detcompile_dense_attention(
        q, k, v, out, (ctypes.c_int64 * 9)(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]), B, T, Hq, Hkv, D, Dv,
        rule.sliding_window, rule.attention_chunk, rule.kv_chunk, *scores.operands, scores.extent,
        cpu_library.dtype_code(q), cpu_library.thread_count(),
    )  # fmt: skip
    return out


def _flat_paged(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a function that takes records as the operation, whose arguments are flat."""
    return lambda q, k, v, k_cache, v_cache, slots, cu_seqlens, seq_lens, block_table, *rule: attend(
        q, k, v, Caches(k_cache, v_cache), slots, StepMetadata(cu_seqlens, seq_lens, block_table), AttentionRule(*rule)
    )


def _flat_dense(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda q, k, v, *rule: attend(q, k, v, AttentionRule(*rule))


KEYS = {  # declarations of the operands that locate a step's keys
    "k_cache": "unit float Blocks Size Hkv>0 D",
    "v_cache": "unit k_cache Blocks Size Hkv Dv",
    "cu_seqlens": "contiguous int32 S+1",
    "seq_lens": "contiguous int32 S",
    "block_table": "contiguous int32 S B",
}
define(
    "paged_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, "
    f"Tensor cu_seqlens, Tensor seq_lens, Tensor block_table, {RULE}) -> Tensor",
    {"q": "float T Hq>0 D", "k": "q T Hkv D", "v": "q T Hkv Dv", "slot_mapping": "contiguous int64 Places"}
    | KEYS
    | rule_operands("T Hq"),
    cpu=_flat_paged(paged_attention_cpu),
    cuda=_flat_paged(paged_attention_cuda),
    fake=lambda q, k, v, *rest: q.new_empty((q.shape[0], q.shape[1], v.shape[2])),
)
define(
    f"dense_attention(Tensor q, Tensor k, Tensor v, {RULE}) -> Tensor",
    {"q": "float N Hq>0 T D", "k": "q N Hkv>0 T D", "v": "q N Hkv T Dv"} | rule_operands("N Hq T"),
    cpu=_flat_dense(dense_attention_cpu),
    cuda=_flat_dense(dense_attention_cuda),
    fake=lambda q, k, v, *rest: q.new_empty((q.shape[0], q.shape[1], q.shape[2], v.shape[3])),
)


def reference_attention(q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
    """Return the dense op's value in float64, unrounded: [B, Hq, T, Dv]."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.double().repeat_interleave(groups, 1), v.double().repeat_interleave(groups, 1)
    position, key = torch.arange(q.shape[2], device=q.device)[:, None], torch.arange(k.shape[2], device=q.device)
    distance = position - key
    hidden = (distance < 0) | ((distance >= rule.sliding_window) if rule.sliding_window else False)
    if rule.attention_chunk:
        hidden = hidden | (position // rule.attention_chunk != key // rule.attention_chunk)
    scores = q.double() @ k.transpose(-1, -2) * rule.scale
    if rule.softcap:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    if rule.alibi_slopes is not None:
        scores = scores - rule.alibi_slopes.double()[:, None, None] * distance
    if rule.relative_bias is not None:
        extent = rule.relative_bias.shape[-1]
        bias = rule.relative_bias.double().gather(-1, distance.clamp(0, extent - 1).expand_as(scores))
        scores = scores + bias.masked_fill(distance >= extent, 0.0)
    scores = scores.masked_fill(hidden, -math.inf)
    if rule.sinks is not None:
        scores = torch.cat([scores, rule.sinks.double()[:, None, None].expand(*scores.shape[:3], 1)], -1)
    return torch.softmax(scores, -1)[..., : k.shape[2]] @ v


class CpuScores:
    """The fields of struct Scores of attention_scores.h.

    Attributes:
        operands: scalars [3], slopes, sinks and biases, as the library takes them.
        extent: biases per row.
    """

    def __init__(self, rule: AttentionRule) -> None:
        bias = rule.relative_bias
        plain = rule.softcap == 0 and rule.alibi_slopes is None and bias is None
        unit = _LOG2_E if plain else 1.0
        scalars = (ctypes.c_float * 3)(rule.pre_scale * unit, rule.softcap, 1.0 if plain else _LOG2_E)
        slopes = None if rule.alibi_slopes is None else rule.alibi_slopes.float().contiguous()
        sinks = None if rule.sinks is None else (rule.sinks.double() * unit).float().contiguous()
        self.operands = (scalars, slopes, sinks, None if bias is None else bias.float().contiguous())
        self.extent = 0 if bias is None else bias.shape[-1]


def check_slots(op: str, slot_mapping: Tensor, T: int) -> None:
    """Raise InvalidInput unless the slot mapping has one or more slots for each of T tokens."""
    count = len(slot_mapping)
    if count != T and (T == 0 or count == 0 or count % T):
        raise InvalidInput(
            f"detcompile::{op}: slot_mapping has {count} slots; {T} tokens need T, 2 T, … slots. Build the metadata as"
            " step.StepInputs describes."
        )
