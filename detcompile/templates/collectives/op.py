"""Sums over the ranks of a tensor-parallel group: row-parallel products, added in one tree. See gather.py for copies.

Legend: M tokens, N features, K input features over all ranks, R ranks; ``group`` names a torch.distributed group.

    tree_all_reduce(partial [..., N] float32, bias, residual, radices_above, group, out_dtype) -> [..., N] everywhere:
        acc = the ranks' partials in the levels of the tree above the ranks, float32
        y   = round(acc + bias);   out = round(residual + y)           the epilogue of detcompile::matmul
    matmul_all_reduce(x [M, K/R], w [N, K/R], bias, residual, radices, radices_above, group, out_dtype) -> [M, N]:
        tree_all_reduce of each rank's x @ w.T, which is its subtree of Tree(K, radices_above + radices)

So matmul_all_reduce on R ranks has the bits of matmul with the whole tree on one rank. Partials are sent unchanged, and
every sum follows the tree's order. Small sums take one shot (every rank gathers all partials and adds them), large ones
two (each rank adds its share of the tokens, then the rounded rows are gathered). GPUs that map each other's memory do
this in one kernel (gpu.py), and for very large sums while they are still multiplying (overlapped.py). The choice
affects no bit. The communication library never adds floating-point numbers.
"""

import math
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.templates.collectives.gather import gather
from detcompile.templates.collectives.gpu import LEVELS, MOST_ELEMENTS, Reduction, reduce_over_peers
from detcompile.templates.collectives.overlapped import LEAST_TOKENS, MOST_FEATURES, reduce_overlapped
from detcompile.templates.collectives.peer_memory import Landing, PeerMemory, landing_of, peer_memory
from detcompile.templates.cpu import library as cpu_library
from detcompile.templates.device.cuda_graphs import is_alone, is_for_graph
from detcompile.templates.matmul.gpu import matmul_cuda
from detcompile.templates.matmul.launch import sum_partials_cuda
from detcompile.templates.matmul.op import matmul_cpu
from detcompile.templates.registration import define
from detcompile.torch_internals.distributed import process_group
from detcompile.torch_internals.operators import c10d

TWO_SHOT_BYTES = 1 << 20  # of one partial; from this size on sending less is worth a second step

_CALL = struct.Struct("PqPqqPPqPqqqPq5i")  # struct Call of matmul_call.h


def partial_product(x: Tensor, w: Tensor, radices: Sequence[int], out: Tensor | None = None) -> Tensor:
    """Return this rank's subtree of x [M, K/R] @ w [N, K/R]^T, float32 [M, N]; on a GPU in ``out`` if passed."""
    if x.is_cuda:
        return matmul_cuda(x, w, None, None, radices, torch.float32, out)
    return matmul_cpu(x, w, None, None, radices, torch.float32)


def matmul_all_reduce(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    radices: Sequence[int],
    radices_above: Sequence[int],
    group: str,
    out_dtype: torch.dtype,
    overlapped: bool | None = None,
) -> Tensor:
    """Run the op on any device.

    Args:
        overlapped: whether to send partials while others are computed, if possible. None chooses: for many tokens
            inside ``for_graph``, because launching all the parts takes the host longer than they save.

    Raises:
        InvalidInput: the product of radices_above is not the group's size.
    """
    _require_tree(radices_above, group)
    M, N = x.shape[0], w.shape[0]
    if is_alone():
        partial_product(x, w, radices)
        return x.new_zeros((M, N), dtype=out_dtype)
    memory = peer_memory(group, x.device) if x.is_cuda else None
    place = None if memory is None else _landing_for(memory, group, M, N, radices_above, overlapped)
    if memory is None or place is None:
        partial = partial_product(x, w, radices)
        return tree_all_reduce(partial, bias, residual, radices_above, group, out_dtype)
    partial, out = x.new_empty((M, N), dtype=torch.float32), x.new_empty((M, N), dtype=out_dtype)

    def make(rows: slice) -> None:
        partial_product(x[rows], w, radices, partial[rows])

    reduction = Reduction(partial, *_epilogue(bias, residual), tuple(radices_above), out)
    reduce_overlapped(memory, place, reduction, make)
    return out


def _landing_for(
    memory: PeerMemory, group: str, M: int, N: int, radices: Sequence[int], wanted: bool | None
) -> Landing | None:
    """Return the landing buffers for sums of this size; None if another method is used."""
    wanted = (M >= LEAST_TOKENS and is_for_graph()) if wanted is None else wanted
    if not wanted or M == 0 or _levels(radices) > LEVELS or not 0 < N <= MOST_FEATURES:
        return None
    return landing_of(group, memory.flags.device)


def _require_tree(radices: Sequence[int], group: str) -> None:
    num_ranks = process_group(group).size()
    if math.prod(radices) != num_ranks:
        raise InvalidInput(
            f"detcompile::tree_all_reduce: the product of the radices {tuple(radices)} must be the {num_ranks} ranks of"
            " the group. Take them from Numerics."
        )


def _levels(radices: Sequence[int]) -> int:
    return sum(radix > 1 for radix in radices)


def tree_all_reduce(
    partial: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    radices: Sequence[int],
    group: str,
    out_dtype: torch.dtype,
    two_shot: bool | None = None,
    peers: bool = True,
    overlapped: bool = False,
) -> Tensor:
    """Run the op on any device. All methods give the same bits.

    Args:
        two_shot: forces two shots or one; None chooses the faster.
        peers: False uses the library even if GPUs map each other's memory.
        overlapped: copy engines send the partials if possible; without a concurrent product this is not faster.

    Raises:
        InvalidInput: the product of the radices is not the group's size.
    """
    _require_tree(radices, group)
    shape = partial.shape
    if is_alone():
        return partial.new_zeros(shape, dtype=out_dtype)
    partial = partial.flatten(0, -2).contiguous()
    residual = None if residual is None else residual.flatten(0, -2)
    memory = peer_memory(group, partial.device) if peers and partial.is_cuda else None
    if memory is not None and _levels(radices) <= LEVELS and 0 < partial.numel() <= MOST_ELEMENTS:
        out = partial.new_empty(partial.shape, dtype=out_dtype)
        reduction = Reduction(partial, *_epilogue(bias, residual), tuple(radices), out)
        M, N = out.shape
        place = None if two_shot is not None else _landing_for(memory, group, M, N, radices, overlapped)
        if place is None:
            reduce_over_peers(memory, reduction, two_shot)
        else:
            reduce_overlapped(memory, place, reduction)
        return out.view(shape)
    if two_shot is None:
        two_shot = partial.numel() * partial.element_size() >= TWO_SHOT_BYTES
    if two_shot:
        return _reduce_then_gather(partial, bias, residual, radices, group, out_dtype).view(shape)
    return add_partials(gather(partial, group), bias, residual, radices, out_dtype).view(shape)


def add_partials(
    partials: Tensor, bias: Tensor | None, residual: Tensor | None, radices: Sequence[int], out_dtype: torch.dtype
) -> Tensor:
    """Add float32 partials [R, M, N] of the ranks -> [M, N], with the epilogue of the matmul template."""
    _, M, N = partials.shape
    bias, residual = _epilogue(bias, residual)
    out = partials.new_empty((M, N), dtype=out_dtype)
    if out.numel() == 0:
        return out
    if partials.is_cuda:
        sum_partials_cuda(partials, bias, residual, tuple(radices), out)
        return out
    call = _CALL.pack(
        partials.data_ptr(),
        N,
        0,
        0,
        0,
        cpu_library.address(bias),
        cpu_library.address(residual),
        0 if residual is None else residual.stride(0),
        out.data_ptr(),
        M,
        N,
        math.prod(radices),
        cpu_library.radices_address(tuple(radices)),
        len(radices),
        0,
        cpu_library.dtype_code(bias),
        cpu_library.dtype_code(residual),
        cpu_library.dtype_code(out),
        cpu_library.thread_count(),
    )
    cpu_library.library().detcompile_add_partials(call)
    return out


def _epilogue(bias: Tensor | None, residual: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return bias and residual with unit strides."""
    if residual is not None and residual.stride(-1) != 1:
        residual = residual.contiguous()
    return None if bias is None else bias.contiguous(), residual


def _reduce_then_gather(
    partial: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    radices: Sequence[int],
    group: str,
    out_dtype: torch.dtype,
) -> Tensor:
    """Add the r-th share of the tokens on rank r, then gather the rounded shares. Missing rows are padding."""
    M, N = partial.shape
    ranks = process_group(group)
    num_ranks, rank = ranks.size(), ranks.rank()
    share = -(-M // num_ranks)
    sent = torch.nn.functional.pad(partial, (0, 0, 0, share * num_ranks - M))
    splits = [share] * num_ranks
    received = c10d.wait_tensor(c10d.all_to_all_single(sent, splits, splits, group))
    if residual is not None:
        residual = residual[rank * share : (rank + 1) * share]
        residual = torch.nn.functional.pad(residual, (0, 0, 0, share - len(residual)))
    total = add_partials(received.view(num_ranks, share, N), bias, residual, radices, out_dtype)
    return gather(total, group).view(-1, N)[:M].contiguous()


define(
    "matmul_all_reduce(Tensor x, Tensor w, Tensor? bias, Tensor? residual, int[] radices, int[] radices_above,"
    " str group, ScalarType out_dtype) -> Tensor",
    {"x": "float M K", "w": "x N K", "bias": "float N", "residual": "float M N"},
    cpu=matmul_all_reduce,
    cuda=matmul_all_reduce,
    fake=lambda x, w, *rest: x.new_empty((x.shape[0], w.shape[0]), dtype=rest[-1]),
)
define(
    "tree_all_reduce(Tensor partial, Tensor? bias, Tensor? residual, int[] radices, str group, ScalarType out_dtype)"
    " -> Tensor",
    {"partial": "float32 ... M N", "bias": "float N", "residual": "float ... M N"},
    cpu=tree_all_reduce,
    cuda=tree_all_reduce,
    fake=lambda partial, *rest: partial.new_empty(partial.shape, dtype=rest[-1]),
)
