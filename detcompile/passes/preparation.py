"""Prepare a model's modules before it is traced, for serving or training."""

from collections.abc import Callable
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from detcompile.errors import InvalidInput, UnsupportedModel
from detcompile.orders.numerics import Numerics
from detcompile.passes.adapters.modules import replace_experts
from detcompile.passes.adapters.scans import pin_recurrences
from detcompile.passes.capture import freeze_rope, probe_attention
from detcompile.passes.modules.exact import use_exact_arithmetic
from detcompile.passes.modules.experts import pin_experts
from detcompile.passes.modules.positions import give_positions
from detcompile.passes.modules.quantized_linear import pin_quantized
from detcompile.passes.modules.recurrences import Recurrences
from detcompile.passes.programs.async_weights import wait_for_weights
from detcompile.passes.tracing import Seen
from detcompile.torch_internals.modules import global_hooks

TAKEN = "_taken_by_detcompile"  # attribute of a model that compile() has changed, even if it refused it later


class ModulePass(NamedTuple):
    """A change of a model's modules before tracing."""

    apply: Callable[[PreTrainedModel], Any]  # in place; returns what it changed, falsy if nothing
    whole: str | None = None  # what it changes, if ranks cannot share that part


MODULE_PASSES = (
    ModulePass(give_positions),
    ModulePass(pin_experts),
    ModulePass(replace_experts, whole="experts that take no implementation from outside,"),
    ModulePass(pin_recurrences, whole="layers with a state"),
)


def prepare(
    model: PreTrainedModel, numerics: Numerics, max_context: int, shared: bool = False
) -> tuple[Seen, Recurrences | None]:
    """Change the model in place, then observe one run of it. Return what it shows and the calls that carry a state.

    Args:
        max_context: rotary tables that depend on the length are frozen at this length.
        shared: ranks share the model.

    Raises:
        UnsupportedModel: the model cannot be captured with its meaning intact.
        InvalidInput: it was prepared or refused before, or there are hooks of all modules.
    """
    if getattr(model, TAKEN, False):
        raise InvalidInput(
            f"this {type(model).__name__} was given to compile() before and its linears and rotary tables changed: "
            "load it again"
        )
    if global_hooks(("forward_hooks", "forward_pre_hooks")):
        raise InvalidInput(
            "hooks are registered for all modules (torch.nn.modules.module.register_module_forward_..._hook), and may"
            " miss those that compile() replaces: remove them, or register hooks of the model's modules"
        )
    setattr(model, TAKEN, True)
    pin_quantized(model)
    if numerics.is_exact:
        wait_for_weights()
        use_exact_arithmetic(model, numerics.arithmetic, max_context)
    freeze_rope(model, max_context)
    recurrences = change_modules(model, shared)
    return Seen.of(probe_attention(model, numerics.kv_chunk, recurrences), recurrences), recurrences


def change_modules(model: PreTrainedModel, shared: bool) -> Recurrences | None:
    """Run MODULE_PASSES in order. Return the calls that carry a state, if the model has any."""
    changed = {}
    for apply, whole in MODULE_PASSES:
        changed[apply] = apply(model)
        if changed[apply] and whole is not None and shared:
            raise UnsupportedModel(f"{type(model).__name__}: {whole} over several ranks; compile with tp=1")
    recurrences: Recurrences | None = changed[pin_recurrences]
    return recurrences
