"""rope_cache: norms and rotates q and k, and writes k and v into the caches. cached_attention: attends from them.

Legend: T tokens, Hq Hkv heads, D Dv head dims, E rotated features (E <= D, even).

    n      = rms_norm(x) of each head of q and k, or x where there is no norm (rows/norms.py has its arithmetic)
    out    = round(round(n * cos) + round(half * sin)) on the first E features, n on the others
    half   = (-n[E/2 : E], n[: E/2])

Each round is to x.dtype, as the separate operations of a graph would: the bits are theirs. The two operations together
are paged_attention; between them nothing but the caches has to be written.
"""

import torch
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.step import PADDING_SLOT
from detcompile.templates.attention.gpu import paged_attention_cuda
from detcompile.templates.attention.op import holds_copies, paged_attention_cpu
from detcompile.templates.attention.rope_cache_gpu import rope_cache_cuda
from detcompile.templates.rows.norms import rms_norm_cpu

__all__ = ["cached_attention_cpu", "rope_cache_cpu"]

_LIBRARY = torch.library.Library("detcompile", "FRAGMENT")
_LIBRARY.define(
    "rope_cache(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor? q_weight, Tensor? k_weight, float? eps, "
    "bool round_before_weight, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define(
    "cached_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor cu_seqlens, Tensor seq_lens, "
    "Tensor block_table, float scale, int sliding_window, int kv_chunk, float softcap=0.0, Tensor? sinks=None, "
    "Tensor? alibi_slopes=None, int attention_chunk=0, Tensor? relative_bias=None) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def rope_cache_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float | None,
    round_before_weight: bool,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    """q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv], cos and sin [T, E] -> q rotated; k and v go to slot_mapping [C T].

    eps None: no norm. A negative slot takes nothing.

    Raises:
        InvalidInput: tensors that do not fit together, or a slot that the caches do not have; nothing is written.
    """
    _check(q, k, v, cos, sin, k_cache, v_cache, slot_mapping)
    heads = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        n = x if eps is None else rms_norm_cpu(x, weight, eps, round_before_weight)
        heads.append(_rotated(n, cos[:, None], sin[:, None]))
    (kept,) = torch.where(slot_mapping != PADDING_SLOT)
    slots, tokens = slot_mapping[kept], kept % max(1, len(q))
    for cache, rows in ((k_cache, heads[1]), (v_cache, v)):
        cache[slots // cache.shape[1], slots % cache.shape[1]] = rows[tokens].to(cache.dtype)
    return heads[0].contiguous()


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    E = cos.shape[-1]
    turned, rest = x[..., :E], x[..., E:]
    half = torch.cat([-turned[..., E // 2 :], turned[..., : E // 2]], -1)
    out = turned * cos + half * sin
    return out if x.shape[-1] == E else torch.cat([out, rest], -1)


def cached_attention_cpu(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
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
) -> Tensor:
    """paged_attention_cpu where the step's keys and values are in the caches already."""
    k, v = (q.new_empty((q.shape[0], *cache.shape[2:])) for cache in (k_cache, v_cache))  # padding: nobody reads them
    nowhere = torch.full((q.shape[0],), PADDING_SLOT, dtype=torch.int64)
    order = (scale, sliding_window, kv_chunk, softcap, sinks, alibi_slopes, attention_chunk, relative_bias)
    return paged_attention_cpu(q, k, v, k_cache, v_cache, nowhere, cu_seqlens, seq_lens, block_table, *order)


def cached_attention_cuda(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
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
) -> Tensor:
    """paged_attention_cuda where the step's keys and values are in the caches already."""
    order = (scale, sliding_window, kv_chunk, softcap, sinks, alibi_slopes, attention_chunk, relative_bias)
    return paged_attention_cuda(q, None, None, k_cache, v_cache, cu_seqlens, cu_seqlens, seq_lens, block_table, *order)


_LIBRARY.impl("rope_cache", rope_cache_cpu, "CPU")
_LIBRARY.impl("rope_cache", rope_cache_cuda, "CUDA")
_LIBRARY.impl("cached_attention", cached_attention_cpu, "CPU")
_LIBRARY.impl("cached_attention", cached_attention_cuda, "CUDA")


@torch.library.register_fake("detcompile::rope_cache", lib=_LIBRARY)
def _(q, k, v, cos, sin, q_weight, k_weight, eps, round_before_weight, k_cache, v_cache, slot_mapping):
    return q.new_empty(q.shape)


@torch.library.register_fake("detcompile::cached_attention", lib=_LIBRARY)
def _(
    q, k_cache, v_cache, cu_seqlens, seq_lens, block_table, scale, sliding_window, kv_chunk,
    softcap=0.0, sinks=None, alibi_slopes=None, attention_chunk=0, relative_bias=None,
):  # fmt: skip
    return q.new_empty((q.shape[0], q.shape[1], v_cache.shape[3]))


def _check(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor
) -> None:
    T, E = q.shape[0], cos.shape[-1]
    fits = len(k) == len(v) == T and cos.shape == sin.shape == (T, E) and holds_copies(slots, T)
    if not fits or E % 2 or q.shape[2] < E or q.shape[2] != k.shape[2]:
        raise InvalidInput(
            f"detcompile::rope_cache: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, cos "
            f"{tuple(cos.shape)} and slot_mapping {tuple(slots.shape)} do not fit: one row a token, "
            "its slots in T, 2 T, … places, an even number of rotated features."
        )
    if k_cache.shape[2:] != k.shape[1:] or v_cache.shape[2:] != v.shape[1:] or k_cache.shape[:2] != v_cache.shape[:2]:
        raise InvalidInput(
            f"detcompile::rope_cache: caches {tuple(k_cache.shape)} and {tuple(v_cache.shape)} must hold rows of "
            f"{tuple(k.shape[1:])} and {tuple(v.shape[1:])}. Allocate them for this layer's heads."
        )
    if T and not PADDING_SLOT <= int(slots.min()) <= int(slots.max()) < k_cache.shape[0] * k_cache.shape[1]:
        raise InvalidInput(
            f"detcompile::rope_cache: slot_mapping holds {int(slots.min())} to {int(slots.max())}; the caches have "
            f"slots 0 to {k_cache.shape[0] * k_cache.shape[1] - 1}, and {PADDING_SLOT} is none. Build it as "
            "step.StepInputs describes."
        )
