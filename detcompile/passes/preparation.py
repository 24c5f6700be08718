"""What is done to a model's modules before anything of it is traced, to serve it or to train it."""

from collections.abc import Callable
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from detcompile.errors import InvalidInput, UnsupportedModel
from detcompile.orders.numerics import Numerics
from detcompile.passes.adapters.modules import replace_experts
from detcompile.passes.adapters.scans import pin_recurrences
from detcompile.passes.capture import freeze_rope, probe_attention
from detcompile.passes.modules.experts import pin_experts
from detcompile.passes.modules.positions import give_positions
from detcompile.passes.modules.quantized_linear import pin_quantized
from detcompile.passes.modules.recurrences import Recurrences
from detcompile.passes.tracing import Seen

__all__ = ["MODULE_PASSES", "ModulePass", "change_modules", "prepare"]

TAKEN = "_taken_by_detcompile"  # attribute of a model that compile() has changed, whether or not it then refused it


class ModulePass(NamedTuple):
    """A change of a model's modules, before anything of it is traced."""

    apply: Callable[[PreTrainedModel], Any]  # in place; says what it changed, nothing if the model has none of it
    whole: str | None = None  # what it changes, in words, where ranks cannot share that


MODULE_PASSES = (
    ModulePass(give_positions),
    ModulePass(pin_quantized, whole="quantised weights"),
    ModulePass(pin_experts),
    ModulePass(replace_experts, whole="experts that take no implementation from outside,"),
    ModulePass(pin_recurrences, whole="layers with a state"),
)


def prepare(
    model: PreTrainedModel, numerics: Numerics, max_context: int, shared: bool = False
) -> tuple[Seen, Recurrences | None]:
    """Change the model in place, once; what a run of it has shown then, and the calls that carry a state, if any.

    Args:
        max_context: tokens that rotary tables which look at the length are frozen to.
        shared: ranks are to share the model.

    Raises:
        UnsupportedModel: the model cannot be captured with its meaning intact.
        InvalidInput: it was prepared, or refused, before.
    """
    if getattr(model, TAKEN, False):
        raise InvalidInput(
            f"this {type(model).__name__} was given to compile() before and its linears and rotary tables changed: "
            "load it again"
        )
    setattr(model, TAKEN, True)
    freeze_rope(model, max_context)
    recurrences = change_modules(model, shared)
    return Seen.of(probe_attention(model, numerics.kv_chunk, recurrences), recurrences), recurrences


def change_modules(model: PreTrainedModel, shared: bool) -> Recurrences | None:
    """Run MODULE_PASSES in order; the calls that carry a state, if the model has any."""
    changed = {}
    for apply, whole in MODULE_PASSES:
        changed[apply] = apply(model)
        if changed[apply] and whole is not None and shared:
            raise UnsupportedModel(f"{type(model).__name__}: {whole} over several ranks; compile with tp=1")
    recurrences: Recurrences | None = changed[pin_recurrences]
    return recurrences
