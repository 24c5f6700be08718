"""What a model's generation_config says of sampling, for requests that say nothing, as vLLM takes it."""

from typing import Any

from detcompile.models.compiled import CompiledModel
from detcompile.runtime.requests.sampling_params import SamplingParams

__all__ = ["configured_params"]

# Names of a generation_config that vLLM takes default SamplingParams from, and theirs.
CONFIGURED = {
    "repetition_penalty": "repetition_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}


def configured_params(model: CompiledModel) -> dict[str, Any]:
    """Fields of SamplingParams that the model's ``generation_config`` gives, and no others.

    Raises:
        InvalidInput: a value that SamplingParams cannot have.
    """
    config = getattr(model.model, "generation_config", None)
    named = {ours: getattr(config, theirs, None) for theirs, ours in CONFIGURED.items()}
    found = {name: value for name, value in named.items() if value is not None}
    params = SamplingParams(**found)
    return {name: getattr(params, name) for name in found}
