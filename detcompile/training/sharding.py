"""Sharding: FSDP2 over a trainer's blocks, with sums over ranks and micro-batches that are exact.

fully_shard gathers float32 shards in the forward's dtype, which moves bytes, and reduces float64 gradients, which are
multiples of one grid: no algorithm of the collective, and no number of ranks, changes a bit. It would round each
reduced sum to float32 before it adds it to ``.grad``; a hook adds it in float64 before that.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from detcompile.errors import InvalidInput, UnsupportedModel
from detcompile.torch_internals.autograd import call_after_backward
from detcompile.torch_internals.distributed import fsdp_groups
from detcompile.training.optimizer import local_part

__all__ = ["ExactSum", "Unreplicated", "mesh_of", "shard_blocks", "whole", "whole_weights"]


class Unreplicated(nn.Module):
    """A module that refuses torch's replicas, whose gradients are averaged and added in float32."""

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> NoReturn:  # DistributedDataParallel reads it first of all
        raise UnsupportedModel(
            "DistributedDataParallel adds rounded gradients, so that bits follow ranks and micro-batches: call"
            " trainer.shard() instead; a mesh of two dimensions, (ranks, 1), keeps every parameter whole on each rank"
        )

    def _replicate_for_data_parallel(self) -> NoReturn:
        raise UnsupportedModel("DataParallel adds rounded gradients: start a process a GPU and call trainer.shard()")


class Changes:
    """Refuses gradients that were changed and added to, on every rank, at the end of the backward that found them.

    FSDP has its own state in order again by then, and one collective does for all groups.

    Attributes:
        sums: the sums of all groups, which a refusal clears.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.sums: list[ExactSum] = []
        self._group = mesh.get_group(mesh.ndim - 1)  # others hold the same rows, and find the same
        self._found: list[Tensor] = []

    def note(self, changed: Tensor) -> None:
        """Take what one group found, a bool, during a backward."""
        self._found.append(changed)
        call_after_backward(self._refuse)

    def _refuse(self) -> None:
        if not self._found:
            return  # the first of these callbacks took all
        found = torch.stack(self._found).any().int()
        self._found.clear()
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._group)
        if found.item():
            for held in self.sums:
                held.clear()
            raise InvalidInput(
                "a gradient was changed in place (scaled, clipped) or replaced, and then added to; all are None now:"
                " start each step with zero_grad(), and clip after the last micro-batch"
            )


class ExactSum:
    """Adds the reduced gradients of one FSDP group, float64, before they are rounded to the parameters' dtype.

    It goes by torch's rules, each parameter and element by itself: a ``.grad`` of None, and zeros in it, start a new
    sum. FSDP's own addition then finds None. What else was written there is on no grid, and is refused.

    Args:
        changes: refuses it.
    """

    def __init__(self, module: FSDPModule, changes: "Changes") -> None:
        self._changes = changes
        self._held = [held for group in fsdp_groups(module) for held in group.fsdp_params]
        self._sums: dict[Tensor, Tensor] = {}  # by parameter, the rows of this rank

    def clear(self) -> None:
        """Free the sums, where every ``.grad`` is None or is to be."""
        self._sums.clear()
        for held in self._held:
            held.sharded_param.grad = None

    def __call__(self, reduced: Tensor) -> None:
        trained = [held for held in self._held if held.unsharded_param.requires_grad]
        sizes = [held.padded_sharded_param_size.numel() for held in trained]
        if sum(sizes) != reduced.numel():
            raise InvalidInput(
                "some parameters of a block have a gradient and others have none: call backward() without inputs"
            )
        changed = []
        for held, part in zip(trained, reduced.split(sizes), strict=True):
            parameter = held.sharded_param
            before, grad = self._sums.pop(parameter, None), parameter.grad
            mine = part[: held.sharded_size.numel()]
            if grad is not None:
                earlier, other = _earlier(local_part(grad).flatten(), mine.new_zeros(()) if before is None else before)
                mine += earlier
                changed.append(other)
            self._sums[parameter] = mine  # what FSDP rounds next is a copy
            parameter.grad = None
        if changed:
            self._changes.note(torch.stack(changed).any())


def _earlier(grad: Tensor, exact: Tensor) -> tuple[Tensor, Tensor]:
    """The float64 sum that a ``.grad`` is of, zero where that is; and whether it is elsewhere another's."""
    kept = grad.view(torch.int32) == exact.to(grad.dtype).view(torch.int32)  # NaN is NaN
    return exact.where(kept, 0.0), ~(kept | (grad == 0)).all()


def mesh_of(given: Any, device: str) -> DeviceMesh:
    """A mesh that was given, or all ranks in one dimension.

    Args:
        device: type of the parameters' device.

    Raises:
        InvalidInput: there are no ranks, or what was given is no mesh of one or two dimensions of such devices.
    """
    if not dist.is_initialized():
        raise InvalidInput(
            "no ranks share the parameters: start with torchrun, and call dist.init_process_group() first"
        )
    mesh = init_device_mesh(device, (dist.get_world_size(),)) if given is None else given
    if not isinstance(mesh, DeviceMesh) or mesh.ndim > 2 or mesh.device_type != device:
        raise InvalidInput(
            f"mesh {mesh!r}: give a DeviceMesh of {device!r}, where the parameters are, with one dimension of ranks, or"
            " two, to replicate over the first"
        )
    return mesh


def shard_blocks(root: nn.Module, blocks: Sequence[nn.Module], dtype: torch.dtype, mesh: DeviceMesh) -> list[ExactSum]:
    """fully_shard each block, and then ``root`` with what is left; returns what adds up their gradients.

    Args:
        dtype: dtype that the forward takes parameters in.
        mesh: the ranks, of one dimension, or of two to replicate over the first.
    """
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float64, cast_forward_inputs=False)
    for module in (*blocks, root):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    changes = Changes(mesh)
    for module in (*blocks, root):
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)  # a sum: the loss has the global denominator
        changes.sums.append(ExactSum(module, changes))
        module.set_all_reduce_hook(changes.sums[-1])
    return changes.sums


def whole(parameter: Tensor) -> Tensor:
    """A parameter, gathered from the ranks that share it, which all call this."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def whole_weights(module: nn.Module, dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    """Every parameter by every name, whole and in the dtype of its name; ranks that share them call this together."""
    found: dict[int, Tensor] = {}
    by_name = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) not in found:
            found[id(parameter)] = whole(parameter.detach()).to(dtypes[name])
        by_name[name] = found[id(parameter)]
    return by_name
