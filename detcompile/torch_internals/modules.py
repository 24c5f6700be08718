"""The tables of a torch.nn.Module."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as module_calls

TABLES = ("_parameters", "_buffers", "_modules")
HOOKS = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
FORWARD_HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
)
NUMBERED = ("hooks", "hooks_always_called", "hooks_with_kwargs")  # name endings of tables that number their hooks


def parameter_table(module: nn.Module) -> dict[str, Any]:
    """Return a module's table of its own parameters by name, with None entries; changing it changes the module.

    Without it: entries of None and second names of one parameter are missed, and weights cannot be dropped.
    """
    return module._parameters


def buffer_table(module: nn.Module) -> dict[str, Tensor | None]:
    """Return a module's table of its own buffers by name, with None entries; changing it changes the module.

    Without it: see ``parameter_table``.
    """
    return module._buffers


def child_table(module: nn.Module) -> dict[str, Any]:
    """Return a module's table of children by name, with None entries.

    Without it: entries of None and second names of one child are missed.
    """
    return module._modules


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """Return the other attributes of a module. Tables of hooks become lists, because torch numbers hooks.

    Without it: modules that differ only in their weights are not recognized as equal.
    """
    others = {name: value for name, value in vars(module).items() if name not in TABLES}
    tables = {name for name, value in others.items() if name.endswith(NUMBERED) and value}
    return {name: list(value.values()) if name in tables else value for name, value in others.items()}


def hooks_of(module: nn.Module) -> list[Any]:
    """Return the hooks that run around a module's forward and backward.

    Without it: hooks on modules that are replaced, or whose forward a trainer does not run, are ignored.
    """
    return [hook for kind in HOOKS for hook in getattr(module, f"_{kind}").values()]


def with_hooks_of(module: nn.Module, replaced: nn.Module) -> nn.Module:
    """Give a module the forward hooks of the one that it replaces, and return it.

    Without it: replacing a module drops what its hooks do.
    """
    for table in FORWARD_HOOKS:
        getattr(module, table).update(getattr(replaced, table))
    return module


def global_hooks(kinds: Sequence[str] = HOOKS) -> list[Any]:
    """Return the hooks that run around every module's forward and backward.

    Without it: see ``hooks_of``.
    """
    return [hook for kind in kinds for hook in getattr(module_calls, f"_global_{kind}").values()]
