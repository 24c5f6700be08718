"""Blocks: the regions of a forward graph as modules, with the parameters under Hugging Face's names.

A block owns the parameters that only its layer reads; the trainer owns the others. A block is the unit of fully_shard,
of recomputation and of compilation.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from detcompile.errors import InvalidInput
from detcompile.passes.proof.certificate import Certificate
from detcompile.passes.training.regions import TrainedRegion
from detcompile.templates.cpu.fp_mode import float_mode
from detcompile.torch_internals.autograd import version_of
from detcompile.torch_internals.modules import global_hooks, hooks_of
from detcompile.training.grad_accumulator import GradAccumulator, grad_handle


class Holder(nn.Module):
    """An empty module that stands for one component of a parameter's dotted name."""


class Source(NamedTuple):
    """The origin of a region's input, other than rows and shared values: a weight, a constant or a leaf."""

    weight: str | None = None  # the name of a parameter
    constant: Tensor | None = None
    leaf: int | None = None  # index of a leaf of the step
    dim: int | None = None  # pass this dimension's extent instead of the leaf


class StepTensors(NamedTuple):
    """One packed step."""

    leaves: tuple[Tensor, ...]  # inputs of the forward: step.step_leaves
    table: Tensor  # [L + 1] int32: boundaries of the leaves of token sums, sequence by sequence


class Weight(NamedTuple):
    """A parameter as an input of a region."""

    value: Tensor  # in the forward's compute dtype, without a gradient
    handle: Tensor | None  # float64 stand-in whose gradient is the parameter's; None if frozen


def weights_of(
    parameters: Mapping[str, nn.Parameter],
    accumulators: Mapping[str, GradAccumulator],
    dtypes: Mapping[str, torch.dtype],
) -> dict[str, Weight]:
    """Return parameters as regions' inputs; each has one handle, however many regions read it.

    Raises:
        InvalidInput: a parameter was frozen when the trainer was created and is trained now, or was replaced.
    """
    handles: dict[int, Tensor] = {}  # by parameter, which may have several names
    for name, parameter in parameters.items():
        if not parameter.requires_grad or id(parameter) in handles:
            continue
        if name not in accumulators:
            raise InvalidInput(
                f"{name} was frozen when the trainer was created, and requires a gradient now. Create the trainer from "
                "a model in which it is trained, and freeze it afterwards."
            )
        handles[id(parameter)] = grad_handle(parameter, accumulators[name])
    return {
        name: Weight(parameter.detach().to(dtypes[name]), handles.get(id(parameter)))
        for name, parameter in parameters.items()
    }


def require_no_hooks(trainer: nn.Module) -> None:
    """Reject hooks on a trainer's modules: the modules only hold parameters, so the hooks would never run.

    FSDP's hooks are allowed, and so are hooks on the trainer itself, which run around its forward.

    Raises:
        InvalidInput: names the module.
    """
    for name, module in trainer.named_modules():
        hooks = hooks_of(module)
        others = [hook for hook in hooks if not str(getattr(hook, "__module__", "")).startswith("torch.distributed.")]
        if name and (others or "forward" in module.__dict__):
            raise InvalidInput(
                f"{name} has {'hooks' if others else 'a replaced forward'}, which would be ignored: a trainer runs "
                "compiled layers, not its modules. Remove them, and read or change the model before trainer()."
            )
    if global_hooks():
        raise InvalidInput(
            "hooks are registered for all modules (torch.nn.modules.module.register_module_..._hook), but a trainer "
            "runs compiled layers, not its modules. Remove these hooks."
        )


class RegionCall:
    """A region, and the origin of its inputs for one layer.

    Args:
        shared: indices of the first region's values that it takes.
        sources: origins of its other inputs, in order.
        rows: True if it takes the previous region's rows.
        differentiated: indices of the shared values that have a gradient.
    """

    def __init__(
        self,
        region: TrainedRegion,
        shared: Sequence[int],
        sources: Sequence[Source],
        rows: bool,
        differentiated: Collection[int],
    ) -> None:
        self.region, self.shared, self.sources = region, tuple(shared), tuple(sources)
        self._first = len(self.shared) + rows
        with_gradient = [rows + place for place, number in enumerate(self.shared) if number in differentiated]
        self._differentiated = (*range(rows), *with_gradient)
        self._sizes = region.sizes()

    @property
    def weights(self) -> list[str]:
        """Names of the parameters that the region reads."""
        return [source.weight for source in self.sources if source.weight is not None]

    def prepare(self, trained: Collection[str | None]) -> Certificate | None:
        """Compile the region unless another layer already did; return the proof of its backward, if it has one.

        Args:
            trained: names of the trained parameters.
        """
        positions = self._positions(trained)
        self.region.program(positions, self._differentiated)
        return self.region.backwards[positions, self._differentiated]

    def __call__(
        self, rows: Tensor | None, shared: Sequence[Tensor], step: StepTensors, weights: Mapping[str, Weight]
    ) -> Sequence[Tensor]:
        """Run the region and return its outputs."""
        inputs: list[Any] = ([] if rows is None else [rows]) + [shared[place] for place in self.shared]
        inputs += [self._input(source, step, weights) for source in self.sources]
        for position, (place, dim) in self._sizes.items():
            inputs[position] = inputs[place].shape[dim]
        trained = self._positions([name for name, weight in weights.items() if weight.handle is not None])
        inputs.append(step.table)
        inputs += [weights[str(self.sources[position - self._first].weight)].handle for position in trained]
        with float_mode(step.table.device, torch.get_num_threads()):
            outputs: Sequence[Tensor] = self.region.program(trained, self._differentiated)(*inputs)
        return outputs

    def _input(self, source: Source, step: StepTensors, weights: Mapping[str, Weight]) -> Any:
        if source.weight is not None:
            return weights[source.weight].value
        if source.leaf is None:
            return source.constant
        leaf = step.leaves[source.leaf]
        return leaf if source.dim is None else leaf.shape[source.dim]

    def _positions(self, trained: Collection[str | None]) -> tuple[int, ...]:
        names = set(trained) - {None}
        return tuple(self._first + place for place, source in enumerate(self.sources) if source.weight in names)


class Block(Holder):
    """One layer: forward(rows [1, T, H], shared, step, weights of others) -> rows [1, T, H].

    Args:
        prefix: prefix of its parameters' names.
        dtypes: the forward's dtype of each parameter, by full name.

    Attributes:
        accumulators: gradient accumulators of trained parameters, by full name.
        recompute: True to keep only the input rows for the backward and recompute the rest: the same bits.
    """

    def __init__(self, call: RegionCall, prefix: str, dtypes: Mapping[str, torch.dtype]) -> None:
        super().__init__()
        self.call, self.prefix, self.dtypes = call, prefix, dtypes
        self.accumulators: dict[str, GradAccumulator] = {}
        self.recompute = False

    def forward(
        self, rows: Tensor, shared: Sequence[Tensor], step: StepTensors, others: Mapping[str, Weight]
    ) -> Tensor:
        """Run the block on its rows.

        Raises:
            InvalidInput: in a backward that computes the block again: its parameters were changed in the meantime.
        """

        def run(rows: Tensor) -> Tensor:
            named = {self.prefix + name: parameter for name, parameter in self.named_parameters(remove_duplicate=False)}
            weights = {**others, **weights_of(named, self.accumulators, self.dtypes)}
            return self.call(rows, shared, step, weights)[0]

        if self.recompute and torch.is_grad_enabled():
            writes = self._num_writes()

            def run_again(rows: Tensor) -> Tensor:
                if self._num_writes() != writes:
                    raise InvalidInput(
                        f"parameters of {self.prefix.removesuffix('.')} were changed after the forward, and the"
                        " backward computes the layer again (checkpoint=True): run the forward again"
                    )
                return run(rows)

            recomputed: Tensor = checkpoint(run_again, rows, use_reentrant=False)
            return recomputed
        return run(rows)

    def _num_writes(self) -> int:
        """Return how often parameters were changed in place; 0 under FSDP, which writes gathered ones."""
        return 0 if isinstance(self, FSDPModule) else sum(version_of(parameter) for parameter in self.parameters())
