"""Data that ranks of a tensor-parallel group exchange unchanged: columns, and rows of an embedding.

Legend: M tokens, n columns of each rank, v rows of a table on each rank, D features, R ranks; ``group`` names a
torch.distributed group.

    all_gather_columns(x [M, n], group, columns) -> [M, columns]: ranks' columns side by side, without padding
    sharded_embedding(weight [v, D], ids, first, group) -> [..., D]: rows of a table; rank r has rows first = r v and
    up;
        zeros for an id outside the table

GPUs that map each other's memory do this in one kernel (gather_gpu.py). Otherwise the communication library does; if it
adds, it adds a row's bytes as integers, and all ranks but one contribute zeros.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.templates.collectives.gather_gpu import columns_over_peers, rows_over_peers
from detcompile.templates.collectives.peer_memory import peer_memory
from detcompile.templates.device.cuda_graphs import is_alone
from detcompile.templates.registration import define
from detcompile.torch_internals.distributed import process_group
from detcompile.torch_internals.operators import c10d


def gather(x: Tensor, group: str) -> Tensor:
    """Gather x [...] of every rank, contiguous -> [R, ...].

    It does not use the functional collective, which is the only one here that makes gloo read GPU memory as host
    memory.
    """
    ranks = process_group(group)
    gathered = x.new_empty((ranks.size(), *x.shape))
    dist.all_gather(list(gathered.unbind()), x, group=ranks)
    return gathered


def all_gather_columns(x: Tensor, group: str, columns: int, peers: bool = True) -> Tensor:
    """Run the op on any device. peers=False uses the library even if GPUs map each other's memory.

    Raises:
        InvalidInput: ``columns`` exceeds the ranks' columns.
    """
    held = process_group(group).size() * x.shape[1]
    if columns > held:
        raise InvalidInput(f"detcompile::all_gather_columns: the ranks have {held} columns together, not {columns}")
    if is_alone():
        return x.new_zeros((x.shape[0], columns))
    x = x.contiguous()
    memory = peer_memory(group, x.device) if peers and x.is_cuda else None
    out = None if memory is None else columns_over_peers(memory, x, columns)
    if out is not None:
        return out
    return gather(x, group).permute(1, 0, 2).flatten(1)[:, :columns].contiguous()


def sharded_embedding(weight: Tensor, ids: Tensor, first: int, group: str, peers: bool = True) -> Tensor:
    """Run the op on any device. peers=False uses the library even if GPUs map each other's memory.

    Raises:
        InvalidInput: ``first`` is not the index of this rank's first row.
    """
    rank = process_group(group).rank()
    if first != rank * weight.shape[0]:
        raise InvalidInput(
            f"detcompile::sharded_embedding: rank {rank} with {weight.shape[0]} rows begins at row"
            f" {rank * weight.shape[0]}, not {first}: give all ranks the same number of rows, in the order of the ranks"
        )
    if is_alone():
        return weight.new_zeros((*ids.shape, weight.shape[1]))
    memory = peer_memory(group, weight.device) if peers and weight.is_cuda else None
    out = None if memory is None else rows_over_peers(memory, weight, ids)
    if out is not None:
        return out
    local = ids - first
    held = (local >= 0) & (local < weight.shape[0])
    rows = torch.nn.functional.embedding(torch.where(held, local, 0), weight)
    rows = torch.where(held.unsqueeze(-1), rows, 0)
    unit = torch.int32 if rows.shape[-1] * rows.element_size() % 4 == 0 else torch.uint8
    return c10d.wait_tensor(c10d.all_reduce(rows.view(unit), "sum", group)).view(rows.dtype)


define(
    "all_gather_columns(Tensor x, str group, int columns) -> Tensor",
    {"x": "any M N", "columns": range(2**31)},
    cpu=all_gather_columns,
    cuda=all_gather_columns,
    fake=lambda x, group, columns: x.new_empty((x.shape[0], columns)),
)
define(
    "sharded_embedding(Tensor weight, Tensor ids, int first, str group) -> Tensor",
    {"weight": "any V D", "ids": "ids ...", "first": range(2**31)},
    cpu=sharded_embedding,
    cuda=sharded_embedding,
    fake=lambda weight, ids, first, group: weight.new_empty((*ids.shape, weight.shape[1])),
)
