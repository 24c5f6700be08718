"""End-of-sequence tokens from a model's configuration."""

from collections.abc import Sequence, Set
from typing import Any

from detcompile.runtime.requests.plain_values import token_list, whole_number


def stop_tokens(model: Any) -> tuple[int, ...]:
    """Return the end tokens of the model's ``generation_config``.

    Raises:
        InvalidInput: the value is neither a token id nor a list of them.
    """
    config = getattr(model, "generation_config", None)
    return token_ids(getattr(config, "eos_token_id", None), "generation_config.eos_token_id")


def token_ids(value: Any, name: str) -> tuple[int, ...]:
    """Return one token id, several or none as a tuple.

    Raises:
        InvalidInput: the value is neither a token id nor a list of them.
    """
    if value is None:
        return ()
    listed = isinstance(value, (Sequence, Set)) and not isinstance(value, (str, bytes))
    many = listed or getattr(value, "ndim", 0) > 0
    return tuple(token_list(value, name)) if many else (whole_number(value, name),)
