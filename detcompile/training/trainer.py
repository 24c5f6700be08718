"""Trainer: a causal LM to train, whose logits are the bytes that serve it, and whose gradients are exact sums."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from detcompile.errors import InvalidInput, UnsupportedModel
from detcompile.models.call_arguments import require_tensors
from detcompile.orders.numerics import Numerics
from detcompile.passes.programs.layer_views import layer_list
from detcompile.passes.training.tracing import TracedRegions, trace_regions
from detcompile.runtime.dense.padded_batch import check_batch, repad, unpad
from detcompile.training.blocks import Block, Holder, RegionCall, Source, StepTensors, Weight, weights_of
from detcompile.training.doors import Ledger
from detcompile.training.packing import packed_step

__all__ = ["Trainer"]


class Trainer(nn.Module):
    """A causal LM to train. Made by ``detcompile.trainer``.

    Its parameters have Hugging Face's names; those that are trained are float32, and rounded to the model's dtype for
    the forward.
    """

    def __init__(self, model: PreTrainedModel, numerics: Numerics, max_context: int) -> None:
        super().__init__()
        self.config, self.numerics, self.max_context = model.config, numerics, max_context
        embedding = model.get_input_embeddings()
        self.vocab_size = embedding.weight.shape[0]
        named = dict(model.named_parameters(remove_duplicate=False))
        layers = layer_list(model)
        path = next((name for name, module in model.named_modules() if module is layers), "")
        traced = trace_regions(model, numerics, max_context)
        self._dtypes = {name: parameter.dtype for name, parameter in named.items()}
        self._build(named, path, traced)


    def _build(self, named: Mapping[str, nn.Parameter], path: str, traced: TracedRegions) -> None:
        calls = list(_calls(traced, {id(parameter): name for name, parameter in reversed(named.items())}))
        self._first, *layers, self._last = calls
        self._blocks = []
        for index, call in enumerate(layers):
            prefix = f"{path}.{index}."
            block = Block(call, prefix, self._dtypes)
            self._blocks.append(block)
            self._hold(f"{path}.{index}", block)
        masters = {id(parameter): _master(parameter) for parameter in named.values()}
        for name, parameter in named.items():
            self._hold(name, masters[id(parameter)])
        ledgers = {id(parameter): Ledger(parameter) for parameter in masters.values() if parameter.requires_grad}
        for block in self._blocks:
            block.ledgers = {block._prefix + name: ledgers[id(parameter)] for name, parameter in block.named_parameters(remove_duplicate=False) if id(parameter) in ledgers}
        self._ledgers = {name: ledgers[id(parameter)] for name, parameter in self.named_parameters(remove_duplicate=False) if id(parameter) in ledgers}
        own = {name for name in named if not any(name.startswith(block._prefix) for block in self._blocks)}
        self._own = tuple(sorted({name for call in calls for name in call.weights if name in own}))

    def _hold(self, path: str, held: nn.Module | nn.Parameter) -> None:
        *parents, name = path.split(".")
        module: nn.Module = self
        for parent in parents:
            if parent not in module._modules:
                module.add_module(parent, Holder())
            module = module._modules[parent]
        module.register_parameter(name, held) if isinstance(held, nn.Parameter) else module.add_module(name, held)

    def _rows(self, step: StepTensors, weights: Mapping[str, Weight]) -> Tensor:
        rows, *shared = self._first(None, (), step, weights)
        for block in self._blocks:
            rows = block(rows, shared, step, weights)
        return rows

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, labels=None):
        batch = unpad(*require_tensors(input_ids, attention_mask, position_ids, labels))
        check_batch(batch, self.vocab_size, self.max_context)
        step = packed_step(batch, 1024, input_ids.device)
        parameters = {name: self.get_parameter(name) for name in self._own}
        weights = weights_of(parameters, self._ledgers, self._dtypes)
        rows = self._rows(step, weights)
        logits = self._last(rows, (), step, weights)[0]
        return CausalLMOutput(logits=repad(logits, batch.mask))


def _calls(traced: TracedRegions, names: Mapping[int, str]) -> Iterator[RegionCall]:
    """The regions in the order in which they run."""
    program, (fixed, of_step), unrolled = traced.program, traced.binding, traced.program.unrolled
    sources = [Source(constant=given) for given in fixed]
    for position, leaf, dim in of_step:
        sources[position] = Source(leaf=leaf, dim=dim)
    for position, given in enumerate(fixed):
        if isinstance(given, nn.Parameter):
            if id(given) not in names:
                raise UnsupportedModel("a layer was rewritten with weights of its own: such a model is served, not trained")
            sources[position] = Source(weight=names[id(given)])
    for place, (region, positions) in enumerate(zip(unrolled.regions, unrolled.given, strict=True)):
        run: Any = program.runs[region]
        own = [sources[position] for position in positions]
        yield RegionCall(run, program.shared[region] , own, place > 0, traced.differentiated)


def _master(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter as it is trained: in float32; one that is frozen as it is."""
    if not parameter.requires_grad:
        return nn.Parameter(parameter.detach(), requires_grad=False)
    return nn.Parameter(parameter.detach().float().clone())
