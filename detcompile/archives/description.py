"""The model's entries in an archive's manifest: written by export, read by load."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PretrainedConfig

from detcompile.archives.archive import EXTRA
from detcompile.digests import fingerprint
from detcompile.orders.numerics import Numerics
from detcompile.runtime.kv.kv_cache import KVShape
from detcompile.runtime.requests.plain_values import stop_tokens
from detcompile.step import KVGroup, ModelFacts, StateShape, StepInputs

FORMAT = 5
CERTIFICATE, KERNELS, TOKENIZER = (f"{EXTRA}/{name}" for name in ("certificate.json", "cpu", "tokenizer"))


def facts_of(
    module: Any,
    sizes: ModelFacts,
    numerics: Numerics,
    num_parameters: Sequence[int],
    fingerprint_parts: Mapping[str, str],
    weight_digests: Mapping[str, str],
) -> dict[str, Any]:
    """Return the manifest entries that describe a model, as plain JSON values.

    Args:
        module: has the model's ``config``, ``name_or_path`` and, optionally, ``generation_config``.
    """
    config = getattr(module, "generation_config", None)
    generation = {} if config is None else config.to_dict() | {"eos_token_id": list(stop_tokens(module)) or None}
    return {
        "format": FORMAT,
        "fingerprint": fingerprint(fingerprint_parts),
        "fingerprint_parts": dict(fingerprint_parts),
        "weight_digests": dict(weight_digests),
        "step": list(StepInputs._fields),
        "numerics": dataclasses.asdict(numerics),
        "max_context": sizes.max_context,
        "dtype": str(sizes.dtype).removeprefix("torch."),
        "num_token_ids": sizes.num_token_ids,
        "num_logits": sizes.num_logits,
        "name_or_path": module.name_or_path,
        "num_parameters": list(num_parameters),
        "config": _json_values(module.config.to_dict()),
        "generation_config": _json_values(generation),
        "state_shapes": [[list(state.shape), state.float32] for state in sizes.state_shapes],
        "kv_groups": [[list(group.layers), group.window] for group in sizes.kv_groups],
    }


def read_config(known: Mapping[str, Any]) -> PretrainedConfig:
    """Return the model's config: of its own class if transformers has it, otherwise a PretrainedConfig."""
    kind = known.get("model_type")
    # CONFIG_MAPPING.get() does not load lazy entries.
    config_class = CONFIG_MAPPING[kind] if kind in CONFIG_MAPPING else PretrainedConfig  # noqa: SIM401
    return config_class.from_dict(dict(known))


def _json_values(values: dict[str, Any]) -> Any:
    """Convert values to what JSON can hold; other objects become strings."""
    return json.loads(json.dumps(values, default=str))


def read_sizes(facts: Mapping[str, Any], share: Mapping[str, Any]) -> ModelFacts:
    """Return the sizes in a manifest that ``manifest.require_model`` accepted, and in a rank's part of it.

    It has no hidden states.
    """
    kind = facts["machine"]["device"]
    return ModelFacts(
        kv_shapes=tuple(KVShape(*shape) for shape in share["kv_shapes"]),
        kv_groups=tuple(KVGroup(tuple(layers), window) for layers, window in facts["kv_groups"]),
        state_shapes=tuple(StateShape(tuple(shape), float32) for shape, float32 in facts["state_shapes"]),
        dtype=getattr(torch, facts["dtype"]),
        device=torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind),
        max_context=facts["max_context"],
        num_token_ids=facts["num_token_ids"],
        num_logits=facts["num_logits"],
        is_exact=Numerics(**facts["numerics"]).is_exact,
    )
