"""Tokens that end an answer, and the one that fills what is behind it, as a model's configuration has them."""

from collections.abc import Sequence, Set
from typing import Any

from detcompile.runtime.requests.plain_values import token_list, whole_number

__all__ = ["pad_token", "stop_tokens"]


def stop_tokens(model: Any, given: int | Sequence[int] | None, num_logits: int | None = None) -> tuple[int, ...]:
    """``given``, or else the end tokens of the model's ``generation_config``.

    Args:
        num_logits: leaves out what the configuration names beyond the ids that the model draws.

    Raises:
        InvalidInput: neither a token id nor several.
    """
    if given is not None:
        return _ids(given, "eos_token_id")
    config = getattr(model, "generation_config", None)
    own = _ids(getattr(config, "eos_token_id", None), "generation_config.eos_token_id")
    return own if num_logits is None else tuple(token for token in own if 0 <= token < num_logits)


def pad_token(model: Any, given: int | None, stop: tuple[int, ...]) -> int:
    """``given``, or else the model's own, the first token that stops, or 0."""
    own = getattr(getattr(model, "generation_config", None), "pad_token_id", None)
    return next(token for token in (given, own, *stop, 0) if token is not None)


def _ids(value: Any, name: str) -> tuple[int, ...]:
    if value is None:
        return ()
    listed = isinstance(value, (Sequence, Set)) and not isinstance(value, (str, bytes))
    many = listed or getattr(value, "ndim", 0) > 0
    return tuple(token_list(value, name)) if many else (whole_number(value, name),)
