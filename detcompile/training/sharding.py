"""Sharding: FSDP2 over a trainer's blocks, with sums over ranks and micro-batches that are exact.

fully_shard gathers float32 shards in the forward's dtype, which moves bytes, and reduces float64 gradients, which are
multiples of one grid: no algorithm of the collective, and no number of ranks, changes a bit. It would round each
reduced sum to float32 before it adds it to ``.grad``; a hook adds it in float64 before that.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from detcompile.errors import InvalidInput

__all__ = ["shard_blocks", "whole"]


def shard_blocks(root: nn.Module, blocks: Sequence[nn.Module], dtype: torch.dtype, mesh: DeviceMesh | None) -> None:
    """fully_shard each block, and then ``root`` with what is left.

    Args:
        dtype: dtype that the forward takes parameters in.
        mesh: the ranks, of one dimension, or of two to replicate over the first; None for all there are.
    """
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float64, cast_forward_inputs=False)
    for module in (*blocks, root):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    for module in (*blocks, root):
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)  # a sum: the loss has the global denominator
        module.set_all_reduce_hook(_ExactSum(module))


def whole(parameter: Tensor) -> Tensor:
    """A parameter, gathered from the ranks that share it, which all call this."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


class _ExactSum:
    """Adds the reduced gradients of one FSDP group, float64, before they are rounded to the parameters' dtype.

    It goes by torch's rule: a ``.grad`` of None starts a new sum. FSDP's own addition then finds None.
    """

    def __init__(self, module: FSDPModule) -> None:
        groups = _groups_of(module)
        self._parameters = [held.sharded_param for group in groups for held in group.fsdp_params]
        self._sum: Tensor | None = None

    def __call__(self, reduced: Tensor) -> None:
        grads = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        if any(grad._local_tensor._version for grad in grads):
            raise InvalidInput(
                "a gradient was changed in place (zeroed, scaled) and then added to: start each step with"
                " zero_grad(set_to_none=True), and clip after the last micro-batch"
            )
        if grads and self._sum is not None:
            reduced += self._sum
        self._sum = reduced.clone()
        for parameter in self._parameters:
            parameter.grad = None


def _groups_of(module: FSDPModule) -> list[Any]:
    """What torch keeps of a module that is sharded; its name changed between versions."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return list(groups) if groups else [state._fsdp_param_group]
