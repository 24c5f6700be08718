"""What ``generate`` is not told: how a model's ``generation_config`` wants its tokens drawn, and how many.

What it asks for and the engine does not serve is refused by name, as other tokens than Hugging Face's would come out.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from detcompile.errors import InvalidInput
from detcompile.runtime.requests.sampling_params import SamplingParams

__all__ = ["NEW_TOKENS", "SERVED", "generation_settings", "row_params"]

NEW_TOKENS = 20  # where neither the caller nor the configuration says how many
SERVED = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")
NEUTRAL = {"do_sample": False, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
# Settings of Hugging Face's that choose other tokens, with the values that choose none; None never does.
UNSERVED: Mapping[str, tuple[Any, ...]] = {
    "bad_words_ids": (),
    "begin_suppress_tokens": (),
    "constraints": (),
    "diversity_penalty": (0,),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
    "max_time": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0,),
    "sequence_bias": (),
    "stop_strings": (),
    "suppress_tokens": (),
    "token_healing": (False,),
    "top_h": (),
    "typical_p": (1,),
    "watermarking_config": (),
}


def generation_settings(model: Any, given: Mapping[str, Any], num_columns: int) -> dict[str, Any]:
    """The settings of SERVED by name: what is given, else what the model's ``generation_config`` says, else neutral.

    Args:
        given: settings of the call by name; None where the caller says nothing.
        num_columns: columns of the prompts, which ``max_length`` counts too.

    Raises:
        InvalidInput: the configuration asks for what is not served, or allows no new token.
    """
    config = getattr(model, "generation_config", None)
    for name, harmless in UNSERVED.items():
        value = getattr(config, name, None)
        if value is not None and value not in harmless and value not in ([], {}, ()):
            raise InvalidInput(
                f"generation_config.{name} = {value!r} is not served, and without it other tokens come out: set"
                f" model.model.generation_config.{name} = None to generate without it"
            )
    own = {name: getattr(config, name, None) for name in SERVED}
    chosen = {name: own[name] if given.get(name) is None else given[name] for name in SERVED}
    settings: dict[str, Any] = {name: NEUTRAL.get(name) if value is None else value for name, value in chosen.items()}
    if settings["max_new_tokens"] is None:
        longest = getattr(config, "max_length", None)
        left = NEW_TOKENS if longest is None else longest - num_columns
        if left < 1:
            raise InvalidInput(
                f"generation_config.max_length = {longest} leaves no new token behind prompts of {num_columns} columns:"
                " pass max_new_tokens"
            )
        settings["max_new_tokens"] = left
    return settings


def row_params(settings: Mapping[str, Any], seeds: Sequence[int | None], stop: tuple[int, ...]) -> list[SamplingParams]:
    """How to draw each row of a batch, one seed a row; ``stop`` says what ends it, and not the model."""
    return [
        SamplingParams(
            max_tokens=settings["max_new_tokens"],
            temperature=settings["temperature"] if settings["do_sample"] else 0.0,
            top_k=settings["top_k"],
            top_p=settings["top_p"],
            min_p=settings["min_p"],
            repetition_penalty=settings["repetition_penalty"],
            seed=seed,
            ignore_eos=True,
            stop_token_ids=stop,
        )
        for seed in seeds
    ]
