"""The class that transformers chooses for a config, and code that comes with a checkpoint."""

from transformers.dynamic_module_utils import init_hf_modules
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

NAMES = {
    "init_hf_modules": "Make transformers' folder of such code importable. Without it: answers of worker processes "
    "about a model with its own code cannot be read.",
}


def has_causal_lm(model_type: object) -> bool:
    """Return whether transformers itself has a causal LM for the ``model_type`` of a config.

    Without it: code of a checkpoint that transformers would not run needs trust, or code that it would run does not.
    """
    return model_type in CONFIG_MAPPING_NAMES and model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
