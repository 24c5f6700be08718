"""Build a trainer's blocks from a Hugging Face module, with parameters under the same names."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from detcompile.errors import UnsupportedModel
from detcompile.orders.numerics import Numerics
from detcompile.passes.layers.structure import layer_list
from detcompile.passes.proof.certificate import Certificate
from detcompile.passes.training.tracing import TracedRegions, trace_regions
from detcompile.torch_internals.modules import child_table
from detcompile.training.blocks import Block, Holder, RegionCall, Source


class Built(NamedTuple):
    """The regions of a model in running order; those that are layers are modules."""

    first: RegionCall
    blocks: tuple[Block, ...]
    last: RegionCall
    certificate: Certificate  # for the forward

    @property
    def calls(self) -> list[RegionCall]:
        """All regions in running order."""
        return [self.first, *(block.call for block in self.blocks), self.last]


def build(model: PreTrainedModel, numerics: Numerics, max_context: int, root: nn.Module) -> Built:
    """Trace a model, which is changed in place, and register its parameters in ``root`` under their names.

    Trained parameters become float32; frozen ones are unchanged.

    Raises:
        UnsupportedModel: the model cannot be captured or trained faithfully.
        UncertifiedOp: an operation could make a row's bits depend on other rows.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    layers = layer_list(model)
    path = next(name for name, module in model.named_modules() if module is layers) if layers is not None else ""
    traced = trace_regions(model, numerics, max_context)
    dtypes = {name: parameter.dtype for name, parameter in named.items()}
    first, *middle, last = _calls(traced, named)
    blocks = tuple(Block(call, f"{path}.{index}.", dtypes) for index, call in enumerate(middle))
    for block in blocks:
        _hold(root, block.prefix.removesuffix("."), block)
    masters = {id(parameter): _master(parameter) for parameter in named.values()}
    for name, parameter in named.items():
        _hold(root, name, masters[id(parameter)])
    return Built(first, blocks, last, traced.certificate)


def _calls(traced: TracedRegions, named: Mapping[str, nn.Parameter]) -> Iterator[RegionCall]:
    """Yield the regions in running order."""
    names = {id(parameter): name for name, parameter in reversed(list(named.items()))}
    program, (fixed, of_step), unrolled = traced.program, traced.binding, traced.program.unrolled
    sources = [Source(constant=constant) for constant in fixed]
    for position, leaf, dim in of_step:
        sources[position] = Source(leaf=leaf, dim=dim)
    for position, constant in enumerate(fixed):
        if isinstance(constant, nn.Parameter):
            if id(constant) not in names:
                raise UnsupportedModel(
                    "a layer reads a parameter that is not in the checkpoint: the model can be served, but not trained"
                )
            sources[position] = Source(weight=names[id(constant)])
    for place, (region, positions) in enumerate(zip(unrolled.regions, unrolled.given, strict=True)):
        run: Any = program.runs[region]
        inputs = [sources[position] for position in positions]
        yield RegionCall(run, program.shared[region], inputs, place > 0, traced.differentiated)


def _hold(root: nn.Module, path: str, child: nn.Module | nn.Parameter) -> None:
    *parents, name = path.split(".")
    module = root
    for parent in parents:
        if parent not in child_table(module):
            module.add_module(parent, Holder())
        module = module.get_submodule(parent)
    if isinstance(child, nn.Parameter):
        module.register_parameter(name, child)
    else:
        module.add_module(name, child)


def _master(parameter: nn.Parameter) -> nn.Parameter:
    if not parameter.requires_grad:
        return nn.Parameter(parameter.detach(), requires_grad=False)
    return nn.Parameter(parameter.detach().float().clone())
