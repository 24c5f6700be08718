"""Forwards of architectures that few people serve: one file per model, named like its folder in transformers.

A file is imported when a model has a class of that folder. It holds any of these tables, keyed like the tables of
passes.adapters ("folder.modeling_folder.Class"):

- ADAPTERS: how a causal LM calls our attention (passes.adapters.forwards)
- ATTENTION: forwards of attention classes (passes.adapters.attention_classes)
- EXPERTS: methods of mixtures of experts (passes.adapters.modules)
- MIXERS: forwards of layers that keep a state (passes.adapters.scans)
- MODULES: methods of other modules (passes.adapters.modules)
"""

import importlib
import pkgutil
from typing import Any

__all__ = ["MODELS", "contributed", "table_of"]

MODELS = frozenset(module.name for module in pkgutil.iter_modules(__path__))


def contributed(table: str, class_name: str) -> Any:
    """Return a class's entry in a table of its model's file; None if there is none."""
    folder = class_name.partition(".")[0]
    return table_of(folder, table).get(class_name) if folder in MODELS else None


def table_of(folder: str, table: str) -> dict[str, Any]:
    """Return a table of a model's file, by class name; empty if the file does not have it."""
    return getattr(importlib.import_module(f"{__name__}.{folder}"), table, {})
