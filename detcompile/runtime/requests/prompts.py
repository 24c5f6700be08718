"""Prompt formats: text, token ids, or a dict with either; one prompt or many.

Dicts are a tokenizer's (``input_ids`` with an optional ``attention_mask`` that removes padding) or vLLM's (``prompt``,
``prompt_token_ids``, ``cache_salt``). Anything else is rejected with an explanation; nothing is guessed.
"""

import copy
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

from tokenizers import Encoding, Tokenizer

from detcompile.errors import InvalidInput
from detcompile.runtime.requests.plain_values import kind, shown, token_list

Prompt = str | SequenceOf[int] | Mapping[str, Any] | Encoding  # also a 1-D integer array of numpy or torch
WANTED = 'a string, a list of token ids, the output of a tokenizer, or {"prompt": text} or {"prompt_token_ids": ids}'
# Keys of a tokenizer's dict that are ignored.
BESIDE_IDS = {"token_type_ids", "special_tokens_mask", "offset_mapping", "length"}


class ReadPrompt(NamedTuple):
    """A prompt as given: text, ids, or ids together with their text.

    Attributes:
        cache_salt: prefixes are shared only among prompts with the same salt; "" is a salt too.
    """

    text: str | None
    token_ids: list[int] | None
    cache_salt: str = ""


def read_prompt(prompt: Any) -> ReadPrompt:
    """Read one prompt.

    Raises:
        InvalidInput: this is not a prompt; the message says what to give instead.
    """
    if isinstance(prompt, str):
        return ReadPrompt(prompt, None)
    if isinstance(prompt, Encoding):
        return ReadPrompt(None, _unmasked(prompt.ids, prompt.attention_mask))
    if isinstance(prompt, Mapping):
        return _read_dict(prompt)
    if not _is_list(prompt):
        what = f"{shown(prompt)} is neither text nor token ids, but {kind(prompt)}"
        raise InvalidInput(f"the prompt {what}: give {WANTED}")
    return ReadPrompt(None, _ids(prompt))


def prompts_of(prompts: Any) -> list[Any]:
    """Split the ``prompts`` argument of a call into single prompts for ``read_prompt``.

    A string, a list of numbers, a 1-D array or a dict of one prompt is one prompt. A 2-D array, or a dict with 2-D ids,
    is a batch.

    Raises:
        InvalidInput: this is neither a prompt nor a list.
    """
    if isinstance(prompts, (str, Encoding)):
        return [prompts]
    if isinstance(prompts, Mapping):
        return _batch_of(prompts)
    if not _is_list(prompts):
        raise InvalidInput(f"prompts {shown(prompts)} is {kind(prompts)}: give {WANTED}, or a list of prompts")
    every = list(prompts)
    return [prompts] if every and _is_number(every[0]) else every


def private_copy(tokenizer: Any) -> Any:
    """Return a copy of a tokenizer, without truncation and padding, that only the engine uses.

    A tokenizer of the tokenizers library keeps the truncation and padding of its latest call, so threads that share one
    cut or pad each other's prompts.

    Args:
        tokenizer: a tokenizer of transformers; None is returned as it is.

    Raises:
        InvalidInput: it draws at random, or it cannot be copied.
    """
    require_one_reading(tokenizer)
    try:
        copied = copy.deepcopy(tokenizer)
    except Exception as error:  # __deepcopy__ and __getstate__ of any tokenizer
        raise InvalidInput(
            f"{type(tokenizer).__name__} cannot be copied ({error}), and an engine keeps a copy of its tokenizer: give"
            " one that copy.deepcopy() takes, or token ids and no tokenizer"
        ) from error
    backend = getattr(copied, "backend_tokenizer", None)
    if isinstance(backend, Tokenizer):
        backend.no_truncation()
        backend.no_padding()
    return copied


def require_one_reading(tokenizer: Any) -> None:
    """Raise InvalidInput if a tokenizer samples: the same text would become different tokens each time."""
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    dropout, alpha = getattr(model, "dropout", None), getattr(model, "alpha", None)
    sampling = (getattr(tokenizer, "sp_model_kwargs", None) or {}).get("enable_sampling", False)
    if dropout or alpha is not None or sampling:
        option = f"dropout {dropout:.3g}" if dropout else "sampling"
        raise InvalidInput(
            f"{type(tokenizer).__name__} draws tokens at random ({option}), a training option: the same prompt would"
            " become different tokens each time. Switch it off in tokenizer.json, or give token ids and no tokenizer"
        )


def tokenized(tokenizer: Any, text: str, **options: bool) -> list[int]:
    """Return the tokens of a text.

    Raises:
        InvalidInput: the tokenizer cannot read the text.
    """
    try:
        return token_list(tokenizer(text, **options)["input_ids"], "what the tokenizer gives")
    except Exception as error:
        half = next((place for place, letter in enumerate(text) if "\ud800" <= letter <= "\udfff"), None)
        why = repr(error) if half is None else f"character {half} is half of a surrogate pair, which is not valid text"
        raise InvalidInput(f"the tokenizer cannot read the prompt: {why}. Give other text, or token ids") from error


def _read_dict(prompt: Mapping[str, Any]) -> ReadPrompt:
    given = {key: value for key, value in prompt.items() if value is not None}
    if "input_ids" in given:
        _require_known(given, {"input_ids", "attention_mask", *BESIDE_IDS})
        ids, mask = given["input_ids"], given.get("attention_mask")
        return ReadPrompt(None, _unmasked(_only_row(ids), None if mask is None else _only_row(mask)))
    _require_known(given, {"prompt", "prompt_token_ids", "cache_salt"})
    text, salt = given.get("prompt"), given.get("cache_salt", "")
    if not isinstance(salt, str):
        raise InvalidInput(f"the prompt's cache_salt {shown(salt)} is {kind(salt)}: give a string")
    if "prompt_token_ids" in given:
        if text is not None and not isinstance(text, str):
            raise InvalidInput(f'the prompt\'s "prompt" {shown(text)} is {kind(text)}: give the text of the ids')
        return ReadPrompt(text, _ids(given["prompt_token_ids"]), salt)
    return ReadPrompt(text, None, salt) if isinstance(text, str) else ReadPrompt(None, _ids(text), salt)


def _batch_of(prompts: Mapping[str, Any]) -> list[Any]:
    """Split a dict with 2-D ids into one dict per row."""
    ids, mask = prompts.get("input_ids"), prompts.get("attention_mask")
    if ids is None or not _is_list(ids) or not len(ids) or _is_number(_first(ids)):
        return [prompts]
    rest = {key: value for key, value in prompts.items() if key not in ("input_ids", "attention_mask")}
    if mask is not None and (not _is_list(mask) or len(mask) != len(ids)):
        raise InvalidInput("attention_mask and input_ids have to be of one shape: give a mask a row")
    masks = [None] * len(ids) if mask is None else list(mask)
    return [rest | {"input_ids": row, "attention_mask": row_mask} for row, row_mask in zip(ids, masks)]


def _unmasked(ids: Any, mask: Any) -> list[int]:
    """Return the ids without padding."""
    token_ids = token_list(ids, "the prompt's input_ids")
    if mask is None:
        return token_ids
    kept = mask.tolist() if hasattr(mask, "tolist") else list(mask)
    if len(kept) != len(token_ids) or not all(keep in (0, 1) for keep in kept):
        raise InvalidInput(
            f"the prompt's attention_mask must hold a 0 (padding) or a 1 for each of its {len(token_ids)} input_ids"
        )
    return [token for token, keep in zip(token_ids, kept) if keep]


def _ids(values: Any) -> list[int]:
    return token_list(_only_row(values), "the prompt is neither text nor token ids")


def _only_row(values: Any) -> Any:
    """Return a 1-D list of values; two dimensions are accepted if there is only one row."""
    if not _is_list(values):
        raise InvalidInput(f"the prompt's ids {shown(values)} are {kind(values)}: give a list of integers")
    if not len(values) or not _is_list(_first(values)):
        return values
    if len(values) > 1:
        raise InvalidInput(f"the prompt has {len(values)} rows: give one prompt, or all of them to generate()")
    return _first(values)


def _first(values: Any) -> Any:
    return next(iter(values))


def _require_known(given: Mapping[str, Any], known: set[str]) -> None:
    unknown = [key for key in given if key not in known]
    if unknown or not given:
        chat = ": make a prompt of messages with tokenizer.apply_chat_template" if "role" in given else ""
        raise InvalidInput(
            f"the prompt is a dict with {shown(unknown)[1:-1] or 'nothing in it'}, which cannot be served"
            f"{chat}: give {WANTED}"
        )


def _is_list(value: Any) -> bool:
    """Return True for lists and for arrays of one or more dimensions (numpy, torch, pandas)."""
    if hasattr(value, "tolist") and not isinstance(value, memoryview):
        return getattr(value, "ndim", 1) > 0
    return isinstance(value, SequenceOf) and not isinstance(value, (str, bytes, bytearray, memoryview))


def _is_number(value: Any) -> bool:
    """Return True for numbers, including 0-d arrays of numpy and torch."""
    return isinstance(value, (int, float)) or (getattr(value, "ndim", None) == 0 and not isinstance(value, str))
