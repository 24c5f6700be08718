"""Read the arguments of Hugging Face's ``generate``: served, without effect, or rejected.

An argument of the call takes precedence over the call's ``generation_config``, which takes precedence over the model's;
then come DEFAULTS. An unsupported argument that would change tokens is rejected by name, wherever it comes from.
Names and meanings are those of transformers 5.17 to 5.24 (configuration_utils.py, utils.py and logits_process.py of
transformers.generation).
"""

import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from detcompile.errors import InvalidInput
from detcompile.runtime.requests.plain_values import flag, kind, shown, token_ids, token_list, whole_number

logger = logging.getLogger(__name__)

# Served settings of a ``generation_config``, with Hugging Face's defaults.
DEFAULTS: Mapping[str, Any] = {
    "bad_words_ids": None,
    "do_sample": False,
    "eos_token_id": None,
    "max_length": None,  # defaults to the prompts' columns + NEW_TOKENS
    "max_new_tokens": None,
    "min_length": 0,
    "min_new_tokens": None,
    "min_p": None,
    "num_return_sequences": 1,
    "output_logits": False,
    "output_scores": False,
    "pad_token_id": None,
    "repetition_penalty": 1.0,
    "return_dict_in_generate": False,
    "stop_strings": None,
    "suppress_tokens": None,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
}
NEW_TOKENS = 20
# Meaning of an explicit None: no filter, no penalty, no such output.
NOTHING = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "min_length": 0}
# Served arguments that exist only in the call.
CALL_ONLY = ("cuda_graphs", "seed", "stopping_criteria", "streamer", "tokenizer")
BEAMS = "rows are sampled or greedy here; num_return_sequences with do_sample=True gives several answers to choose from"
PROCESSORS = "only repetition_penalty, temperature, top_k, top_p, min_p, bad_words_ids and suppress_tokens are"
FILTERS = "top_k, top_p and min_p are served"
DRAFTS = "speculation moves no token here: model.engine(speculation=SpeculationConfig())"
FORCED = "put the token into the prompts, or append it to the answers"
DECODER = "it is of encoder-decoder models"
FORWARD = "the prompts are input_ids, and attention_mask says where padding stands"
CACHED = "give the whole prompt; an engine's prefix cache finds what it has computed"
STATES = "compiled graphs give logits alone; run the model that it was made from"


class Unserved(NamedTuple):
    """Values that are accepted (besides None and empty ones), and what to do instead of the argument."""

    harmless: tuple[Any, ...]
    advice: str


UNSERVED: Mapping[str, Unserved] = {
    "assistant_early_exit": Unserved((), DRAFTS),
    "assistant_model": Unserved((), DRAFTS),
    "assistant_tokenizer": Unserved((), DRAFTS),
    "begin_suppress_tokens": Unserved((), "suppress_tokens and min_new_tokens are served"),
    "cache": Unserved((), CACHED),  # past_key_values from transformers 5.24 on
    "constraints": Unserved((), BEAMS),
    "custom_generate": Unserved((), "write the loop over model(input_ids).logits or over model.engine()"),
    "diversity_penalty": Unserved((0,), BEAMS),
    "dola_layers": Unserved((), "only the last layer's logits are computed"),
    "encoder_no_repeat_ngram_size": Unserved((0,), DECODER),
    "encoder_repetition_penalty": Unserved((1,), "repetition_penalty is served"),
    "epsilon_cutoff": Unserved((0,), FILTERS),
    "eta_cutoff": Unserved((0,), FILTERS),
    "exponential_decay_length_penalty": Unserved((), "max_new_tokens is served"),
    "force_words_ids": Unserved((), BEAMS),
    "forced_bos_token_id": Unserved((), FORCED),
    "forced_eos_token_id": Unserved((), FORCED),
    "guidance_scale": Unserved((1,), "it takes a second forward over other prompts"),
    "inputs_embeds": Unserved((), FORWARD),
    "logits_processor": Unserved((), f"{PROCESSORS} served as arguments"),
    "logits_to_keep": Unserved((0, 1), "output_logits gives those that each token was drawn from"),
    "max_time": Unserved((), "tokens may not hang on a clock; pass stopping_criteria=[MaxTimeCriteria(...)] to say so"),
    "negative_prompt_attention_mask": Unserved((), "it is of guidance_scale"),
    "negative_prompt_ids": Unserved((), "it is of guidance_scale"),
    "no_repeat_ngram_size": Unserved((0,), "repetition_penalty and bad_words_ids are served"),
    "num_beam_groups": Unserved((1,), BEAMS),
    "num_beams": Unserved((1,), BEAMS),
    "output_attentions": Unserved((False,), STATES),
    "output_hidden_states": Unserved((False,), STATES),
    "past_key_values": Unserved((), CACHED),
    "penalty_alpha": Unserved((0,), "contrastive search is not made of one row's own logits"),
    "position_ids": Unserved((), "they are counted from attention_mask; a plain call takes others"),
    "prefix_allowed_tokens_fn": Unserved((), "an engine takes SamplingParams(allowed_token_ids=...)"),
    "prompt_lookup_num_tokens": Unserved((), DRAFTS),
    "renormalize_logits": Unserved((False,), "scores are as the tokens were drawn from; take their log_softmax"),
    "sequence_bias": Unserved((), "an engine takes SamplingParams(logit_bias=...), of single tokens"),
    "synced_gpus": Unserved((False,), "ranks that share a model make the same calls"),
    "token_healing": Unserved((False,), "heal the prompts before the call"),
    "token_type_ids": Unserved((), FORWARD),
    "top_h": Unserved((), FILTERS),
    "typical_p": Unserved((1,), FILTERS),
    "use_mtp": Unserved((False,), DRAFTS),
    "watermarking_config": Unserved((), PROCESSORS + " served"),
}


# Settings of other caches' speed and memory; settings that only matter with an argument rejected above; settings that
# matter only for NaN logits, which fail here anyway; and settings that are true of every model here.
INERT = {
    "assistant_confidence_threshold", "assistant_ensemble_weight", "assistant_lookbehind", "bos_token_id",
    "cache_config", "cache_implementation", "compile_config", "continuous_batching_config",
    "decoder_start_token_id", "disable_compile", "early_stopping", "is_assistant", "length_penalty", "low_memory",
    "max_cache_len", "max_matching_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "prefill_chunk_size", "remove_invalid_values", "return_dict", "speculation_type", "target_lookbehind",
    "transformers_version", "trust_remote_code", "use_cache",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationArguments:
    """The checked arguments of a ``generate`` call.

    Attributes:
        max_new_tokens: most columns after the prompts.
        min_new_tokens: end tokens are forbidden for this many columns.
        sampling: temperature, filters and penalty by their names in SamplingParams, which checks them.
        bad_words_ids: lists of token ids that no row may complete.
        suppress_tokens: tokens that are never drawn.
        eos_token_id: tokens that end a row.
        pad_token_id: fills rows that ended early.
        num_return_sequences: rows of the answer per prompt.
        stop_strings: texts that end a row when its text ends with them.
        stopping_criteria: Hugging Face stopping criteria.
        streamer: receives the prompts and then each column of tokens.
        tokenizer: decodes text for the stop strings; None takes the model's.
        seed: one for all rows, or one per row.
        cuda_graphs: replay steps from CUDA graphs; None enables it on a GPU.
    """

    max_new_tokens: int
    min_new_tokens: int
    do_sample: bool
    sampling: Mapping[str, Any]
    bad_words_ids: tuple[tuple[int, ...], ...]
    suppress_tokens: tuple[int, ...]
    eos_token_id: tuple[int, ...]
    pad_token_id: int | None
    num_return_sequences: int
    stop_strings: tuple[str, ...]
    return_dict_in_generate: bool
    output_scores: bool
    output_logits: bool
    stopping_criteria: tuple[Any, ...] = ()
    streamer: Any | None = None
    tokenizer: Any | None = None
    seed: Any = None
    cuda_graphs: bool | None = None

    @property
    def padding(self) -> int | None:
        """The pad token, or else the first end token."""
        return next(iter(self.eos_token_id), None) if self.pad_token_id is None else self.pad_token_id

    @property
    def stepwise(self) -> bool:
        """True if each column must be seen before the next one is made, or logits are requested."""
        observed = self.streamer is not None or bool(self.stopping_criteria) or bool(self.stop_strings)
        return observed or (self.return_dict_in_generate and (self.output_scores or self.output_logits))


def read_arguments(
    model: Any, given: Mapping[str, Any], num_columns: int, num_logits: int | None = None
) -> GenerationArguments:
    """Read and check the arguments of a call.

    Args:
        model: has the model's ``generation_config``, and a ``config`` if it is known.
        given: keyword arguments of the call.
        num_columns: columns of the prompts, which count toward ``max_length`` and ``min_length``.
        num_logits: end tokens of a ``generation_config`` at or beyond it are ignored: no row can end with them.

    Raises:
        InvalidInput: an argument is unknown, not supported, or has an invalid value.
    """
    configs = (given.get("generation_config"), getattr(model, "generation_config", None))
    _check_known(given)
    _refuse_unserved(given, configs)
    settings = {name: _setting(name, given, configs) for name in DEFAULTS}
    do_sample = _flag(settings, "do_sample")
    most = _max_new_tokens(settings, given, num_columns, getattr(model, "config", None))
    eos = token_ids(settings["eos_token_id"], "eos_token_id")
    if "eos_token_id" not in given and num_logits is not None:
        eos = tuple(token for token in eos if 0 <= token < num_logits)
    suppressed = token_ids(settings["suppress_tokens"], "suppress_tokens")
    for name, ids in (("eos_token_id", eos), ("suppress_tokens", suppressed)):
        _require_tokens(ids, name, num_logits)
    requested = settings["num_return_sequences"]
    count = 1 if requested is None else _whole(requested, "num_return_sequences", 1)
    if count > 1 and not do_sample:
        raise InvalidInput(f"num_return_sequences={count} of a greedy call gives equal rows: pass do_sample=True, or 1")
    return GenerationArguments(
        max_new_tokens=most,
        min_new_tokens=_min_new_tokens(settings, num_columns, most),
        do_sample=do_sample,
        sampling=_sampling(settings, do_sample),
        bad_words_ids=_bad_words(settings["bad_words_ids"], eos),
        suppress_tokens=suppressed,
        eos_token_id=eos,
        pad_token_id=_padding(settings["pad_token_id"]),
        num_return_sequences=count,
        stop_strings=_strings(settings["stop_strings"]),
        return_dict_in_generate=_flag(settings, "return_dict_in_generate"),
        output_scores=_flag(settings, "output_scores"),
        output_logits=_flag(settings, "output_logits"),
        **_call_only(given),
    )


def _setting(name: str, given: Mapping[str, Any], configs: tuple[Any, Any]) -> Any:
    """Return the first value given: in the call (None counts, except for max_length), a config, or the defaults."""
    if name in given and not (name == "max_length" and given[name] is None):
        return NOTHING.get(name) if given[name] is None else given[name]
    values = (getattr(config, name, None) for config in configs)
    value = next((value for value in values if value is not None), DEFAULTS[name])
    return NOTHING.get(name) if value is None else value


def _check_known(given: Mapping[str, Any]) -> None:
    known = {*DEFAULTS, *CALL_ONLY, *INERT, *UNSERVED, "generation_config"}
    unused = [name for name, value in given.items() if name not in known and value is not None]
    if unused:
        raise InvalidInput(
            f"the following `model_kwargs` are not used by the model: {unused} (note: typos in the generate arguments"
            " will also show up in this list)"
        )


def _refuse_unserved(given: Mapping[str, Any], configs: tuple[Any, Any]) -> None:
    for name, (harmless, advice) in UNSERVED.items():
        if name in given:
            source, value = name, given[name]
        else:
            values = (getattr(config, name, None) for config in configs)
            source, value = f"generation_config.{name}", next((value for value in values if value is not None), None)
        if not _is_neutral(value, harmless):
            raise InvalidInput(
                f"{source} = {shown(value)} is not supported, and ignoring it would change tokens or outputs: {advice}"
                + ("" if source == name else f"; pass {name}=None in the call to go on without it")
            )


def _max_new_tokens(settings: Mapping[str, Any], given: Mapping[str, Any], num_columns: int, config: Any) -> int:
    """Return max_new_tokens, which takes precedence over ``max_length`` wherever both stand, as in GenerationMixin."""
    longest = settings["max_length"]
    if settings["max_new_tokens"] is not None:
        if given.get("max_length") is not None:
            logger.warning("both max_new_tokens and max_length are set: max_new_tokens takes precedence")
        return _whole(settings["max_new_tokens"], "max_new_tokens", 1)
    if longest is None:
        longest = min(num_columns + NEW_TOKENS, getattr(config, "max_position_embeddings", None) or 1 << 62)
    left = _whole(longest, "max_length", 1) - num_columns
    if left < 1:
        raise InvalidInput(
            f"max_length = {longest} (of the call, or generation_config.max_length) leaves no new token after prompts"
            f" of {num_columns} columns: pass max_new_tokens"
        )
    return left


def _min_new_tokens(settings: Mapping[str, Any], num_columns: int, most: int) -> int:
    requested = settings["min_new_tokens"]
    least = max(0, _whole(settings["min_length"], "min_length", 0) - num_columns)
    if requested is not None:
        least = _whole(requested, "min_new_tokens", 0)
    if least > most:
        name = "min_length" if requested is None else "min_new_tokens"
        warnings.warn(
            f"Unfeasible length constraints: `{name}` asks for {least} new tokens, and {most} is the maximum, at which"
            " generation stops",
            UserWarning,
            stacklevel=2,
        )
    return min(least, most)


def _sampling(settings: Mapping[str, Any], do_sample: bool) -> dict[str, Any]:
    names = ("temperature", "top_k", "top_p", "min_p") if do_sample else ()
    chosen = {name: settings[name] for name in (*names, "repetition_penalty")}
    return chosen if do_sample else chosen | {"temperature": 0.0}


def _bad_words(words: Any, eos: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return bad words without single end tokens: Hugging Face ignores EOS in bad_words_ids."""
    if words is None:
        return ()
    if not isinstance(words, (list, tuple)):
        raise InvalidInput(f"bad_words_ids {shown(words)} is {kind(words)}: give a list of lists of token ids")
    for index, word in enumerate(words):
        if not isinstance(word, (list, tuple)):
            raise InvalidInput(f"bad_words_ids: entry {index} is {kind(word)}: give a list of token ids")
    lists = (tuple(token_list(word, f"bad_words_ids: entry {index}")) for index, word in enumerate(words))
    return tuple(word for word in lists if not (len(word) == 1 and word[0] in eos))


def _strings(value: Any) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else () if value is None else value
    if not isinstance(strings, (list, tuple)) or not all(isinstance(text, str) and text for text in strings):
        raise InvalidInput(f"stop_strings {shown(value)}: give a string or a list of them, none empty")
    return tuple(strings)


def _call_only(given: Mapping[str, Any]) -> dict[str, Any]:
    arguments = {name: given[name] for name in CALL_ONLY if given.get(name) is not None}
    criteria = arguments.get("stopping_criteria", ())
    if not isinstance(criteria, (list, tuple)) or not all(map(callable, criteria)):
        raise InvalidInput(f"stopping_criteria {shown(criteria)}: give a StoppingCriteriaList, or a list of functions")
    streamer = arguments.get("streamer")
    if streamer is not None and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
        raise InvalidInput(f"streamer {shown(streamer)} is {kind(streamer)}: give an object with put() and end()")
    if "cuda_graphs" in arguments:
        arguments["cuda_graphs"] = flag(arguments["cuda_graphs"], "cuda_graphs")
    return arguments | {"stopping_criteria": tuple(criteria)}


def _flag(settings: Mapping[str, Any], name: str) -> bool:
    return settings[name] is not None and flag(settings[name], name)


def _require_tokens(ids: tuple[int, ...], name: str, num_logits: int | None) -> None:
    wrong = next((token for token in ids if token < 0 or (num_logits is not None and token >= num_logits)), None)
    if wrong is not None:
        known = "must not be negative" if num_logits is None else f"are 0 to {num_logits - 1}"
        raise InvalidInput(f"{name} holds token {wrong}; ids {known}")


def _padding(value: Any) -> int | None:
    """Return the checked pad token; some configs use -1."""
    if value is None:
        return None
    token = whole_number(value, "pad_token_id")
    if not -(1 << 63) <= token < 1 << 63:
        raise InvalidInput(f"pad_token_id {shown(token)} does not fit in int64: give the id of a token")
    return token


def _whole(value: Any, name: str, least: int) -> int:
    number = whole_number(value, name)
    if number < least:
        raise InvalidInput(f"{name}={number} must be at least {least}")
    return number


def _is_neutral(value: Any, harmless: tuple[Any, ...]) -> bool:
    """Return True if an argument with this value has no effect."""
    if value is None or (isinstance(value, (list, tuple, dict)) and not value):
        return True
    return isinstance(value, (bool, int, float)) and value in harmless
