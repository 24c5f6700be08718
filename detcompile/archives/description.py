"""What an archive's manifest says of the model: written by export, read by load."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from detcompile.archives.archive import EXTRA
from detcompile.digests import fingerprint
from detcompile.executors.description import ModelDescription
from detcompile.facts import ModelFacts
from detcompile.runtime.dense.end_tokens import stop_tokens
from detcompile.runtime.kv.kv_cache import KVShape
from detcompile.step import KVGroup, StateShape, StepInputs

__all__ = ["CERTIFICATE", "FORMAT", "KERNELS", "TOKENIZER", "facts_of", "read_config", "read_sizes"]

FORMAT = 4
CERTIFICATE, KERNELS, TOKENIZER = (f"{EXTRA}/{name}" for name in ("certificate.json", "cpu", "tokenizer"))


def facts_of(
    model: ModelDescription, fingerprint_parts: Mapping[str, str], weight_digests: Mapping[str, str]
) -> dict[str, Any]:
    """What has to be known of a model that is loaded, as JSON has it."""
    sizes = model.facts
    return {
        "format": FORMAT,
        "fingerprint": fingerprint(fingerprint_parts),
        "fingerprint_parts": dict(fingerprint_parts),
        "weight_digests": dict(weight_digests),
        "step": list(StepInputs._fields),
        "numerics": dataclasses.asdict(model.numerics),
        "max_context": sizes.max_context,
        "dtype": str(sizes.dtype).removeprefix("torch."),
        "num_token_ids": sizes.num_token_ids,
        "num_logits": sizes.num_logits,
        "name_or_path": model.module.name_or_path,
        "num_parameters": list(model.parameters),
        "config": _plain(model.module.config.to_dict()),
        "generation_config": _plain(_generation_config(model.module)),
        "kv_shapes": [list(shape) for shape in sizes.kv_shapes],
        "state_shapes": [[list(state.shape), state.float32] for state in sizes.state_shapes],
        "kv_groups": [[list(group.layers), group.window] for group in sizes.kv_groups],
    }


def read_config(known: Mapping[str, Any]) -> PretrainedConfig:
    """A model's config; one without the attributes of its class where transformers has none for it."""
    kind = known.get("model_type")
    own = CONFIG_MAPPING[kind] if kind in CONFIG_MAPPING else PretrainedConfig  # noqa: SIM401 - its get() finds none
    return own.from_dict(dict(known))


def _generation_config(module: Any) -> dict[str, Any]:
    """What ``generation_config`` says, with end tokens that are checked; nothing where there is none."""
    config = getattr(module, "generation_config", None)
    return {} if config is None else config.to_dict() | {"eos_token_id": list(stop_tokens(module)) or None}


def _plain(values: dict[str, Any]) -> Any:
    """Values as JSON has them."""
    return json.loads(json.dumps(values, default=str))


def read_sizes(facts: Mapping[str, Any]) -> ModelFacts:
    """The sizes in a manifest that ``manifest.require_model`` has passed; hidden states cannot be had."""
    kind = facts["machine"]["device"]
    return ModelFacts(
        kv_shapes=tuple(KVShape(*shape) for shape in facts["kv_shapes"]),
        kv_groups=tuple(KVGroup(tuple(layers), window) for layers, window in facts["kv_groups"]),
        state_shapes=tuple(StateShape(tuple(shape), float32) for shape, float32 in facts["state_shapes"]),
        dtype=getattr(torch, facts["dtype"]),
        device=torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind),
        max_context=facts["max_context"],
        num_token_ids=facts["num_token_ids"],
        num_logits=facts["num_logits"],
    )
