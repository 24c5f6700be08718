"""The ways to choose a GEMM's tile under Inductor that docs/log/dispatch.md compares, as ops of one small program.

Program: y_TN = silu(x_TK @ w_KN) + residual_TN in bf16; w_KN is the transposed view of an nn.Linear weight, T unbacked.
Every variant but cuBLAS keeps one fp32 accumulator per output element, k ascending: the time may change, not the bits.

Dims: T tokens (the GEMM's M), N features out, K features in.
"""

import sympy
import torch
import triton
import triton.language as tl
from torch._inductor import ir
from torch._inductor.kernel.custom_op import CustomOpConfig, register_custom_op_autotuning
from torch._inductor.kernel.mm_common import mm_args, mm_grid
from torch._inductor.lowering import register_lowering
from torch._inductor.select_algorithm import TritonTemplate, autotune_select_algorithm

__all__ = ["HINTS", "PROGRAMS", "TILES", "launch", "launch_branching", "tile_for"]

# BLOCK_M -> (BLOCK_N, BLOCK_K, num_warps, num_stages)
TILES = {16: (64, 128, 4, 4), 64: (64, 128, 4, 3), 128: (128, 64, 8, 3)}
# A token count -> the BLOCK_M that tile_for gives it; Inductor's size-hint dispatch takes the hint nearest to T.
HINTS = {16: 16, 256: 64, 4096: 128}


def tile_for(num_tokens: int) -> int:
    """BLOCK_M for a token count: a schedule, so it may read the batch."""
    return 16 if num_tokens <= 16 else 64 if num_tokens <= 512 else 128


@triton.jit
def _tile(
    x, w, residual, out, M, N, K, stride_xm, stride_wk, stride_wn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EPILOGUE: tl.constexpr,
):  # fmt: skip
    grid_m = tl.cdiv(M, BLOCK_M)
    grid_n = tl.cdiv(N, BLOCK_N)
    group = tl.program_id(0) // (8 * grid_n)
    group_size = min(grid_m - group * 8, 8)
    in_group = tl.program_id(0) % (8 * grid_n)
    rows = (group * 8 + in_group % group_size) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = in_group // group_size * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    x_rows = tl.where(rows < M, rows, 0)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        a = tl.load(x + x_rows[:, None] * stride_xm + (k + ks)[None, :])
        b = tl.load(w + (k + ks)[:, None] * stride_wk + columns[None, :] * stride_wn)
        acc = tl.dot(a, b, acc)
    y = acc.to(tl.bfloat16)
    at = rows[:, None] * N + columns[None, :]
    mask = rows[:, None] < M
    if EPILOGUE:
        wide = y.to(tl.float32)
        y = (wide * tl.sigmoid(wide)).to(tl.bfloat16)
        y = (tl.load(residual + at, mask, other=0.0).to(tl.float32) + y.to(tl.float32)).to(tl.bfloat16)
    tl.store(out + at, y, mask)


@triton.jit
def _matmul_kernel(
    x, w, residual, out, M, N, K, stride_xm, stride_wk, stride_wn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EPILOGUE: tl.constexpr,
):  # fmt: skip
    _tile(x, w, residual, out, M, N, K, stride_xm, stride_wk, stride_wn, BLOCK_M, BLOCK_N, BLOCK_K, EPILOGUE)


@triton.jit
def _branching_kernel(x, w, residual, out, M, N, K, stride_xm, stride_wk, stride_wn):
    if M <= 16:
        _tile(x, w, residual, out, M, N, K, stride_xm, stride_wk, stride_wn, 16, 64, 128, True)
    elif M <= 512:
        _tile(x, w, residual, out, M, N, K, stride_xm, stride_wk, stride_wn, 64, 64, 128, True)
    else:
        _tile(x, w, residual, out, M, N, K, stride_xm, stride_wk, stride_wn, 128, 128, 64, True)


_heuristic_kernel = triton.heuristics({"BLOCK_M": lambda args: tile_for(args["M"])})(_matmul_kernel)


def _arguments(x, w, residual):
    out = x.new_empty(x.shape[0], w.shape[1])
    sizes = (x.shape[0], w.shape[1], x.shape[1], x.stride(0), w.stride(0), w.stride(1))
    return out, (x, w, out if residual is None else residual, out, *sizes)


def launch(x, w, residual=None, block_m=None):
    """The plain launcher: x [T, K], w [K, N] bf16 -> [T, N]; with a residual, silu and the addition are fused."""
    block_m = block_m or tile_for(x.shape[0])
    block_n, block_k, num_warps, num_stages = TILES[block_m]
    out, arguments = _arguments(x, w, residual)
    grid = (triton.cdiv(x.shape[0], block_m) * triton.cdiv(w.shape[1], block_n),)
    return out, _matmul_kernel[grid](
        *arguments, block_m, block_n, block_k, residual is not None, num_warps=num_warps, num_stages=num_stages
    )


def launch_branching(x, w, residual):
    """One kernel that branches on M: its warps, stages, registers and shared memory are those of the largest tile."""
    block_m = tile_for(x.shape[0])
    out, arguments = _arguments(x, w, residual)
    grid = (triton.cdiv(x.shape[0], block_m) * triton.cdiv(w.shape[1], TILES[block_m][0]),)
    return out, _branching_kernel[grid](*arguments, num_warps=8, num_stages=3)


TEMPLATE = TritonTemplate(
    name="dispatch_mm",
    grid=mm_grid,
    source=r"""
{{def_kernel("A", "B")}}
    M = {{size("A", 0)}}
    N = {{size("B", 1)}}
    K = {{size("A", 1)}}
    grid_m = (M + BLOCK_M - 1) // BLOCK_M
    grid_n = (N + BLOCK_N - 1) // BLOCK_N
    group = tl.program_id(0) // (8 * grid_n)
    group_size = min(grid_m - group * 8, 8)
    in_group = tl.program_id(0) % (8 * grid_n)
    rows = (group * 8 + in_group % group_size) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = in_group // group_size * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    x_rows = tl.where(rows < M, rows, 0)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        a = tl.load(A + x_rows[:, None] * {{stride("A", 0)}} + (k + ks)[None, :] * {{stride("A", 1)}})
        b = tl.load(B + (k + ks)[:, None] * {{stride("B", 0)}} + columns[None, :] * {{stride("B", 1)}})
        acc = tl.dot(a, b, acc)
    # torch 2.11 hands the unrounded accumulator to a fused epilogue.
    acc = acc.to(A.dtype.element_ty).to(tl.float32)
    idx_m = rows[:, None]
    idx_n = columns[None, :]
    mask = (idx_m < M) & (idx_n < N)
    {{store_output(("idx_m", "idx_n"), "acc", "mask", val_shape=("BLOCK_M", "BLOCK_N"))}}
""",
)


class PinnedMultiTemplate(ir.MultiTemplateBuffer):
    """Inductor's multi-template buffer whose choice per size hint is given, not timed."""

    def __init__(self, layout, inputs, callers):
        # Far above any measured epilogue, so that the timing decides neither the choice nor the fusion.
        timings = {hint: {caller: 1e6} for hint, caller in callers.items()}
        super().__init__(
            layout, inputs, timings.__getitem__, list(callers.values()), callers[None].allowed_prologue_inps
        )
        self.callers = callers

    def finalize_as_triton_caller(self, caller):
        super().finalize_as_triton_callers(self.callers)

    def finalize_as_triton_callers(self, callers):
        super().finalize_as_triton_callers(self.callers)


def _caller(x, w, layout, block_m):
    block_n, block_k, num_warps, num_stages = TILES[block_m]
    choices = []
    refused = TEMPLATE.maybe_append_choice(
        choices, input_nodes=(x, w), layout=layout, num_stages=num_stages, num_warps=num_warps,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
    )  # fmt: skip
    assert refused is None, refused
    return choices[0]


LIBRARY = torch.library.Library("dispatch", "DEF")
for schema in (
    "template(Tensor x, Tensor w, int block_m) -> Tensor",
    "sized(Tensor x, Tensor w) -> Tensor",
    "branching(Tensor x, Tensor w, Tensor residual) -> Tensor",
    "matmul(Tensor x, Tensor w, Tensor? residual) -> Tensor",
):
    LIBRARY.define(schema)
    LIBRARY.impl(schema.split("(")[0], lambda x, w, *_: x.new_empty(x.shape[0], w.shape[1]), "Meta")
LIBRARY.impl("template", lambda x, w, block_m: launch(x, w, None, block_m)[0], "CUDA")
LIBRARY.impl("sized", lambda x, w: launch(x, w)[0], "CUDA")
LIBRARY.impl("branching", lambda x, w, residual: launch_branching(x, w, residual)[0], "CUDA")
LIBRARY.impl("matmul", lambda x, w, residual: launch(x, w, residual)[0], "CUDA")
ops = torch.ops.dispatch


@register_lowering(ops.template.default, type_promotion_kind=None)
def _lower_template(x, w, block_m):
    *_, layout, x, w = mm_args(x, w)
    chosen = autotune_select_algorithm("dispatch_mm", [_caller(x, w, layout, block_m)], [x, w], layout)
    return chosen[0] if isinstance(chosen, tuple) else chosen


@register_lowering(ops.sized.default, type_promotion_kind=None)
def _lower_sized(x, w):
    num_tokens, *_, layout, x, w = mm_args(x, w)
    if isinstance(num_tokens, (int, sympy.Integer)):
        return _lower_template(x, w, tile_for(int(num_tokens)))
    callers = {hint: _caller(x, w, layout, block_m) for hint, block_m in HINTS.items()}
    return ir.TensorBox.create(PinnedMultiTemplate(layout, [x, w], {None: callers[4096], **callers}))


@torch.library.custom_op("dispatch::ranged", mutates_args=())
def _ranged(x: torch.Tensor, w: torch.Tensor, block_m: int = 64) -> torch.Tensor:
    return ops.matmul(x, w, None)


@_ranged.register_fake
def _(x, w, block_m=64):
    return x.new_empty(x.shape[0], w.shape[1])


def _ranged_tile(x, w, block_m=64):
    return ops.template(x, w, block_m)


register_custom_op_autotuning(
    _ranged,
    configs=[CustomOpConfig(_ranged_tile, block_m=block_m) for block_m in TILES],
    dispatch_on={"tensor_name": "x", "dim": 0, "range_upper_bound": 4096},
    split_points=[16, 512],
)


def _user_triton_op(name, kernel, choose):
    @torch.library.triton_op(f"dispatch::{name}", mutates_args=())
    def op(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        block_m = choose(x.shape[0])
        block_n, block_k, num_warps, num_stages = TILES[block_m or 64]
        out, arguments = _arguments(x, w, None)
        sizes = {"BLOCK_N": block_n, "BLOCK_K": block_k, "EPILOGUE": False}
        if block_m:
            sizes["BLOCK_M"] = block_m
        torch.library.wrap_triton(kernel)[
            lambda meta: (triton.cdiv(x.shape[0], meta["BLOCK_M"]) * triton.cdiv(w.shape[1], meta["BLOCK_N"]),)
        ](*arguments, **sizes, num_warps=num_warps, num_stages=num_stages)
        return out

    return op


_user_frozen = _user_triton_op("user_frozen", _matmul_kernel, lambda num_tokens: 64)
_user_branch = _user_triton_op("user_branch", _matmul_kernel, tile_for)
_user_heuristic = _user_triton_op("user_heuristic", _heuristic_kernel, lambda num_tokens: None)


def _then_epilogue(matmul):
    return lambda x, w, residual: torch.nn.functional.silu(matmul(x, w)) + residual


_branch_16, _branch_64, _branch_128 = (_then_epilogue(lambda x, w, m=m: ops.template(x, w, m)) for m in TILES)


def _cond_over_templates(x, w, residual):
    """torch.cond on the token count, the epilogue inside every branch."""

    def larger(x, w, residual):
        return torch.cond(x.shape[0] <= 512, _branch_64, _branch_128, (x, w, residual))

    return torch.cond(x.shape[0] <= 16, _branch_16, larger, (x, w, residual))


PROGRAMS = {
    "default": _then_epilogue(torch.mm),
    "a_template_16": _then_epilogue(lambda x, w: ops.template(x, w, 16)),
    "a_template_128": _then_epilogue(lambda x, w: ops.template(x, w, 128)),
    "b_size_hints": _then_epilogue(ops.sized),
    "c_range_dispatch": _then_epilogue(_ranged),
    "d_branching_kernel": ops.branching,
    "e_triton_op_frozen_64": _then_epilogue(_user_frozen),
    "e_triton_op_python_if": _then_epilogue(_user_branch),
    "e_triton_op_heuristics": _then_epilogue(_user_heuristic),
    "f_own_op_fused": ops.matmul,
    "f_own_op_unfused": _then_epilogue(lambda x, w: ops.matmul(x, w, None)),
    "g_cond_over_templates": _cond_over_templates,
}
