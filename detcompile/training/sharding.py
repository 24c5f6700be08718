"""Sharding: FSDP2 over a trainer's blocks, with exact sums over ranks and micro-batches.

fully_shard gathers float32 shards in the forward's dtype, which only moves bytes, and reduces float64 gradients, which
are multiples of one grid: neither the collective's algorithm nor the number of ranks changes a bit. It would round each
reduced sum to float32 before adding it to ``.grad``; a hook adds it in float64 before that.
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


class Unreplicated(nn.Module):
    """A module that rejects torch's replicas, whose gradients are averaged and added in float32."""

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> NoReturn:  # the first attribute that DistributedDataParallel reads
        raise UnsupportedModel(
            "DistributedDataParallel adds rounded gradients, so bits depend on ranks and micro-batches: call"
            " trainer.shard() instead; a mesh of two dimensions, (ranks, 1), keeps every parameter whole on each rank"
        )

    def _replicate_for_data_parallel(self) -> NoReturn:
        raise UnsupportedModel("DataParallel adds rounded gradients: start a process per GPU and call trainer.shard()")


class Changes:
    """Rejects gradients that were changed and then added to, on every rank, at the end of that backward.

    By then FSDP's state is consistent again, and one collective covers all groups.

    Attributes:
        sums: the sums of all groups; cleared before the error.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.sums: list[ExactSum] = []
        self._group = mesh.get_group(mesh.ndim - 1)  # replicas hold the same rows, and see the same changes
        self._flags: list[Tensor] = []

    def note(self, changed: Tensor) -> None:
        """Record one group's flag, a bool, during a backward."""
        self._flags.append(changed)
        call_after_backward(self._refuse)

    def _refuse(self) -> None:
        if not self._flags:
            return  # the first callback took all flags
        changed = torch.stack(self._flags).any().int()
        self._flags.clear()
        dist.all_reduce(changed, op=dist.ReduceOp.MAX, group=self._group)
        if changed.item():
            for held in self.sums:
                held.clear()
            raise InvalidInput(
                "a gradient was changed in place (scaled, clipped) or replaced, and then added to; all are None now:"
                " start each step with zero_grad(), and clip after the last micro-batch"
            )


class ExactSum:
    """Adds the reduced float64 gradients of one FSDP group before they are rounded to the parameters' dtype.

    It follows torch's rules for each parameter and element: a ``.grad`` of None, or zeros in it, start a new sum.
    FSDP's own addition then sees None. Other values written to ``.grad`` are not on the grid, and are rejected.

    Args:
        changes: rejects them.
    """

    def __init__(self, module: FSDPModule, changes: "Changes") -> None:
        self._changes = changes
        self._held = [param for group in fsdp_groups(module) for param in group.fsdp_params]
        self._sums: dict[Tensor, Tensor] = {}  # by parameter, the rows of this rank

    def clear(self) -> None:
        """Free the sums and set every ``.grad`` to None."""
        self._sums.clear()
        for held in self._held:
            held.sharded_param.grad = None

    def __call__(self, reduced: Tensor) -> None:
        """Add the group's reduced gradients to its sums."""
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
            self._sums[parameter] = mine  # FSDP rounds a copy next
            parameter.grad = None
        if changed:
            self._changes.note(torch.stack(changed).any())


def _earlier(grad: Tensor, exact: Tensor) -> tuple[Tensor, Tensor]:
    """Return the float64 sum behind a ``.grad``, zero where ``.grad`` is; and whether other values were written."""
    kept = grad.view(torch.int32) == exact.to(grad.dtype).view(torch.int32)  # compares bits, so NaN equals NaN
    return exact.where(kept, 0.0), ~(kept | (grad == 0)).all()


def mesh_of(mesh: Any, device: str) -> DeviceMesh:
    """Return the mesh, or by default a mesh of all ranks in one dimension.

    Args:
        device: type of the parameters' device.

    Raises:
        InvalidInput: there are no ranks, or ``mesh`` is not a mesh of these devices with one or two dimensions.
    """
    if not dist.is_initialized():
        raise InvalidInput(
            "there are no ranks to share the parameters: start with torchrun, and call dist.init_process_group() first"
        )
    mesh = init_device_mesh(device, (dist.get_world_size(),)) if mesh is None else mesh
    if not isinstance(mesh, DeviceMesh) or mesh.ndim > 2 or mesh.device_type != device:
        raise InvalidInput(
            f"mesh {mesh!r}: pass a DeviceMesh of {device!r}, where the parameters are, with one dimension of ranks, or"
            " with two, to replicate over the first"
        )
    return mesh


def shard_blocks(root: nn.Module, blocks: Sequence[nn.Module], dtype: torch.dtype, mesh: DeviceMesh) -> list[ExactSum]:
    """Apply fully_shard to each block, then to ``root`` for the rest; return the objects that add up gradients.

    Args:
        dtype: the forward's dtype of parameters.
        mesh: the ranks, in one dimension, or in two to replicate over the first.
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
    """Return a parameter gathered from the ranks that share it, all of which must call this."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def whole_weights(module: nn.Module, dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    """Return every whole parameter by every name in ``dtypes``, in that dtype.

    Other parameters belong to modules that a user added. Ranks that share the parameters must all call this.
    """
    gathered: dict[int, Tensor] = {}
    by_name = {}
    known = ((name, one) for name, one in module.named_parameters(remove_duplicate=False) if name in dtypes)
    for name, parameter in known:
        if id(parameter) not in gathered:
            gathered[id(parameter)] = whole(parameter.detach()).to(dtypes[name])
        by_name[name] = gathered[id(parameter)]
    return by_name
