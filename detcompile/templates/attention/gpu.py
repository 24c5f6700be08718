"""Paged and dense causal attention on the GPU, in one KV order and with the same bits.

Legend: T tokens, S sequences, H query heads, D and DV head dims. The grid depends only on T, S and the width of the
block table, so a launch can be captured in a CUDA graph. Each program looks up the sequence of its tile on the device.
"""

import functools
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.templates.attention import (
    hopper,
    hopper_blocks,
    hopper_decode,
    hopper_decode_tile,
    hopper_tile,
    kernels,
    merge,
    operands,
    probe,
    scores,
)
from detcompile.templates.attention.operands import AttentionLaunch, Caches, StepMetadata, unit_rows
from detcompile.templates.attention.rope_cache_gpu import write_kv
from detcompile.templates.attention.schedules import (
    DECODE_COLUMNS,
    AttentionProblem,
    AttentionSchedule,
    Kernel,
    attention_candidates,
    most_tiles,
    reference_attention_schedule,
)
from detcompile.templates.attention.scores import AttentionRule
from detcompile.templates.device import dependent_launch, primitives
from detcompile.templates.device.gate import Gate, bytes_of, multiprocessors
from detcompile.templates.device.launcher import cdiv

KERNELS: dict[Kernel, Callable[[AttentionLaunch], None]] = {
    "plain": kernels.launch,
    "hopper": hopper.launch,
    "hopper_decode": hopper_decode.launch,
}
_MOST_PARTIAL_BYTES = 1 << 28  # of fp32 chunk outputs


def paged_attention_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    caches: Caches,
    slot_mapping: Tensor,
    step: StepMetadata,
    rule: AttentionRule,
    *,
    schedule: AttentionSchedule | None = None,
) -> Tensor:
    """Write k and v into the caches, then attend from the caches.

    Args:
        q: queries [T, H, D].
        k: keys [T, KV heads, D].
        v: values [T, KV heads, DV].
        caches: the layer's caches, changed in place.
        slot_mapping: slots that k and v are written to: see `step.StepInputs`.
        step: metadata of the step.
        rule: scores and visible keys, with biases [T, H, E].
        schedule: forces a schedule (tests); None uses one that passed the gate.

    Returns:
        [T, H, DV] in q.dtype; zeros for rows past cu_seqlens[S].
    """
    _check(q, *caches, rule)
    if q.shape[0]:
        write_kv(k, v, caches, slot_mapping)
    return _attend_caches(q, caches, step, rule, schedule)


def cached_attention_cuda(
    q: Tensor,
    caches: Caches,
    step: StepMetadata,
    rule: AttentionRule,
    *,
    schedule: AttentionSchedule | None = None,
) -> Tensor:
    """Attend from the caches, which already hold the step's keys and values."""
    _check(q, *caches, rule)
    return _attend_caches(q, caches, step, rule, schedule)


def dense_attention_cuda(
    q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, *, schedule: AttentionSchedule | None = None
) -> Tensor:
    """q [B, H, T, D], k and v [B, KV heads, T, D or DV] -> [B, H, T, DV], with the bits of the paged op."""
    q, k, v = (unit_rows(t).transpose(1, 2) for t in (q, k, v))  # [B, T, heads, D]
    if rule.relative_bias is not None:
        rule = rule._replace(relative_bias=rule.relative_bias.transpose(1, 2))
    _check(q, k, v, rule)
    B, T, H, D = q.shape
    require_32_bits(T, H, max(D, v.shape[-1]))
    out = q.new_empty((B, H, T, v.shape[-1]))
    if out.numel():
        problem = _problem(q[0], k, v, rule, block_size=0, decode=T < 16)
        schedule, rows = schedule or ATTENTION.schedule(problem, q.device), out.transpose(1, 2)
        nothing = StepMetadata(rows, rows, rows)
        launch = AttentionLaunch(schedule, problem, rule, q, k, v, rows, rows, rows, nothing, T, B, 1, False)
        KERNELS[schedule.kernel](launch)
    return out


def require_32_bits(T: int, H: int, D: int) -> None:
    """Raise InvalidInput if T * H * D is 2^31 or more: kernels address a dense sequence's rows with 32-bit offsets."""
    if T * H * D >= 2**31:
        raise InvalidInput(
            f"dense attention on the GPU: {T} tokens x {H} heads x {D} values exceed 2^31 elements: use fewer tokens,"
            " or a paged cache"
        )


def probe_bits(problem: AttentionProblem, device: torch.device) -> Callable[[AttentionSchedule], bytes]:
    """Return a function that runs a schedule on probe.py's step and returns the output bytes."""
    drawn = probe.draw_probe(problem, device)

    def paged(schedule: AttentionSchedule) -> bytes:
        given = (drawn.q, drawn.k, drawn.v, drawn.caches(), drawn.slot_mapping, drawn.step, drawn.rule)
        return bytes_of(paged_attention_cuda(*given, schedule=schedule))

    def dense(schedule: AttentionSchedule) -> bytes:
        return bytes_of(dense_attention_cuda(*drawn.dense(), schedule=schedule))

    return paged if problem.block_size else dense


_HOPPER = (hopper, hopper_blocks, hopper_tile, hopper_decode, hopper_decode_tile)
_MODULES = (kernels, merge, *_HOPPER, scores, operands, probe, dependent_launch, primitives)
ATTENTION = Gate(
    family="attention",
    sources=(*(module.__file__ for module in _MODULES), __file__),
    reference=reference_attention_schedule,
    candidates=attention_candidates,
    probe=probe_bits,
)


def _attend_caches(
    q: Tensor, caches: Caches, step: StepMetadata, rule: AttentionRule, schedule: AttentionSchedule | None
) -> Tensor:
    k, v = caches
    T, H, _ = q.shape
    out = q.new_empty((T, H, v.shape[-1]))
    if T == 0:
        return out
    S, block_size = step.seq_lens.shape[0], k.shape[1]
    keys = step.block_table.shape[1] * block_size
    problem = _problem(q, k, v, rule, block_size=block_size, decode=T <= 2 * S)
    problem = _for_step(problem, q.device, T, S, keys)
    schedule, chunks = schedule or ATTENTION.schedule(problem, q.device), cdiv(keys, problem.chunk)
    rows = out[None]
    target, max_and_sum, split = rows, rows, schedule.split and chunks > 1
    if split:
        target = q.new_empty((T, H, chunks, problem.dv), dtype=torch.float32)
        max_and_sum = q.new_empty((T, H, chunks, 2), dtype=torch.float32)
    launch = AttentionLaunch(
        schedule, problem, rule, unit_rows(q)[None], k, v, rows, target, max_and_sum, step, T, S, chunks, split
    )  # fmt: skip
    KERNELS[schedule.kernel](launch)
    if split:
        merge.launch(launch)
    return out


def _problem(
    q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, *, block_size: int, decode: bool
) -> AttentionProblem:
    return AttentionProblem(
        dtype=str(q.dtype).removeprefix("torch."), heads=q.shape[1], kv_heads=k.shape[2], d=q.shape[2], dv=v.shape[3],
        block_size=block_size, chunk=rule.kv_chunk, windowed=rule.window > 0, chunked=rule.attention_chunk > 0,
        decode=decode, split=False, needs_scores=rule.needs_scores,
        descriptors=hopper_blocks.supports(k, v, block_size > 0), capped=rule.softcap > 0,
        alibi=rule.alibi_slopes is not None, sinks=rule.sinks is not None, relative=rule.relative_bias is not None,
    )  # fmt: skip


@functools.lru_cache(4096)  # during prefill the GPU waits for the host
def _for_step(problem: AttentionProblem, device: torch.device, T: int, S: int, keys: int) -> AttentionProblem:
    """Return the problem for T tokens of S sequences whose block tables hold up to ``keys`` keys each.

    Chunks get separate programs (split) if tiles alone leave multiprocessors idle. With hopper_decode and blocks of 64
    or more keys, which one copy fetches, two chunks in sequence take little longer than in parallel, so one tile per
    multiprocessor is enough.
    """
    chunks, group = cdiv(keys, problem.chunk), problem.group
    in_one_copy = problem.fits_hopper_decode and problem.block_size >= 64
    tiles = most_tiles(T, S, 16 if problem.decode else 64, group) * problem.kv_heads
    enough = multiprocessors(device) * (1 if in_one_copy and chunks == 2 else 8)
    partial_bytes = 4 * T * problem.heads * chunks * problem.dv
    split = chunks > 1 and tiles < enough and partial_bytes <= _MOST_PARTIAL_BYTES
    programs = T * problem.kv_heads * cdiv(group, DECODE_COLUMNS) * (chunks if split else 1)
    if not problem.fits_hopper_decode:
        stages = 0
    elif programs <= multiprocessors(device) // (2 if split else 1):
        stages = 4  # a program may fill its multiprocessor; with split, the merge's programs need space too
    elif programs >= 3 * multiprocessors(device) and (split or keys <= 512):
        stages = 2  # many short programs: as many of them resident as possible
    else:
        stages = 3
    return replace(problem, split=split, stages=stages)


def _check(q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> None:
    where = "attention on the GPU"
    rule.check(where, q.shape[-2], k.shape[2])
    if q.dtype != k.dtype or k.dtype != v.dtype:
        raise InvalidInput(f"{where}: q is {q.dtype}, keys {k.dtype}, values {v.dtype}; use one dtype for all")
