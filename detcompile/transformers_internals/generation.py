"""What transformers' pipelines ask of a model."""

from typing import Any

from transformers import GenerationMixin

__all__ = ["prepare_generation_config"]

READ_IN = "5.17.0"
NAMES = {
    "prepare_generation_config": "A method by which transformers.pipeline fills in its own defaults. Without it: a "
    "pipeline generates by other defaults than a Hugging Face model's.",
}

prepare_generation_config: Any = GenerationMixin._prepare_generation_config
