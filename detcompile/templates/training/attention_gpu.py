"""Packed attention on the GPU: serving's kernels over a temporary cache, and gradients without atomics.

Legend: T tokens, S sequences, H query heads, D DV head dims. Grids depend only on T and S. Each program looks up its
tile's sequence on the device, so the host never waits.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from detcompile.orders.numerics import KEY_BLOCK, row_order
from detcompile.templates.attention import hopper, hopper_blocks, hopper_tile, scores
from detcompile.templates.attention.gpu import paged_attention_cuda
from detcompile.templates.attention.operands import Caches, StepMetadata, padded, unit_rows
from detcompile.templates.attention.scores import AttentionRule
from detcompile.templates.device.gate import Gate, bytes_of, heavy_tailed
from detcompile.templates.device.launcher import cdiv, launcher
from detcompile.templates.device.primitives import LOG2_E
from detcompile.templates.rows.tiles import ShortTile, row_layout, row_plan
from detcompile.templates.training import attention_hopper, token_hopper
from detcompile.templates.training import attention_kernels as kernels
from detcompile.templates.training.attention_schedules import (
    GradientProblem,
    GradientTiles,
    candidates,
    reference_tiles,
)

_BLOCK = 64  # keys per block of the temporary cache
_LSE_QUERIES = 64
_SHORT = ShortTile()
_MODULES = (kernels, attention_hopper, token_hopper, hopper, hopper_blocks, hopper_tile, scores)
assert kernels.KEY_BLOCK.value == attention_hopper.TILE.value == KEY_BLOCK


def packed_attention_cuda(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, rule: AttentionRule
) -> tuple[Tensor, Tensor]:
    """Run q [T, H, D], k [T, KV heads, D], v [T, KV heads, DV], cu_seqlens [S + 1] int32.

    Returns out [T, H, DV] and lse [T, H].
    """
    T, S = len(q), len(cu_seqlens) - 1
    caches, slots, step = _temporary_cache(k, v, cu_seqlens)
    out = paged_attention_cuda(q, k, v, caches, slots, step, rule) if T else q.new_empty((0, q.shape[1], v.shape[2]))
    return out, attention_lse(q, k, cu_seqlens, rule) if T and S else q.new_zeros(q.shape[:2], dtype=torch.float32)


def _temporary_cache(k: Tensor, v: Tensor, cu_seqlens: Tensor) -> tuple[Caches, Tensor, StepMetadata]:
    """Return empty caches for the step's keys and values, their slots, and metadata, all computed on the device."""
    T, S = len(k), len(cu_seqlens) - 1
    lengths = cu_seqlens.diff()
    blocks = (lengths + (_BLOCK - 1)) // _BLOCK
    first_block = blocks.cumsum(0) - blocks
    count = cdiv(T, _BLOCK)
    table = first_block[:, None] + torch.arange(count, device=k.device)
    table = table.where(torch.arange(count, device=k.device) < blocks[:, None], 0).int()
    token = torch.arange(T, device=k.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True, out_int32=False)
    real = sequence < S
    known = sequence.clamp(max=max(S - 1, 0))
    if S == 0:
        slots = torch.full((T,), -1, dtype=torch.int64, device=k.device)
    else:
        slots = (first_block.long()[known] * _BLOCK + token - cu_seqlens.long()[known]).where(real, -1)
    shape = (count + S + 1, _BLOCK, k.shape[1])
    caches = Caches(*(rows.new_empty((*shape, rows.shape[2])) for rows in (k, v)))
    return caches, slots, StepMetadata(cu_seqlens, lengths.int(), table)


def attention_lse(q: Tensor, k: Tensor, cu_seqlens: Tensor, rule: AttentionRule) -> Tensor:
    """Return the log-sum-exp of each row's scores [T, H], float32; zeros for padding."""
    q, k, T, S = unit_rows(q), unit_rows(k), len(q), len(cu_seqlens) - 1
    lse = q.new_zeros(q.shape[:2], dtype=torch.float32)
    slopes, sinks = (lse if values is None else values.contiguous() for values in (rule.alibi_slopes, rule.sinks))
    flags = _flags(gradient_problem(q, k, k, rule, of_keys=False))
    launcher(kernels.lse_kernel)[(_tiles(T, S, _LSE_QUERIES), q.shape[1])](
        q, k, lse, cu_seqlens, slopes, sinks, *_numbers(rule), S, q.shape[1], *q.stride()[:2], *k.stride()[:2],
        G=q.shape[1] // k.shape[1], D=q.shape[2], DP=padded(q.shape[2]), **flags, SINKS=rule.sinks is not None,
        num_warps=4, num_stages=2, enable_fp_fusion=False,
    )  # fmt: skip
    return lse


def packed_attention_backward_cuda(
    g: Tensor, attended: Sequence[Tensor], cu_seqlens: Tensor, rule: AttentionRule
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run g [T, H, DV] and the forward's q, k, v, out, lse -> dq, dk, dv, and rows [T or 0, H] of sinks' gradients."""
    q, k, v, out, lse = attended
    q, k, v, g, lse = unit_rows(q), unit_rows(k), unit_rows(v), g.contiguous(), lse.contiguous()
    if not len(q) or len(cu_seqlens) == 1:
        dq, dk, dv = (torch.zeros(rows.shape, dtype=rows.dtype, device=rows.device) for rows in (q, k, v))
        return dq, dk, dv, lse.new_zeros(lse.shape if rule.sinks is not None else (0, q.shape[1]))
    delta = _delta(g, out.contiguous())
    aligned = g if g.data_ptr() % 16 == 0 else g.clone()
    operands = (aligned, q, k, v, lse.t().contiguous(), delta)
    of_queries, of_keys = (
        ATTENTION_GRADIENTS.schedule(gradient_problem(q, k, v, rule, of_keys=keys), q.device) for keys in (False, True)
    )
    dq = query_gradient(of_queries, operands, cu_seqlens, rule)
    dk, dv = key_gradients(of_keys, operands, cu_seqlens, rule)
    if rule.sinks is None:
        return dq, dk, dv, lse.new_zeros((0, q.shape[1]))
    # delta is arbitrary for padding
    real = torch.arange(len(q), device=q.device)[:, None] < cu_seqlens[-1]
    rows = -torch.exp(rule.sinks.float() - lse) * delta.t()
    return dq, dk, dv, rows.where(real, 0.0)


def _delta(g: Tensor, out: Tensor) -> Tensor:
    """Return the sums of g * out [T, H, DV] over DV: [H, T]."""
    T, H, width = g.shape
    order = row_order(width, "cuda", (), g.dtype)
    rows, plan = row_layout(g.view(T * H, width), order.vector), row_plan(order, short=_SHORT)
    delta = torch.empty((H, T), dtype=torch.float32, device=g.device)
    launcher(kernels.delta_kernel)[(cdiv(T * H, plan.rows),)](
        rows.start, out, delta, *rows[1:5], T, H, R=width, UNIT=rows.unit, ROWS=plan.rows, W=plan.width,
        FOLDS=plan.folds, LANES=order.lanes, VECTOR=order.vector, SHUFFLE=g.is_cuda, num_warps=plan.warps,
        enable_fp_fusion=False,
    )  # fmt: skip
    return delta


def query_gradient(
    schedule: GradientTiles, operands: Sequence[Tensor], cu_seqlens: Tensor, rule: AttentionRule
) -> Tensor:
    """Return dq [T, H, D] of operands g, q, k, v, and lse and delta [H, T], under one schedule; zeros for padding."""
    q = operands[1]
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    grid = (_tiles(len(q), len(cu_seqlens) - 1, schedule.block_m), q.shape[1])
    if schedule.hopper:
        attention_hopper.query_gradient(schedule, grid, operands, cu_seqlens, rule, dq)
    else:
        _launch(kernels.dq_kernel, grid, schedule, operands, cu_seqlens, rule, (dq,), of_keys=False)
    return dq


def key_gradients(
    schedule: GradientTiles, operands: Sequence[Tensor], cu_seqlens: Tensor, rule: AttentionRule
) -> tuple[Tensor, Tensor]:
    """Return dk and dv of operands g, q, k, v, and lse and delta [H, T], under one schedule; zeros for padding."""
    _, q, k, v, *_ = operands
    dk, dv = (torch.empty(rows.shape, dtype=rows.dtype, device=rows.device) for rows in (k, v))
    grid = (_tiles(len(q), len(cu_seqlens) - 1, schedule.block_n), k.shape[1])
    if schedule.hopper:
        attention_hopper.key_gradients(schedule, grid, operands, cu_seqlens, rule, dk, dv)
        return dk, dv
    shared = q.shape[1] > k.shape[1]
    totals = [torch.empty_like(rows, dtype=torch.float32) if shared else rows for rows in (dk, dv)]
    _launch(kernels.dkdv_kernel, grid, schedule, operands, cu_seqlens, rule, (dk, dv, *totals), of_keys=True)
    return dk, dv


def _launch(
    kernel: Any, grid: tuple[int, int], schedule: GradientTiles, operands: Sequence[Tensor], cu_seqlens: Tensor,
    rule: AttentionRule, results: Sequence[Tensor], of_keys: bool,
) -> None:  # fmt: skip
    _, q, k, v, lse, _ = operands
    slopes = lse if rule.alibi_slopes is None else rule.alibi_slopes.contiguous()
    c, pre_scale, cap, window = _numbers(rule)
    launcher(kernel)[grid](
        *operands, cu_seqlens, slopes, *results, c, pre_scale, cap, rule.scale, window, len(q),
        len(cu_seqlens) - 1, q.shape[1], *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        G=q.shape[1] // k.shape[1], D=q.shape[2], DV=v.shape[2], DP=padded(q.shape[2]), DVP=padded(v.shape[2]),
        BM=schedule.block_m, BN=schedule.block_n, **_flags(gradient_problem(q, k, v, rule, of_keys=of_keys)),
        num_warps=schedule.warps, num_stages=schedule.stages, enable_fp_fusion=False,
    )  # fmt: skip


def _numbers(rule: AttentionRule) -> tuple[float, float, float, int]:
    """Return c, the scale of shaped scores, the cap and the window."""
    c = LOG2_E.value * (1.0 if rule.needs_scores else rule.scale)
    return c, rule.pre_scale, float(rule.softcap), rule.window


def _flags(problem: GradientProblem) -> dict[str, bool]:
    names = ("needs_scores", "capped", "alibi", "windowed", "chunked")
    return {name.upper(): getattr(problem, name) for name in names}


def _tiles(T: int, S: int, block: int) -> int:
    """Return an upper bound of the tiles of S sequences and the padding, T tokens together."""
    return T // block + S + 1


def gradient_problem(q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, *, of_keys: bool) -> GradientProblem:
    """Return the problem of a launch; it does not contain a number of tokens."""
    return GradientProblem(
        of_keys=of_keys, dtype=str(q.dtype).removeprefix("torch."), heads=q.shape[1], kv_heads=k.shape[1],
        d=q.shape[2], dv=v.shape[2], windowed=rule.window > 0, chunked=rule.attention_chunk > 0,
        needs_scores=rule.needs_scores, capped=rule.softcap > 0, alibi=rule.alibi_slopes is not None,
        hopper=attention_hopper.supports(q, k, v, rule),
    )  # fmt: skip


def probe_bits(problem: GradientProblem, device: torch.device) -> Callable[[GradientTiles], bytes]:
    """Return the gate's probe: the bytes of a schedule for three sequences followed by padding."""
    generator = torch.Generator(device).manual_seed(23)
    lengths, dtype = (1, 333, 150), getattr(torch, problem.dtype)
    T = sum(lengths) + 5
    cu_seqlens = torch.tensor([0, 1, 334, 484], dtype=torch.int32, device=device)
    shapes = [(problem.heads, problem.dv), (problem.heads, problem.d), (problem.kv_heads, problem.d)]
    g, q, k, v = (
        heavy_tailed(T, *shape, generator=generator, spread=0.5).to(dtype)
        for shape in (*shapes, (problem.kv_heads, problem.dv))
    )
    scale = problem.d**-0.5
    shaped = problem.capped or problem.alibi
    rule = AttentionRule(
        -scale if problem.needs_scores and not shaped else scale, 0 if problem.chunked or not problem.windowed else 97,
        64, 2.5 if problem.capped else 0.0, None,
        2.0 ** -torch.linspace(1, 8, problem.heads, dtype=torch.float32, device=device) if problem.alibi else None,
        97 if problem.chunked else 0,
    )  # fmt: skip
    lse = attention_lse(q, k, cu_seqlens, rule).t().contiguous()
    delta = heavy_tailed(problem.heads, T, generator=generator, spread=0.5)
    operands = (g, q, k, v, lse, delta)

    def bits(schedule: GradientTiles) -> bytes:
        if problem.of_keys:
            return bytes_of(*key_gradients(schedule, operands, cu_seqlens, rule))
        return bytes_of(query_gradient(schedule, operands, cu_seqlens, rule))

    return bits


ATTENTION_GRADIENTS = Gate(
    family="packed_attention_backward",
    sources=(__file__, *(module.__file__ for module in _MODULES)),
    reference=reference_tiles,
    candidates=candidates,
    probe=probe_bits,
)
