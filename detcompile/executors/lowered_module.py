"""LoweredModule: a Hugging Face module lowered in this process."""

from collections.abc import Mapping
from functools import cached_property, partial

from torch import Tensor
from transformers import PreTrainedModel

from detcompile.errors import InvalidInput
from detcompile.executors.description import ModelDescription, ParameterCount
from detcompile.executors.fingerprints import config_digest, fingerprint_parts
from detcompile.executors.live_weights import LiveWeights
from detcompile.executors.local import LocalExecutor
from detcompile.orders.numerics import Numerics
from detcompile.parallel import TensorParallel
from detcompile.passes.layers.structure import layers_of
from detcompile.passes.lowering import Lowered, lower_view, lower_with_states
from detcompile.passes.modules.low_rank import slots_of, without_slots
from detcompile.passes.modules.recurrences import Recurrences
from detcompile.passes.sharding.modules import GatheredLinear
from detcompile.runtime.adapters import AdaptedForward, AdapterSlots
from detcompile.runtime.engine_setup import Forwards
from detcompile.runtime.step.runner import Forward
from detcompile.weights import weight_addresses, weights_in_place


def executor_of(
    module: PreTrainedModel,
    lowered: Lowered,
    numerics: Numerics,
    parameters: ParameterCount,
    ranks: TensorParallel | None = None,
) -> LocalExecutor:
    """Return the executor of a module that was lowered in this process.

    Args:
        parameters: number of parameters before lowering.
        ranks: the ranks that share the module.
    """
    description = ModelDescription(
        module=module,
        numerics=numerics,
        certificate=lowered.certificate,
        program=lowered.program,
        facts=lowered.facts,
        parameters=parameters,
        stage=lowered.stage,
    )
    slots = slots_of(module)
    whole_held = partial(weights_in_place, module, weight_addresses(module), lowered.constants)
    held = (lambda **how: without_slots(whole_held(**how))) if slots else whole_held
    named, whole = partial(held, every_name=True), lowered.whole_weights
    weights = LiveWeights(held, named, whole=whole, is_share=bool(whole), shares=lowered.shares)
    origin = LoweredModule(description, lowered.recurrences)
    adapters = AdapterSlots(slots) if slots else None
    forward = lowered.forward if adapters is None else AdaptedForward(lowered.forward, adapters)
    return LocalExecutor(description, Forwards(forward, origin.forward_with_states), weights, origin, ranks, adapters)


class LoweredModule:
    """The module behind a LocalExecutor.

    Args:
        recurrences: the operations that carry state from token to token; None if the model has none.
    """

    def __init__(self, description: ModelDescription, recurrences: Recurrences | None) -> None:
        self.description = description
        self.recurrences = recurrences
        self._config = config_digest(description.module.config.to_dict())
        self._parts: dict[tuple[int, ...], LocalExecutor] = {}  # executors of some layers, for drafting

    @cached_property
    def fixed_parts(self) -> Mapping[str, str]:
        """The parts of the fingerprint, without weights."""
        known = self.description
        given = (self._config, known.numerics, known.certificate, known.program)
        return fingerprint_parts(*given, known.facts.max_context, known.facts.dtype, known.facts.device)

    def forward_with_states(self) -> Forward:
        """Return the forward that also returns the head's input states [R, H]; compiled on first use."""
        return self._forward_with_states

    def head_weight(self) -> Tensor:
        """Return the whole weight [V, H] of the language-model head. Collective: every rank must call it."""
        head = self.description.module.get_output_embeddings()
        if head is None:
            raise InvalidInput("this model has no output head to read hidden states of: use another drafter")
        if self.description.numerics.is_exact:
            raise InvalidInput("the head's weights are quantized (Numerics.arithmetic): use another drafter")
        weight: Tensor = head.whole_weight() if isinstance(head, GatheredLinear) else head.weight.detach()
        return weight

    def with_layers(self, layers: tuple[int, ...]) -> LocalExecutor:
        """Return an executor of some of the layers that shares the weights; compiled on first use."""
        if layers not in self._parts:
            known = self.description
            view = layers_of(known.module, layers)
            lowered = lower_view(view, known.numerics, known.facts.max_context)
            self._parts[layers] = executor_of(view, lowered, known.numerics, ParameterCount.of(view))
        return self._parts[layers]

    @cached_property
    def _forward_with_states(self) -> Forward:
        known = self.description
        return lower_with_states(known.module, known.numerics, known.certificate)
