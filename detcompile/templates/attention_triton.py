"""Paged and dense causal attention on the GPU, in one KV order and with the same bits.

Legend: T tokens, S sequences, H query heads, D and DV head dims. The grid follows from T, S and the width of the block
table alone, so that a launch can be captured in a CUDA graph; which sequence a tile belongs to is found on the device.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.templates import attention_kernels
from detcompile.templates.tuning import Tuner, capturing, template_tuner

__all__ = [
    "AttentionProblem",
    "AttentionSchedule",
    "attention_candidates",
    "dense_attention_cuda",
    "paged_attention_cuda",
    "reference_attention_schedule",
    "tuner",
]

_LOG2_E = math.log2(math.e)
_MOST_PARTIAL_BYTES = 1 << 28  # of fp32 chunk outputs


@dataclass(frozen=True, slots=True)
class AttentionSchedule:
    """block_m: rows (tokens x heads of one KV head) of a tile; split: one program a chunk, then a merge."""

    block_m: int
    warps: int
    stages: int
    split: bool = False

    def __str__(self) -> str:
        return f"attention-{self.block_m}-w{self.warps}s{self.stages}{'-split' if self.split else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionProblem:
    """All that a choice of schedule may depend on. page 0 means dense; few: mostly one token a sequence."""

    dtype: str
    heads: int
    kv_heads: int
    d: int
    dv: int
    page: int
    chunk: int
    windowed: bool
    few: bool
    split: bool

    def __str__(self) -> str:
        kind = f"page={self.page}" if self.page else "dense"
        regime = ("decode" if self.few else "prefill") + ("-split" if self.split else "")
        window = " window" if self.windowed else ""
        heads = f"{self.heads}/{self.kv_heads} d={self.d}/{self.dv}"
        return f"{self.dtype} {heads} {kind} KV(chunk={self.chunk}){window} {regime}"


def paged_attention_cuda(
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
    schedule: AttentionSchedule | None = None,
) -> Tensor:
    """Writes k and v into the caches, then attends from the caches.

    Args:
        q, k, v: [T, H, D], [T, KV heads, D], [T, KV heads, DV].
        k_cache, v_cache: [pages, page, KV heads, D or DV], changed in place.
        slot_mapping, cu_seqlens, seq_lens, block_table: see `step.StepInputs`.
        schedule: forces one (tests); None takes one that passed the gate.

    Returns:
        [T, H, DV] in q.dtype; zeros for rows past cu_seqlens[S].
    """
    _check(q, k_cache, v_cache, scale, kv_chunk)
    T, H, _ = q.shape
    out = q.new_empty((T, H, v.shape[-1]))
    if T == 0:
        return out
    _write_kv(k, v, k_cache, v_cache, slot_mapping)
    S, page = seq_lens.shape[0], k_cache.shape[1]
    chunks = triton.cdiv(block_table.shape[1] * page, kv_chunk)
    problem = _problem(q, k_cache, v_cache, page, kv_chunk, sliding_window, few=T <= 2 * S)
    problem = _with_split(problem, q.device, T, S, chunks)
    _attend(
        schedule or _schedule(problem, q.device), problem, _unit_rows(q)[None], k_cache, v_cache, out[None],
        (cu_seqlens, seq_lens, block_table), T, S, chunks, scale, sliding_window,
    )  # fmt: skip
    return out


def dense_attention_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    sliding_window: int,
    kv_chunk: int,
    schedule: AttentionSchedule | None = None,
) -> Tensor:
    """q [B, H, T, D], k and v [B, KV heads, T, D or DV] -> [B, H, T, DV], with the bits of the paged op."""
    q, k, v = (_unit_rows(t).transpose(1, 2) for t in (q, k, v))  # [B, T, heads, D]
    _check(q[0] if len(q) else q.new_empty(q.shape[1:]), k, v, scale, kv_chunk)
    B, T, H, _ = q.shape
    out = q.new_empty((B, H, T, v.shape[-1]))
    if out.numel():
        problem = _problem(q[0], k, v, 0, kv_chunk, sliding_window, few=T < 16)
        schedule = schedule or _schedule(problem, q.device)
        _attend(schedule, problem, q, k, v, out.transpose(1, 2), None, T, B, 1, scale, sliding_window)
    return out


def reference_attention_schedule(problem: AttentionProblem) -> AttentionSchedule:
    """The schedule whose bits the gate asks of all others."""
    return AttentionSchedule(16, 4, 1)


@functools.cache
def attention_candidates(problem: AttentionProblem) -> tuple[AttentionSchedule, ...]:
    """Schedules for this problem, the likely fastest first."""
    if problem.dtype == "float32":
        rows = [(16, 4, 2), (16, 4, 1)] if problem.few else [(32, 4, 2), (32, 8, 1), (16, 4, 2), (16, 4, 1)]
    elif problem.few:
        rows = [(16, 2, 3), (16, 1, 3), (16, 4, 2), (16, 4, 5), (16, 4, 3), (32, 4, 2), (16, 4, 1)]
    else:
        rows = [(64, 4, 2), (128, 8, 3), (128, 8, 2), (64, 4, 3), (128, 4, 2), (32, 4, 2), (64, 4, 1)]
    return tuple(AttentionSchedule(*row, split=problem.split) for row in rows)


def tuner(device: torch.device) -> Tuner:
    """The gate and the decisions of attention schedules on this device."""
    return template_tuner("attention", (attention_kernels.__file__, __file__), device)


def probe_bits(problem: AttentionProblem, device: torch.device) -> Callable[[AttentionSchedule], bytes]:
    """The gate's probe: two sequences over three chunks, one decoding, one in the middle of its prefill, scattered
    pages, and NaN in every slot that holds no key."""
    dtype = getattr(torch, problem.dtype)
    generator = torch.Generator(device).manual_seed(21)

    def draw(*shape: int) -> Tensor:
        normal, spread = (torch.randn(*shape, generator=generator, device=device) for _ in range(2))
        return (normal * torch.exp(0.5 * spread)).to(dtype)

    lens, page = [2 * problem.chunk + 37, problem.chunk + 131], problem.page or 16
    new = [1, 70] if problem.page else [max(lens)] * 2
    pages = triton.cdiv(max(lens), page)
    q, k, v = (
        draw(sum(new), heads, width)
        for heads, width in ((problem.heads, problem.d), (problem.kv_heads, problem.d), (problem.kv_heads, problem.dv))
    )
    window = problem.chunk + 17 if problem.windowed else 0
    scale = problem.d**-0.5

    def dense(schedule: AttentionSchedule) -> Tensor:
        q_BHTD, k_BHTD, v_BHTD = (t.unflatten(0, (2, -1)).transpose(1, 2) for t in (q, k, v))
        return dense_attention_cuda(q_BHTD, k_BHTD, v_BHTD, scale, window, problem.chunk, schedule)

    table = torch.randperm(2 * pages, generator=torch.Generator().manual_seed(1)).view(2, pages)
    slots = [
        table[s, p // page].item() * page + p % page for s in range(2) for p in range(lens[s] - new[s], lens[s])
    ]
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
            q, k, v, caches[0], caches[1], slot_mapping, cu, seq_lens, table_i, scale, window, problem.chunk, schedule
        )

    def bits(schedule: AttentionSchedule) -> bytes:
        out = paged(schedule) if problem.page else dense(schedule)
        return out.cpu().contiguous().view(torch.uint8).numpy().tobytes()

    return bits


def _schedule(problem: AttentionProblem, device: torch.device) -> AttentionSchedule:
    if capturing():
        schedules = {str(s): s for s in (*attention_candidates(problem), reference_attention_schedule(problem))}
        return tuner(device).recall([str(problem)], schedules)
    return _choose(problem, device)


@functools.cache
def _choose(problem: AttentionProblem, device: torch.device) -> AttentionSchedule:
    bits = functools.cache(lambda: probe_bits(problem, device))
    return tuner(device).choose(
        str(problem),
        reference_attention_schedule(problem),
        attention_candidates(problem),
        lambda schedule: bits()(schedule),
    )


def _problem(
    q: Tensor, k: Tensor, v: Tensor, page: int, chunk: int, window: int, *, few: bool
) -> AttentionProblem:
    return AttentionProblem(
        dtype=str(q.dtype).removeprefix("torch."), heads=q.shape[1], kv_heads=k.shape[2], d=q.shape[2], dv=v.shape[3],
        page=page, chunk=chunk, windowed=window > 0, few=few, split=False,
    )  # fmt: skip


def _with_split(problem: AttentionProblem, device: torch.device, T: int, S: int, chunks: int) -> AttentionProblem:
    """Chunks get programs of their own where tiles alone leave multiprocessors idle."""
    rows = _tiles(T, S, 16 if problem.few else 64, problem.heads // problem.kv_heads) * problem.kv_heads
    partial_bytes = 4 * T * problem.heads * chunks * problem.dv
    split = chunks > 1 and rows < 8 * _multiprocessors(device) and partial_bytes <= _MOST_PARTIAL_BYTES
    return replace(problem, split=split)


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
    scale: float,
    window: int,
) -> None:
    group = problem.heads // problem.kv_heads
    heads = min(triton.next_power_of_2(group), schedule.block_m)
    cu, lens, table = metadata or (out, out, out)
    if metadata is None:
        tiles = S * triton.cdiv(T, schedule.block_m // heads)
    else:
        tiles = _tiles(T, S, schedule.block_m, group)
    split = schedule.split and chunks > 1 and metadata is not None
    target, stat, strides = out, out, out.stride()[:3]
    if split:
        target = q.new_empty((T, problem.heads, chunks, problem.dv), dtype=torch.float32)
        stat = q.new_empty((T, problem.heads, chunks, 2), dtype=torch.float32)
    padded = {"DP": _padded(problem.d), "DVP": _padded(problem.dv)}
    shared = {"DV": problem.dv, "DVP": padded["DVP"], "CHUNK": problem.chunk, "WINDOWED": problem.windowed}
    grid = (tiles, problem.kv_heads * triton.cdiv(group, heads), chunks if split else 1)
    attention_kernels.attention_kernel[grid](
        q, k, v, target, stat, cu, lens, table, scale * _LOG2_E, window, T, S, problem.heads, chunks,
        q.stride(0) if metadata is None else 0, *q.stride()[1:3], *k.stride()[:3], *v.stride()[:3],
        strides[0] if metadata is None else 0, *strides[1:], table.stride(0),
        G=group, HEADS=heads, D=problem.d, DP=padded["DP"], PAGE=problem.page, SPLIT=split, BM=schedule.block_m,
        num_warps=schedule.warps, num_stages=schedule.stages, enable_fp_fusion=False, **shared,
    )  # fmt: skip
    if split:
        attention_kernels.merge_kernel[(T, problem.heads)](
            target, stat, out, cu, lens, scale * _LOG2_E, window, S, chunks, *strides[1:],
            num_warps=1, enable_fp_fusion=False, **shared,
        )  # fmt: skip


def _write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    k, v = _unit_rows(k), _unit_rows(v)
    T, heads, D = k.shape
    DV = v.shape[-1]
    attention_kernels.write_kv_kernel[(T,)](
        k, v, k_cache, v_cache, slot_mapping, *k.stride()[:2], *v.stride()[:2], *k_cache.stride()[:3],
        *v_cache.stride()[:3], HEADS=heads, HEADS_P=triton.next_power_of_2(heads), D=D, DV=DV, DP=_padded(D),
        DVP=_padded(DV), PAGE=k_cache.shape[1], num_warps=4,
    )  # fmt: skip


def _tiles(T: int, S: int, block_m: int, group: int) -> int:
    """Upper bound of the tiles of S sequences and the padding, T tokens together."""
    block_q = block_m // min(triton.next_power_of_2(group), block_m)
    return T // block_q + S + 1


def _check(q: Tensor, k: Tensor, v: Tensor, scale: float, kv_chunk: int) -> None:
    where = "attention on the GPU"
    if q.dtype != k.dtype or k.dtype != v.dtype:
        raise InvalidInput(f"{where}: q is {q.dtype}, keys {k.dtype}, values {v.dtype}; use one dtype for all")
    if q.shape[1] % k.shape[2]:
        raise InvalidInput(f"{where}: {q.shape[1]} query heads do not share {k.shape[2]} KV heads evenly")
    if scale <= 0:
        raise InvalidInput(f"{where}: scale={scale} must be positive")
    if kv_chunk % attention_kernels.KEYS.value:
        raise InvalidInput(f"{where}: kv_chunk={kv_chunk} must be a multiple of {attention_kernels.KEYS.value}")


def _unit_rows(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 else t.contiguous()


def _padded(width: int) -> int:
    return max(16, triton.next_power_of_2(width))


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
