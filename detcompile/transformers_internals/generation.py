"""Methods that transformers' pipelines need on a model."""

import inspect
from typing import Any

from transformers import GenerationMixin, PreTrainedModel

NAMES = {
    "prepare_generation_config": "A method with which transformers.pipeline before 5.24 fills in its defaults. "
    "Without it: a pipeline generates by other defaults than a Hugging Face model's.",
}

prepare_generation_config: Any = GenerationMixin._prepare_generation_config


def cache_keyword(model: PreTrainedModel) -> str:
    """Return a forward's name for the keys and values of earlier tokens: "cache" from transformers 5.24 on.

    Without it: plain torch beside ours warns of the earlier name, which transformers 5.40 removes.
    """
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
