"""Paged and dense causal attention on the GPU, in one KV order and with the same bits.

Legend: T tokens, S sequences, H query heads, D and DV head dims. The grid follows from T, S and the width of the block
table alone, so that a launch can be captured in a CUDA graph; which sequence a tile belongs to is found on the device.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.templates.attention import hopper as attention_hopper
from detcompile.templates.attention import hopper_decode as attention_turned
from detcompile.templates.attention import hopper_decode_tile as attention_turned_tile
from detcompile.templates.attention import hopper_merge as attention_merge
from detcompile.templates.attention import hopper_tile as attention_hopper_tile
from detcompile.templates.attention import kernels as attention_kernels
from detcompile.templates.attention import scores as attention_scores
from detcompile.templates.attention.schedules import (
    AttentionProblem,
    AttentionSchedule,
    attention_candidates,
    reference_attention_schedule,
)
from detcompile.templates.attention.scores import Scores, Visible
from detcompile.templates.device import barrier as gluon_barrier
from detcompile.templates.device import dependent_launch
from detcompile.templates.device.dependent_launch import launch_options
from detcompile.templates.device.gate import Gate, bytes_of, heavy_tailed, multiprocessors
from detcompile.templates.device.integers import cdiv, next_power_of_2
from detcompile.templates.device.launcher import launcher

__all__ = [
    "ATTENTION",
    "AttentionProblem",
    "AttentionSchedule",
    "attention_candidates",
    "dense_attention_cuda",
    "paged_attention_cuda",
    "reference_attention_schedule",
    "require_32_bits",
]

_AHEAD = 16  # partials of chunks that are read before the first is merged
_MOST_PARTIAL_BYTES = 1 << 28  # of fp32 chunk outputs


def paged_attention_cuda(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
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
    schedule: AttentionSchedule | None = None,
) -> Tensor:
    """Writes k and v into the caches, if they are given, then attends from the caches.

    Args:
        q, k, v: [T, H, D], [T, KV heads, D], [T, KV heads, DV].
        k_cache, v_cache: [pages, page, KV heads, D or DV], changed in place.
        slot_mapping, cu_seqlens, seq_lens, block_table: see `step.StepInputs`.
        scale, softcap, sinks, alibi_slopes, relative_bias [T, H, E]: see `attention_scores.Scores`.
        sliding_window, attention_chunk: tokens; 0 for none. See templates/attention/op.py.
        schedule: forces one (tests); None takes one that passed the gate.

    Returns:
        [T, H, DV] in q.dtype; zeros for rows past cu_seqlens[S].
    """
    scores = Scores(scale, softcap, sinks, alibi_slopes, relative_bias)
    seen = Visible(sliding_window, attention_chunk)
    _check(q, k_cache, v_cache, scores, seen, kv_chunk)
    T, H, _ = q.shape
    out = q.new_empty((T, H, v_cache.shape[-1]))
    if T == 0:
        return out
    if k is not None and v is not None:
        _write_kv(k, v, k_cache, v_cache, slot_mapping)
    S, page = seq_lens.shape[0], k_cache.shape[1]
    chunks = cdiv(block_table.shape[1] * page, kv_chunk)
    problem = _problem(q, k_cache, v_cache, page, kv_chunk, seen, scores, few=T <= 2 * S)
    problem = _for_step(problem, q.device, T, S, block_table.shape[1] * page)
    _attend(
        schedule or ATTENTION.schedule(problem, q.device), problem, _unit_rows(q)[None], k_cache, v_cache, out[None],
        (cu_seqlens, seq_lens, block_table), T, S, chunks, scores, seen,
    )  # fmt: skip
    return out


def dense_attention_cuda(
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
    schedule: AttentionSchedule | None = None,
) -> Tensor:
    """q [B, H, T, D], k and v [B, KV heads, T, D or DV] -> [B, H, T, DV], with the bits of the paged op."""
    q, k, v = (_unit_rows(t).transpose(1, 2) for t in (q, k, v))  # [B, T, heads, D]
    bias = None if relative_bias is None else relative_bias.transpose(1, 2)
    scores, seen = Scores(scale, softcap, sinks, alibi_slopes, bias), Visible(sliding_window, attention_chunk)
    _check(q, k, v, scores, seen, kv_chunk)
    B, T, H, D = q.shape
    require_32_bits(T, H, max(D, v.shape[-1]))
    out = q.new_empty((B, H, T, v.shape[-1]))
    if out.numel():
        problem = _problem(q[0], k, v, 0, kv_chunk, seen, scores, few=T < 16)
        schedule = schedule or ATTENTION.schedule(problem, q.device)
        _attend(schedule, problem, q, k, v, out.transpose(1, 2), None, T, B, 1, scores, seen)
    return out


def require_32_bits(T: int, H: int, D: int) -> None:
    """The kernels reach the rows of a dense sequence by offsets of 32 bits.

    Raises:
        InvalidInput: they would run over.
    """
    if T * H * D >= 2**31:
        raise InvalidInput(
            f"dense attention on the GPU: {T} tokens of {H} heads of {D} values are past 2^31 elements: take fewer"
            " tokens, or a paged cache"
        )


def probe_bits(problem: AttentionProblem, device: torch.device) -> Callable[[AttentionSchedule], bytes]:
    """The gate's probe: two sequences over three chunks, one decoding, one in the middle of its prefill, scattered
    pages, and NaN in every slot that holds no key."""
    dtype = getattr(torch, problem.dtype)
    generator = torch.Generator(device).manual_seed(21)

    def draw(*shape: int) -> Tensor:
        return heavy_tailed(*shape, generator=generator, spread=0.5).to(dtype)

    lens, page = [2 * problem.chunk + 37, problem.chunk + 131], problem.page or 16
    new = [1, 70] if problem.page else [max(lens)] * 2
    pages = cdiv(max(lens), page)
    q, k, v = (
        draw(sum(new), heads, width)
        for heads, width in ((problem.heads, problem.d), (problem.kv_heads, problem.d), (problem.kv_heads, problem.dv))
    )
    tokens = problem.chunk + 17 if problem.windowed else 0
    window, attention_chunk = (0, tokens) if problem.chunked else (tokens, 0)
    scale, cap, sinks, slopes = _probe_scores(problem, device)
    bias = draw(sum(new), problem.heads, problem.chunk + 5) if problem.relative else None
    rest = (cap, sinks, slopes, attention_chunk)

    def dense(schedule: AttentionSchedule) -> Tensor:
        q_BHTD, k_BHTD, v_BHTD = (t.unflatten(0, (2, -1)).transpose(1, 2) for t in (q, k, v))
        bias_BHTE = None if bias is None else bias.unflatten(0, (2, -1)).transpose(1, 2)
        order = (scale, window, problem.chunk, *rest, bias_BHTE)
        return dense_attention_cuda(q_BHTD, k_BHTD, v_BHTD, *order, schedule=schedule)

    table = torch.randperm(2 * pages, generator=torch.Generator().manual_seed(1)).view(2, pages)
    slots = [table[s, p // page].item() * page + p % page for s in range(2) for p in range(lens[s] - new[s], lens[s])]
    past = [draw(2, max(lens), problem.kv_heads, width) for width in (problem.d, problem.dv)]
    cu, seq_lens, table_i, slot_mapping = (
        torch.tensor(values, dtype=kind, device=device)
        for values, kind in (
            ([0, new[0], sum(new)], torch.int32),
            (lens, torch.int32),
            (table.tolist(), torch.int32),
            (slots, torch.int64),
        )
    )

    def paged(schedule: AttentionSchedule) -> Tensor:
        caches = []
        for old in past:
            cache = torch.full((2 * pages, page, *old.shape[2:]), math.nan, dtype=dtype, device=device)
            for s in range(2):
                filled = cache[table[s].to(device)].flatten(0, 1)
                filled[: lens[s]] = old[s, : lens[s]]
                cache[table[s].to(device)] = filled.unflatten(0, (pages, page))
            caches.append(cache)
        return paged_attention_cuda(
            q, k, v, caches[0], caches[1], slot_mapping, cu, seq_lens, table_i, scale, window, problem.chunk, *rest,
            bias, schedule=schedule,
        )  # fmt: skip

    def bits(schedule: AttentionSchedule) -> bytes:
        out = paged(schedule) if problem.page else dense(schedule)
        return bytes_of(out)

    return bits


def _probe_scores(problem: AttentionProblem, device: torch.device) -> tuple[float, float, Tensor | None, Tensor | None]:
    """scale, softcap, sinks and alibi_slopes that make a problem of this kind."""
    scale = problem.d**-0.5
    return (
        -scale if problem.scaled and not (problem.capped or problem.alibi or problem.relative) else scale,
        2.5 if problem.capped else 0.0,
        torch.linspace(-3, 3, problem.heads, device=device) if problem.sinks else None,
        2.0 ** -torch.linspace(1, 8, problem.heads, device=device) if problem.alibi else None,
    )


_HOPPER = (attention_hopper, attention_hopper_tile, attention_turned, attention_turned_tile)
_MODULES = (attention_kernels, attention_merge, *_HOPPER, attention_scores, dependent_launch, gluon_barrier)
ATTENTION = Gate(
    family="attention",
    sources=(*(module.__file__ for module in _MODULES), __file__),
    reference=reference_attention_schedule,
    candidates=attention_candidates,
    probe=probe_bits,
)


def _problem(
    q: Tensor, k: Tensor, v: Tensor, page: int, chunk: int, seen: Visible, scores: Scores, *, few: bool
) -> AttentionProblem:
    return AttentionProblem(
        dtype=str(q.dtype).removeprefix("torch."), heads=q.shape[1], kv_heads=k.shape[2], d=q.shape[2], dv=v.shape[3],
        page=page, chunk=chunk, windowed=seen.tokens > 0, chunked=seen.attention_chunk > 0, few=few, split=False,
        scaled=scores.scaled, hopper=attention_hopper.supports(k, v, page > 0),
        capped=scores.softcap > 0, alibi=scores.alibi_slopes is not None, sinks=scores.sinks is not None,
        relative=scores.relative_bias is not None,
    )  # fmt: skip


@functools.lru_cache(4096)  # a prompt's launches wait for the host
def _for_step(problem: AttentionProblem, device: torch.device, T: int, S: int, keys: int) -> AttentionProblem:
    """The problem of T tokens of S sequences whose tables have room for so many keys each.

    Chunks get programs of their own where tiles alone leave multiprocessors idle. By attention_turned, and in pages
    that it fetches in whole blocks, two chunks one after the other take little longer than side by side: one tile a
    multiprocessor is enough then.
    """
    chunks, group = cdiv(keys, problem.chunk), problem.heads // problem.kv_heads
    tiles = _tiles(T, S, 16 if problem.few else 64, group) * problem.kv_heads
    enough = multiprocessors(device) * (1 if problem.turned and problem.page >= 64 and chunks == 2 else 8)
    partial_bytes = 4 * T * problem.heads * chunks * problem.dv
    split = chunks > 1 and tiles < enough and partial_bytes <= _MOST_PARTIAL_BYTES
    programs = T * problem.kv_heads * cdiv(group, attention_turned.COLUMNS) * (chunks if split else 1)
    if not problem.turned:
        stages = 0
    elif programs <= multiprocessors(device) // (2 if split else 1):
        stages = 4  # a program may fill its multiprocessor; but a merge's programs find room beside those of a split
    elif programs >= 3 * multiprocessors(device) and (split or keys <= 512):
        stages = 2  # many that are soon done: as many of them side by side as there is room for
    else:
        stages = 3
    return replace(problem, split=split, stages=stages)


def _attend(
    schedule: AttentionSchedule,
    problem: AttentionProblem,
    q: Tensor,  # [B, T, H, D]; paged: B = 1
    k: Tensor,  # [pages or B, page or T, KV heads, D]
    v: Tensor,
    out: Tensor,  # [B, T, H, DV]
    metadata: tuple[Tensor, Tensor, Tensor] | None,
    T: int,
    S: int,
    chunks: int,
    scores: Scores,
    seen: Visible,
) -> None:
    group, window = problem.heads // problem.kv_heads, seen.tokens
    heads = min(next_power_of_2(group), attention_hopper.ROWS if schedule.hopper else schedule.block_m)
    cu, lens, table = metadata or (out, out, out)
    if metadata is None:
        tiles = S * cdiv(T, schedule.block_m // heads)
    else:
        tiles = _tiles(T, S, schedule.block_m, group)
    split = schedule.split and chunks > 1 and metadata is not None
    batch, token, head = out.stride()[:3]
    target, stat, strides = out, out, (batch, token, head)
    if split:
        target = q.new_empty((T, problem.heads, chunks, problem.dv), dtype=torch.float32)
        stat = q.new_empty((T, problem.heads, chunks, 2), dtype=torch.float32)
    padded = {"DP": _padded(problem.d), "DVP": _padded(problem.dv)}
    of_heads = (scores.sinks, scores.alibi_slopes, scores.relative_bias)
    sinks, slopes, bias = (out if t is None else t.contiguous() for t in of_heads)
    extent = 0 if scores.relative_bias is None else bias.shape[-1]
    shared = {
        "DV": problem.dv, "DVP": padded["DVP"], "CHUNK": problem.chunk, "WINDOWED": problem.windowed,
        "CHUNKED": problem.chunked, "SCALED": problem.scaled, "SINKS": problem.sinks, **launch_options(q.device),
    }  # fmt: skip
    if schedule.hopper:
        numbers = {"c": scores.c, "window": window, "T": T, "S": S, "tiles": tiles, "H": problem.heads}
        numbers["chunks"] = chunks
        constants = {"G": group, "HEADS": heads, "D": problem.d, "PAGE": problem.page, "CHUNK": problem.chunk}
        constants |= {"WINDOWED": problem.windowed, "SPLIT": split, "STAGES": schedule.stages}
        constants |= {"CONSUMERS": schedule.block_m // attention_hopper.ROWS}
        attention_hopper.launch(q, k, v, target, stat, (cu, lens, table), numbers, strides, constants)
    elif schedule.turned:
        assert metadata is not None and problem.hopper, f"{schedule} reads pages through descriptors"
        numbers = {"c": scores.c, "window": window, "S": S, "H": problem.heads, "chunks": chunks}
        constants = {"G": group, "D": problem.d, "PAGE": problem.page, "CHUNK": problem.chunk}
        constants |= {"WINDOWED": problem.windowed, "SPLIT": split, "BM": schedule.block_m, "STAGES": schedule.stages}
        attention_turned.launch(q[0], k, v, target, stat, (cu, lens, table), numbers, strides[1:], constants)
    else:
        grid = (tiles, problem.kv_heads * cdiv(group, heads), chunks if split else 1)
        launcher(attention_kernels.attention_kernel)[grid](
            q, k, v, target, stat, cu, lens, table, sinks, slopes, bias, scores.c, scores.inner, scores.softcap, window,
            extent, T, S, problem.heads, chunks,
            q.stride(0) if metadata is None else 0, *q.stride()[1:3], *k.stride()[:3], *v.stride()[:3],
            strides[0] if metadata is None else 0, *strides[1:], table.stride(0),
            G=group, HEADS=heads, D=problem.d, DP=padded["DP"], PAGE=problem.page, SPLIT=split, BM=schedule.block_m,
            CAPPED=problem.capped, ALIBI=problem.alibi, RELATIVE=problem.relative,
            num_warps=schedule.warps, num_stages=schedule.stages, enable_fp_fusion=False, **shared,
        )  # fmt: skip
    if split and schedule.turned:
        attention_merge.launch(target, stat, out[0], scores.c)
    elif split:
        launcher(attention_kernels.merge_kernel)[(T, problem.heads)](
            target, stat, out, cu, lens, sinks, scores.c, scores.inner, window, S, chunks, *strides[1:],
            AHEAD=min(_AHEAD, next_power_of_2(chunks)), num_warps=1, enable_fp_fusion=False, **shared,
        )  # fmt: skip


def _write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    k, v = _unit_rows(k), _unit_rows(v)
    T, heads, D = k.shape
    DV = v.shape[-1]
    count = len(slot_mapping)
    launcher(attention_kernels.write_kv_kernel)[(count,)](
        k, v, k_cache, v_cache, slot_mapping, T, *k.stride()[:2], *v.stride()[:2], *k_cache.stride()[:3],
        *v_cache.stride()[:3], COPIED=count > T, HEADS=heads, HEADS_P=next_power_of_2(heads), D=D, DV=DV,
        DP=_padded(D), DVP=_padded(DV), PAGE=k_cache.shape[1], num_warps=4, **launch_options(k.device),
    )  # fmt: skip


def _tiles(T: int, S: int, block_m: int, group: int) -> int:
    """Upper bound of the tiles of S sequences and the padding, T tokens together."""
    block_q = block_m // min(next_power_of_2(group), block_m)
    return T // block_q + S + 1


def _check(q: Tensor, k: Tensor, v: Tensor, scores: Scores, seen: Visible, kv_chunk: int) -> None:
    where = "attention on the GPU"
    seen.check(where)
    scores.check(where, q, q.shape[-2])
    if q.dtype != k.dtype or k.dtype != v.dtype:
        raise InvalidInput(f"{where}: q is {q.dtype}, keys {k.dtype}, values {v.dtype}; use one dtype for all")
    if q.shape[-2] % k.shape[2]:
        raise InvalidInput(f"{where}: {q.shape[-2]} query heads do not share {k.shape[2]} KV heads evenly")
    if kv_chunk % attention_kernels.KEYS.value:
        raise InvalidInput(f"{where}: kv_chunk={kv_chunk} must be a multiple of {attention_kernels.KEYS.value}")


def _unit_rows(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 else t.contiguous()


def _padded(width: int) -> int:
    return max(16, next_power_of_2(width))
