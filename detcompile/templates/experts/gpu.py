"""expert_matmul on the GPU: launches a schedule that passed the gate, chosen by the number of rows.

Legend: M rows (a token's choice of an expert), C choices of a token, E experts, N output features, K summed features.
The gate compares with the matmul template's reference schedule, expert by expert: the order is
matmul_order(K, dtype, radices).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from detcompile.errors import ScheduleError
from detcompile.templates.device import dependent_launch, primitives
from detcompile.templates.device.dependent_launch import launch_options
from detcompile.templates.device.gate import Buckets, Gate, bytes_of, heavy_tailed, multiprocessors
from detcompile.templates.experts import kernels as experts_kernels
from detcompile.templates.experts.schedules import (
    REFERENCE,
    Decode,
    ExpertsProblem,
    ExpertsSchedule,
    Grouped,
    Sorted,
    expert_candidates,
)
from detcompile.templates.matmul import gpu as matmul_gpu
from detcompile.templates.matmul import kernels as matmul_kernels
from detcompile.templates.matmul import launch as matmul_launch
from detcompile.templates.matmul import tree as matmul_tree
from detcompile.templates.matmul.candidates import reference_schedule
from detcompile.templates.matmul.tree import LEVELS, tree_options

_BUCKETS = Buckets(16, 1 << 16)
_CHUNK = 4096  # rows that a program sorts per iteration


@dataclass(frozen=True, slots=True)
class _Operands:
    x: Tensor  # [M / C, K]
    ids: Tensor  # [M] int64
    w: Tensor  # [E, N, K], unit stride along N or K
    bias: Tensor | None  # [E, N] contiguous
    out: Tensor  # [M, N] contiguous
    choices: int
    radices: tuple[int, ...] = ()

    @property
    def leaf_k(self) -> int:
        return self.x.shape[1] // math.prod(self.radices)


def expert_matmul_cuda(
    x: Tensor,
    ids: Tensor,
    w: Tensor,
    bias: Tensor | None,
    radices: Sequence[int] = (),
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiply x [T, K] or [T, C, K] with the experts' weights -> [T, C, N] in out_dtype (default x.dtype).

    ids [T, C] int64, w [E, N, K], bias [E, N].

    Raises:
        ScheduleError: during CUDA graph capture, if this problem was never launched before.
    """
    o = _operands(x, ids, w, bias, out_dtype or x.dtype, radices)
    if o.out.numel():
        problem = experts_problem(o.ids.numel(), o.x, o.w, o.bias, o.radices)
        _run(EXPERTS.schedule(problem, x.device), o)
    return o.out.view(*ids.shape, w.shape[1])


def run_experts(
    schedule: ExpertsSchedule,
    x: Tensor,
    ids: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    radices: Sequence[int] = (),
) -> Tensor:
    """Run the op under one schedule without asking the gate: for tests, the gate itself and benchmarks."""
    o = _operands(x, ids, w, bias, out_dtype or x.dtype, radices)
    _run(schedule, o)
    return o.out.view(*ids.shape, w.shape[1])


def experts_problem(
    rows: int, x: Tensor, w: Tensor, bias: Tensor | None, radices: tuple[int, ...] = ()
) -> ExpertsProblem:
    """Return the problem of a launch; it contains the row count only as a power-of-two bucket."""
    E, N, K = w.shape
    whole = w.stride(2) == 1 and w.stride(0) == N * w.stride(1)
    return ExpertsProblem(
        dtype=matmul_gpu.dtype_name(x.dtype),
        experts=E,
        n=N,
        k=K,
        radices=radices,
        order=matmul_gpu.order_name(K, x.dtype, radices),
        w_nk=w.stride(2) == 1,
        aligned=whole and w.data_ptr() % 16 == 0 and w.stride(1) * w.element_size() % 16 == 0,
        bias=None if bias is None else matmul_gpu.dtype_name(bias.dtype),
        bucket=_BUCKETS.of(rows),
    )


def probe_experts(problem: ExpertsProblem, device: torch.device) -> Callable[[ExpertsSchedule], bytes]:
    """Return the gate's probe: bytes of the unrounded sums and of the op under a schedule; they must equal matmul's.

    It uses heavy-tailed data with the problem's K and layout, and a few experts of uneven rows, including one row
    without an expert. M and N end inside a tile, so that masks are probed too. N keeps its remainder modulo 16, on
    which the compiler specializes.
    """
    generator = torch.Generator(device).manual_seed(21)
    M, N, E = min(problem.bucket, 256) - 3, min(problem.n, 336 + problem.n % 16), min(problem.experts, 5)
    dtype = getattr(torch, problem.dtype)

    def draw(*shape: int) -> Tensor:
        return heavy_tailed(*shape, generator=generator).to(dtype)

    x, w = draw(M, problem.k), draw(E, N, problem.k)
    if not problem.w_nk:
        w = w.transpose(1, 2).contiguous().transpose(1, 2)
    elif not problem.aligned:
        w = torch.nn.functional.pad(w, (0, 1))[..., : problem.k]
    bias = None if problem.bias is None else draw(E, N).to(getattr(torch, problem.bias))
    ids = (torch.rand(M, generator=generator, dtype=torch.float32, device=device).square() * E).long()
    ids[M // 2] = E
    radices = problem.radices
    expected = _by_matmul(x, ids, w, None, torch.float32, radices), _by_matmul(x, ids, w, bias, dtype, radices)

    def bits(schedule: ExpertsSchedule) -> bytes:
        results = (
            run_experts(schedule, x, ids, w, None, torch.float32, radices),
            run_experts(schedule, x, ids, w, bias, dtype, radices),
        )
        if bytes_of(*results) != bytes_of(*expected):
            raise ScheduleError("its bits differ from those of matmul's reference schedule")
        return bytes_of(*results)

    return bits


_KERNELS = (experts_kernels, matmul_kernels, matmul_tree, primitives)
_MODULES = (*_KERNELS, matmul_launch, dependent_launch)
EXPERTS = Gate(
    family="experts",
    sources=(*(module.__file__ for module in _MODULES), __file__),
    reference=lambda problem: REFERENCE,
    candidates=expert_candidates,
    probe=probe_experts,
    buckets=_BUCKETS,
    serves=lambda schedule, problem: not isinstance(schedule, Decode) or schedule.block_m >= problem.bucket,
)


def _by_matmul(
    x: Tensor, ids: Tensor, w: Tensor, bias: Tensor | None, out_dtype: torch.dtype, radices: tuple[int, ...]
) -> Tensor:
    out = x.new_zeros(len(x), w.shape[1], dtype=out_dtype)
    for expert in range(len(w)):
        rows = (ids == expert).nonzero()[:, 0]
        if len(rows):
            of_expert = None if bias is None else bias[expert]
            problem = matmul_gpu.gemm_problem(x, w[expert], of_expert, None, radices, out)
            schedule = reference_schedule(problem)
            out[rows] = matmul_launch.run_schedule(schedule, x[rows], w[expert], of_expert, None, radices, out_dtype)
    return out


def _operands(
    x: Tensor, ids: Tensor, w: Tensor, bias: Tensor | None, out_dtype: torch.dtype, radices: Sequence[int]
) -> _Operands:
    x = x.reshape(-1, x.shape[-1])
    if x.stride(1) != 1:
        x = x.contiguous()
    if w.stride(2) != 1 and w.stride(1) != 1:
        w = w.contiguous()
    ids = ids.reshape(-1).contiguous()
    choices = len(ids) // len(x) if len(x) else 1
    out = x.new_empty((len(ids), w.shape[1]), dtype=out_dtype)
    radices = tuple(radix for radix in radices if radix > 1)
    return _Operands(x, ids, w, None if bias is None else bias.contiguous(), out, choices, radices)


def _run(schedule: ExpertsSchedule, o: _Operands) -> None:
    if len(o.radices) > LEVELS:
        raise ScheduleError(f"expert_matmul: trees may have at most {LEVELS} levels, not {o.radices}")
    options = {
        "E": len(o.w),
        "HAS_BIAS": o.bias is not None,
        "BM": schedule.block_m,
        "BN": schedule.block_n,
        "BK": schedule.block_k,
        "num_warps": schedule.warps,
        "num_stages": schedule.stages,
        "enable_fp_fusion": False,
        **tree_options(o.radices),
        **launch_options(o.x.device),
    }
    if isinstance(schedule, Sorted):
        _run_sorted(schedule, o, options)
        return
    blocked = o.x.dtype is torch.float32
    step = matmul_kernels.FP32_BLOCK.value if blocked else schedule.block_k
    options |= {"CHOICES": o.choices, "SWAP": schedule.swapped, "BLOCKED": blocked, "EVEN_K": o.leaf_k % step == 0}
    if isinstance(schedule, Decode):
        _run_decode(schedule, o, options)
    else:
        _run_grouped(schedule, o, options)


def _run_decode(schedule: Decode, o: _Operands, options: dict[str, Any]) -> None:
    M, N = o.out.shape
    if schedule.block_m < M:
        raise ScheduleError(f"expert_matmul: {schedule} holds {schedule.block_m} rows, not {M}")
    experts_kernels.decode_kernel[(M, triton.cdiv(N, schedule.block_n))](
        o.x, o.ids, o.w, o.out, o.out if o.bias is None else o.bias, M, N, o.leaf_k, math.prod(o.radices),
        *o.x.stride(), *o.w.stride(), **options,
    )  # fmt: skip


def _run_grouped(schedule: Grouped, o: _Operands, options: dict[str, Any]) -> None:
    M, N = o.out.shape
    order, tiles = _grouped_rows(o, schedule.block_m)
    num_tiles = len(tiles) - 1
    experts_kernels.grouped_kernel[(num_tiles * triton.cdiv(N, schedule.block_n),)](
        o.x, order, tiles, _described(schedule, o) if schedule.descriptors else o.w, o.out,
        o.out if o.bias is None else o.bias, M, N, o.leaf_k, math.prod(o.radices), num_tiles,
        *o.x.stride(), *o.w.stride(), GROUP=schedule.group, TMA=schedule.descriptors, **options,
    )  # fmt: skip


def _run_sorted(schedule: Sorted, o: _Operands, options: dict[str, Any]) -> None:
    M, N = o.out.shape
    order, tiles = _grouped_rows(o, schedule.block_m)
    num_tiles = len(tiles) - 1
    w = _described(schedule, o)
    x = TensorDescriptor.from_tensor(_sorted_rows(o, order), [schedule.block_m, schedule.block_k])
    programs = min(num_tiles * triton.cdiv(N, schedule.block_n), multiprocessors(o.x.device))
    experts_kernels.sorted_kernel[(programs,)](
        x, order, tiles, w, o.out, o.out if o.bias is None else o.bias, M, N, o.leaf_k, math.prod(o.radices),
        num_tiles, GROUP=schedule.group, **options,
    )  # fmt: skip


def _described(schedule: Grouped | Sorted, o: _Operands) -> TensorDescriptor:
    """Return a descriptor of the weights as [E * N, K], for kernels that sum one chain of whole k-groups per leaf."""
    E, N, K = o.w.shape
    if o.x.dtype is torch.float32 and matmul_kernels.FP32_BLOCK.value < o.leaf_k:
        raise ScheduleError(f"expert_matmul: {schedule} sums one chain, not the blocks of float32")
    if o.radices and o.leaf_k % schedule.block_k:
        raise ScheduleError(f"expert_matmul: {schedule} needs whole k-groups, not leaves of {o.leaf_k}")
    return TensorDescriptor.from_tensor(o.w.view(E * N, K), [schedule.block_n, schedule.block_k])


def _grouped_rows(o: _Operands, block_m: int) -> tuple[Tensor, Tensor]:
    """Return rows sorted by expert [M], and tiles of them [worst case + 1, 3], as group_rows_kernel writes them."""
    M, groups = len(o.ids), o.w.shape[0] + 1
    num_tiles = min(M, M // block_m + groups)
    order, tiles = (torch.empty(shape, dtype=torch.int32, device=o.x.device) for shape in ((M,), (num_tiles + 1, 3)))
    experts_kernels.group_rows_kernel[(groups,)](
        o.ids, order, tiles, M, num_tiles, E=groups - 1, BINS=max(64, triton.next_power_of_2(groups + 1)), BM=block_m,
        CHUNK=min(_CHUNK, max(128, triton.next_power_of_2(M))), num_warps=8 if M >= 2048 else 4,
        **launch_options(o.x.device),
    )  # fmt: skip
    return order, tiles


def _sorted_rows(o: _Operands, order: Tensor) -> Tensor:
    """Copy x's rows into that order, [M, K]."""
    K = o.x.shape[1]
    out = o.x.new_empty((len(order), K))
    block = min(2048, triton.next_power_of_2(K))
    experts_kernels.gather_rows_kernel[(len(order), triton.cdiv(K, block))](
        o.x, order, out, K, o.x.stride(0), CHOICES=o.choices, BLOCK=block, num_warps=4, **launch_options(o.x.device)
    )
    return out
