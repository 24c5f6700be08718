"""Default SamplingParams from a model's generation_config, as in vLLM."""

from typing import Any

from detcompile.models.compiled import CompiledModel
from detcompile.runtime.requests.sampling_params import SamplingParams

__all__ = ["configured_params"]

# generation_config fields that give vLLM's default SamplingParams, and the fields of SamplingParams.
CONFIGURED = {
    "repetition_penalty": "repetition_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}


def configured_params(model: CompiledModel) -> dict[str, Any]:
    """Return the fields of SamplingParams that the model's ``generation_config`` sets.

    Raises:
        InvalidInput: a value is not valid for SamplingParams.
    """
    config = getattr(model.model, "generation_config", None)
    named = {ours: getattr(config, theirs, None) for theirs, ours in CONFIGURED.items()}
    fields = {name: value for name, value in named.items() if value is not None}
    params = SamplingParams(**fields)
    return {name: getattr(params, name) for name in fields}
