"""paged_attention and dense_attention: causal attention in one KV order, with the same bits from either.

Legend: T tokens, S sequences, B batch, Hq Hkv query and key heads (Hkv divides Hq), D Dv head dims.

Keys sit at absolute positions. Blocks of 64 keys, at multiples of 64, are taken ascending with an online softmax whose
state (m, l, o), float32, starts afresh at each multiple of kv_chunk; the chunks' partials are merged ascending; a
head's sink, if there is one, joins l last, as a key without a value; out = round(o / l + 0.0). The query at position p
sees all keys up to p; with sliding_window > 0 those in (p - sliding_window, p]; with attention_chunk > 0, which is no
part of the order, those from p // attention_chunk * attention_chunk to p.

A score is scale * q.k; with softcap > 0 softcap * tanh(score / softcap); with ALiBi slope[head] * (key - p) is added,
which the softmax cannot tell from slope[head] * key, and which stays small where it matters however long the sequence;
with relative_bias, which has E values for each row of q, the value of distance p - key is added, if that is below E.

A row's bits depend on its query and on the keys it sees, in position order. Prefill, decode, any cut of a prompt into
steps, any block size and placement, and dense keys agree. Keys and values are attended as the cache stores them; what
lies in a slot that a row does not see, be it NaN, does not matter.
"""

import ctypes
import math

import torch
from torch import Tensor

from detcompile.errors import InvalidInput, NumericsError
from detcompile.orders.numerics import KV_BLOCK
from detcompile.templates.attention.gpu import dense_attention_cuda, paged_attention_cuda
from detcompile.templates.attention.scores import Scores, Visible
from detcompile.templates.cpu import library as cpu_library

__all__ = ["dense_attention_cpu", "holds_copies", "paged_attention_cpu", "reference_attention"]

_LIBRARY = torch.library.Library("detcompile", "FRAGMENT")
_LIBRARY.define(
    "paged_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, "
    "Tensor cu_seqlens, Tensor seq_lens, Tensor block_table, float scale, int sliding_window, int kv_chunk, "
    "float softcap=0.0, Tensor? sinks=None, Tensor? alibi_slopes=None, int attention_chunk=0, "
    "Tensor? relative_bias=None) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define(
    "dense_attention(Tensor q, Tensor k, Tensor v, float scale, int sliding_window, int kv_chunk, float softcap=0.0, "
    "Tensor? sinks=None, Tensor? alibi_slopes=None, int attention_chunk=0, "
    "Tensor? relative_bias=None) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)

_LOG2_E = math.log2(math.e)
_FAULTS = {  # enum Fault of attention.cpp
    1: "slot_mapping[{where}] is neither PADDING_SLOT nor a slot of the caches",
    2: "cu_seqlens must start at 0 and ascend to at most T; it does not at sequence {where}",
    3: "seq_lens[{where}] is less than the sequence's tokens in this step, or more than its block_table row holds",
    4: "block_table[{where}] names a block that the caches do not have, at a position that a token sees",
}


def paged_attention_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    scale: float,
    sliding_window: int,
    kv_chunk: int,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    attention_chunk: int = 0,
    relative_bias: Tensor | None = None,
    *,
    isa: str | None = None,
) -> Tensor:
    """Writes k, v into the caches at slot_mapping [C T], then attends from the caches. The metadata is StepInputs'.

    q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv], caches [num_blocks, block_size, Hkv, D | Dv] -> [T, Hq, Dv], q.dtype.
    Rows past cu_seqlens[S] are padding and get zeros.

    Raises:
        InvalidInput: tensors that do not fit together, or metadata that points outside the caches; nothing is written.
        NumericsError: kv_chunk is not a multiple of 64.
    """
    _check_heads("paged_attention", q, k, v, kv_chunk, 3)
    Visible(sliding_window, attention_chunk).check("detcompile::paged_attention")
    scores = Scores(scale, softcap, sinks, alibi_slopes, relative_bias)
    scores.check("detcompile::paged_attention", q, q.shape[1])
    T, Hq, D = q.shape
    Hkv, Dv = v.shape[1], v.shape[2]
    num_blocks, block_size = k_cache.shape[:2]
    _check_caches(k_cache, v_cache, (num_blocks, block_size, Hkv, D), (num_blocks, block_size, Hkv, Dv))
    _check_metadata(slot_mapping, cu_seqlens, seq_lens, block_table, T)
    out = torch.empty((T, Hq, Dv), dtype=q.dtype)
    q, k, v = _unit_last_stride(q), _unit_last_stride(k), _unit_last_stride(v)
    S, max_blocks = block_table.shape
    strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3])
    given, limits = _CpuScores(scores), (sliding_window, kv_chunk, attention_chunk)
    sizes = (T, S, Hq, Hkv, D, Dv, num_blocks, block_size, max_blocks, *limits, given.extent, len(slot_mapping))
    where = ctypes.c_int64()
    fault = cpu_library.library(isa).detcompile_paged_attention(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        slot_mapping.data_ptr(),
        cu_seqlens.data_ptr(),
        seq_lens.data_ptr(),
        block_table.data_ptr(),
        out.data_ptr(),
        (ctypes.c_int64 * 12)(*strides),
        (ctypes.c_int64 * 14)(*sizes),
        given.scalars,
        given.slopes,
        given.sinks,
        given.relative,
        cpu_library.dtype_code(q),
        cpu_library.dtype_code(k_cache),
        cpu_library.thread_count(),
        ctypes.byref(where),
    )
    if fault:
        raise InvalidInput(
            f"detcompile::paged_attention: {_FAULTS[fault].format(where=where.value)} ({num_blocks} blocks of "
            f"{block_size}, T = {T}). Build the step's metadata as step.StepInputs describes it."
        )
    return out


def dense_attention_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    sliding_window: int,
    kv_chunk: int,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    attention_chunk: int = 0,
    relative_bias: Tensor | None = None,
    *,
    isa: str | None = None,
) -> Tensor:
    """q [B, Hq, T, D], k [B, Hkv, T, D], v [B, Hkv, T, Dv] -> [B, Hq, T, Dv], q.dtype; token t sits at position t.

    Raises:
        InvalidInput: tensors that do not fit together.
        NumericsError: kv_chunk is not a multiple of 64.
    """
    _check_heads("dense_attention", q, k, v, kv_chunk, 4)
    Visible(sliding_window, attention_chunk).check("detcompile::dense_attention")
    scores = Scores(scale, softcap, sinks, alibi_slopes, relative_bias)
    scores.check("detcompile::dense_attention", q, q.shape[1])
    B, Hq, T, D = q.shape
    Hkv, Dv = v.shape[1], v.shape[3]
    if k.shape[2] != T or k.shape[0] != B:
        raise InvalidInput(
            f"detcompile::dense_attention: q {tuple(q.shape)} and k {tuple(k.shape)} must agree in batch and tokens. "
            "Attend with a cache through paged_attention."
        )
    out = torch.empty((B, Hq, T, Dv), dtype=q.dtype)
    q, k, v = _unit_last_stride(q), _unit_last_stride(k), _unit_last_stride(v)
    given = _CpuScores(scores)
    cpu_library.library(isa).detcompile_dense_attention(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        out.data_ptr(),
        (ctypes.c_int64 * 9)(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]),
        B,
        T,
        Hq,
        Hkv,
        D,
        Dv,
        sliding_window,
        attention_chunk,
        kv_chunk,
        given.scalars,
        given.slopes,
        given.sinks,
        given.relative,
        given.extent,
        cpu_library.dtype_code(q),
        cpu_library.thread_count(),
    )
    return out


_LIBRARY.impl("paged_attention", paged_attention_cpu, "CPU")
_LIBRARY.impl("paged_attention", paged_attention_cuda, "CUDA")
_LIBRARY.impl("dense_attention", dense_attention_cpu, "CPU")
_LIBRARY.impl("dense_attention", dense_attention_cuda, "CUDA")


@torch.library.register_fake("detcompile::paged_attention", lib=_LIBRARY)
def _(q, k, v, *rest):
    return q.new_empty((q.shape[0], q.shape[1], v.shape[2]))


@torch.library.register_fake("detcompile::dense_attention", lib=_LIBRARY)
def _(q, k, v, *rest):
    return q.new_empty((q.shape[0], q.shape[1], q.shape[2], v.shape[3]))


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    attention_chunk: int = 0,
    relative_bias: Tensor | None = None,
) -> Tensor:
    """The dense op's value in float64, unrounded: [B, Hq, T, Dv]."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.double().repeat_interleave(groups, 1), v.double().repeat_interleave(groups, 1)
    position, key = torch.arange(q.shape[2], device=q.device)[:, None], torch.arange(k.shape[2], device=q.device)
    distance = position - key
    hidden = (distance < 0) | ((distance >= sliding_window) if sliding_window else False)
    if attention_chunk:
        hidden = hidden | (position // attention_chunk != key // attention_chunk)
    scores = q.double() @ k.transpose(-1, -2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.double()[:, None, None] * distance
    if relative_bias is not None:
        extent = relative_bias.shape[-1]
        found = relative_bias.double().gather(-1, distance.clamp(0, extent - 1).expand_as(scores))
        scores = scores + found.masked_fill(distance >= extent, 0.0)
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(*scores.shape[:3], 1)], -1)
    return torch.softmax(scores, -1)[..., : k.shape[2]] @ v


class _CpuScores:
    """The fields of struct Scores of attention_scores.h; holds the memory that its addresses point to."""

    def __init__(self, scores: Scores) -> None:
        bias = scores.relative_bias
        plain = scores.softcap == 0 and scores.alibi_slopes is None and bias is None
        unit = _LOG2_E if plain else 1.0
        self.scalars = (ctypes.c_float * 3)(scores.inner * unit, scores.softcap, 1.0 if plain else _LOG2_E)
        self._slopes = None if scores.alibi_slopes is None else scores.alibi_slopes.float().contiguous()
        self._sinks = None if scores.sinks is None else (scores.sinks.double() * unit).float().contiguous()
        self._relative = None if bias is None else bias.float().contiguous()
        self.extent = 0 if bias is None else bias.shape[-1]
        self.slopes, self.sinks, self.relative = map(_address, (self._slopes, self._sinks, self._relative))


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def holds_copies(slot_mapping: Tensor, T: int) -> bool:
    """Whether a slot mapping has one or more places for each of T tokens."""
    count = slot_mapping.numel()
    return slot_mapping.dim() == 1 and (count == T or (T > 0 and count > 0 and count % T == 0))


def _unit_last_stride(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _check_heads(op: str, q: Tensor, k: Tensor, v: Tensor, kv_chunk: int, dims: int) -> None:
    if not q.dim() == k.dim() == v.dim() == dims:
        raise InvalidInput(f"detcompile::{op}: q, k and v have {q.dim()}, {k.dim()}, {v.dim()} dims; give them {dims}.")
    fits = k.shape[:-1] == v.shape[:-1] and q.shape[-1] == k.shape[-1] and q.shape[0] == k.shape[0]
    if not fits or q.shape[1] % k.shape[1]:
        raise InvalidInput(
            f"detcompile::{op}: q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit: k and v need "
            "the same tokens and heads, q and k the same head dim, and the key heads must divide the query heads."
        )
    if not q.dtype == k.dtype == v.dtype:
        raise InvalidInput(f"detcompile::{op}: q, k and v are {q.dtype}, {k.dtype}, {v.dtype}. Convert them to one.")
    if kv_chunk < KV_BLOCK or kv_chunk % KV_BLOCK:
        raise NumericsError(f"detcompile::{op}: kv_chunk = {kv_chunk} must be a multiple of {KV_BLOCK}; use 512.")


def _check_caches(k_cache: Tensor, v_cache: Tensor, k_shape: tuple[int, ...], v_shape: tuple[int, ...]) -> None:
    if k_cache.shape != k_shape or v_cache.shape != v_shape or k_cache.dtype != v_cache.dtype:
        raise InvalidInput(
            f"detcompile::paged_attention: caches {tuple(k_cache.shape)} {k_cache.dtype} and {tuple(v_cache.shape)} "
            f"{v_cache.dtype} must be {k_shape} and {v_shape}, of one dtype. Allocate them for this layer's heads."
        )
    if k_cache.stride(3) != 1 or v_cache.stride(3) != 1:
        raise InvalidInput("detcompile::paged_attention: the caches need a unit last stride. Make them contiguous.")


def _check_metadata(slot_mapping: Tensor, cu_seqlens: Tensor, seq_lens: Tensor, block_table: Tensor, T: int) -> None:
    S = block_table.shape[0]
    slots = tuple(slot_mapping.shape) if holds_copies(slot_mapping, T) else (T,)
    for name, tensor, dtype, shape in (
        ("slot_mapping", slot_mapping, torch.int64, slots),
        ("cu_seqlens", cu_seqlens, torch.int32, (S + 1,)),
        ("seq_lens", seq_lens, torch.int32, (S,)),
        ("block_table", block_table, torch.int32, tuple(block_table.shape)),
    ):
        if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise InvalidInput(
                f"detcompile::paged_attention: {name} must be contiguous {dtype} {shape}, not {tensor.dtype} "
                f"{tuple(tensor.shape)}. Build the step's metadata as step.StepInputs describes it."
            )
