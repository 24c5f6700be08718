"""TensorParallel and PipelineStage: which share of a model this process holds, and which processes hold the others.

Both are values that compile() passes to modules and operations; there is no global state. The group is one of
torch.distributed, referred to by name, because an operation of a graph can hold a name but not a group.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from detcompile.config import gpus_shared
from detcompile.errors import InvalidInput
from detcompile.torch_internals.distributed import device_types, process_group


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorParallel:
    """One rank of a tensor-parallel group.

    Attributes:
        size: ranks of the group. rank: number of this process in it. group: name of the process group.
        device: device of the rank's share; None for the device of the whole model.
    """

    size: int
    rank: int
    group: str
    device: torch.device | None = None

    def share(self, whole: int) -> slice:
        """Return the range of ``whole`` features that this rank holds: ranks hold ranges in order, equal up to one.

        Only exact arithmetic takes unequal ranges; elsewhere the caller has checked that they divide.
        """
        return slice(self.rank * whole // self.size, (self.rank + 1) * whole // self.size)

    def least(self, value: int) -> int:
        """Return the smallest of all ranks' values. All ranks must call this."""
        everyone = [0] * self.size
        dist.all_gather_object(everyone, value, group=process_group(self.group))
        return min(everyone)

    def require_equal(self, parts: Mapping[str, str]) -> None:
        """Compare ``parts`` with those of every other rank. All ranks must call this.

        Raises:
            InvalidInput: two ranks differ; the message names them, the parts, and both values.
        """
        everyone: list[dict[str, str]] = [{} for _ in range(self.size)]
        dist.all_gather_object(everyone, dict(parts), group=process_group(self.group))
        first = everyone[0]
        for rank, other in enumerate(everyone):
            differing = [name for name in {**first, **other} if first.get(name) != other.get(name)]
            if differing:
                parts_text = "; ".join(f"{name}: {first.get(name)!r} and {other.get(name)!r}" for name in differing)
                raise InvalidInput(
                    f"ranks 0 and {rank} of the tensor-parallel group do not hold the same model: {parts_text}. "
                    "Give every rank the same checkpoint, dtype, numerics and versions."
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineStage:
    """One pipeline stage: a range of a model's layers. The first also holds the embedding, the last the head.

    Attributes:
        size: stages of the pipeline. index: number of this one.
        device: where it computes; None for the model's device.
    """

    size: int
    index: int
    device: torch.device | None = None

    def layers(self, num_layers: int) -> range:
        """Return the layers of this stage. If they do not divide, the last stage, with the head, gets no extra layer.

        Raises:
            InvalidInput: there are more stages than layers.
        """
        if num_layers < self.size:
            raise InvalidInput(f"pp={self.size}: the model has {num_layers} layers, and every stage needs one")
        first, last = (-(-num_layers * index // self.size) for index in (self.index, self.index + 1))
        return range(first, last)


def rank_device(device_type: str, rank: int) -> torch.device:
    """Return the device of a rank of one machine: GPU r, or the GPUs in turn if ranks may share them."""
    if device_type != "cuda":
        return torch.device(device_type)
    return torch.device("cuda", rank % torch.cuda.device_count() if gpus_shared() else rank)


def backend_of_ranks(device_type: str) -> str:
    """Return the backend of the ranks' process group: NCCL on GPUs, but gloo if ranks may share them."""
    if device_type != "cuda":
        return "gloo"
    return "cuda:gloo" if gpus_shared() else "nccl"


def tensor_parallel(size: int, group: dist.ProcessGroup | None = None) -> TensorParallel:
    """Return the place of this process among ``size`` ranks. Its shares are on the GPU if the group is on GPUs.

    Args:
        group: the ranks' process group; None is all of torch.distributed. On GPUs, the current one is this rank's.

    Raises:
        InvalidInput: torch.distributed was not initialized, or the group has another size.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise InvalidInput(
            f"tp={size} wants {size} processes, each of which calls compile(): start them with torchrun "
            f"--nproc-per-node {size}, and call torch.distributed.init_process_group first"
        )
    chosen = dist.group.WORLD if group is None else group
    assert chosen is not None
    if chosen.size() != size:
        kind = "torch.distributed runs" if group is None else "the given group has"
        raise InvalidInput(f"tp={size}, but {kind} {chosen.size()} processes: pass tp_group, a group of {size} of them")
    on_gpus = device_types(chosen) == {"cuda"}
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpus else None
    return TensorParallel(size=size, rank=chosen.rank(), group=chosen.group_name, device=device)
