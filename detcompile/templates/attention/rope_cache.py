"""rope_cache norms and rotates q and k, and writes k and v into the caches; cached_attention attends from the caches.

Legend: T tokens, Hq Hkv heads, D Dv head dims, E rotated features (E <= D, even).

    n      = rms_norm(x) of each head of q and k, or x without a norm (arithmetic as in rows/norms.py)
    out    = round(round(n * cos) + round(half * sin)) on the first E features, n on the others
    half   = (-n[E/2 : E], n[: E/2])

Each round is to x.dtype, as in the separate operations of a graph, so the bits are the same. The two operations
together equal paged_attention; only the caches are written between them.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.step import PADDING_SLOT
from detcompile.templates.attention.gpu import cached_attention_cuda
from detcompile.templates.attention.op import KEYS, check_slots, paged_attention_cpu
from detcompile.templates.attention.operands import Caches, HeadNorm, StepMetadata
from detcompile.templates.attention.rope_cache_gpu import rope_cache_cuda
from detcompile.templates.attention.scores import RULE, AttentionRule, rule_operands
from detcompile.templates.registration import define
from detcompile.templates.rows.norms import rms_norm_cpu


def rope_cache_cpu(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, norm: HeadNorm, caches: Caches, slot_mapping: Tensor
) -> Tensor:
    """Norm and rotate q and k, and write k and v into the caches at slot_mapping [C T]; return q, rotated.

    q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv], cos and sin [T, E]. Nothing is written to negative slots.

    Raises:
        InvalidInput: E does not fit the heads, or a slot is outside the caches; nothing is written.
    """
    _check(q, cos, caches, slot_mapping)
    heads = []
    for x, weight in ((q, norm.q_weight), (k, norm.k_weight)):
        n = x if norm.eps is None else rms_norm_cpu(x, weight, norm.eps, norm.round_before_weight)
        heads.append(_rotated(n, cos[:, None], sin[:, None]))
    (kept,) = torch.where(slot_mapping != PADDING_SLOT)
    slots, tokens = slot_mapping[kept], kept % max(1, len(q))
    for cache, rows in ((caches.k, heads[1]), (caches.v, v)):
        cache[slots // cache.shape[1], slots % cache.shape[1]] = rows[tokens].to(cache.dtype)
    return heads[0].contiguous()


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    E = cos.shape[-1]
    turned, rest = x[..., :E], x[..., E:]
    half = torch.cat([-turned[..., E // 2 :], turned[..., : E // 2]], -1)
    out = turned * cos + half * sin
    return out if x.shape[-1] == E else torch.cat([out, rest], -1)


def cached_attention_cpu(q: Tensor, caches: Caches, step: StepMetadata, rule: AttentionRule) -> Tensor:
    """Attend from the caches, which already hold the step's keys and values."""
    k, v = (q.new_empty((q.shape[0], *cache.shape[2:])) for cache in caches)  # unused: all slots are padding
    nowhere = torch.full((q.shape[0],), PADDING_SLOT, dtype=torch.int64, device="cpu")
    return paged_attention_cpu(q, k, v, caches, nowhere, step, rule)


def _flat_rope_cache(write: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a function that takes records as the operation, whose arguments are flat."""
    return lambda q, k, v, cos, sin, q_weight, k_weight, eps, round_before_weight, k_cache, v_cache, slots: write(
        q, k, v, cos, sin, HeadNorm(q_weight, k_weight, eps, round_before_weight), Caches(k_cache, v_cache), slots
    )


def _flat_cached(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda q, k_cache, v_cache, cu_seqlens, seq_lens, block_table, *rule: attend(
        q, Caches(k_cache, v_cache), StepMetadata(cu_seqlens, seq_lens, block_table), AttentionRule(*rule)
    )


define(
    "rope_cache(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor? q_weight, Tensor? k_weight, float? eps, "
    "bool round_before_weight, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping) -> Tensor",
    {
        "q": "float T Hq D",
        "k": "q T Hkv D",
        "v": "q T Hkv Dv",
        "cos": "q T E",
        "sin": "q T E",
        "q_weight": "float D",
        "k_weight": "float D",
        "k_cache": "unit float Blocks Size Hkv D",
        "v_cache": "unit k_cache Blocks Size Hkv Dv",
        "slot_mapping": "contiguous int64 Places",
    },
    cpu=_flat_rope_cache(rope_cache_cpu),
    cuda=_flat_rope_cache(rope_cache_cuda),
    fake=lambda q, *rest: q.new_empty(q.shape),
)
define(
    "cached_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor cu_seqlens, Tensor seq_lens, "
    f"Tensor block_table, {RULE}) -> Tensor",
    {"q": "float T Hq>0 D"} | KEYS | rule_operands("T Hq"),
    cpu=_flat_cached(cached_attention_cpu),
    cuda=_flat_cached(cached_attention_cuda),
    fake=lambda q, k_cache, v_cache, *rest: q.new_empty((q.shape[0], q.shape[1], v_cache.shape[3])),
)


def _check(q: Tensor, cos: Tensor, caches: Caches, slots: Tensor) -> None:
    check_slots("rope_cache", slots, len(q))
    E = cos.shape[-1]
    if E % 2 or q.shape[2] < E:
        raise InvalidInput(
            f"detcompile::rope_cache: cannot rotate {E} features of a head of {q.shape[2]}: cos and sin must have an"
            " even number of features, at most the head's."
        )
    num_slots = caches.k.shape[0] * caches.k.shape[1]
    if len(slots) and not PADDING_SLOT <= int(slots.min()) <= int(slots.max()) < num_slots:
        raise InvalidInput(
            f"detcompile::rope_cache: slot_mapping holds {int(slots.min())} to {int(slots.max())}; the caches have "
            f"slots 0 to {num_slots - 1}, and {PADDING_SLOT} means no slot. Build it as step.StepInputs describes."
        )
    written = slots[slots != PADDING_SLOT]
    if len(written.unique()) < len(written):
        raise InvalidInput("detcompile::rope_cache: slot_mapping repeats a slot. Give each token its own slot.")
