"""Which tokens end an answer, and which one fills what is behind it, as a model's configuration has them."""

from collections.abc import Sequence
from typing import Any

__all__ = ["pad_token", "stop_tokens"]


def stop_tokens(model: Any, given: int | Sequence[int] | None) -> tuple[int, ...]:
    """``given``, or else the end tokens of the model's ``generation_config``."""
    config = getattr(model, "generation_config", None)
    chosen = getattr(config, "eos_token_id", None) if given is None else given
    return () if chosen is None else (chosen,) if isinstance(chosen, int) else tuple(chosen)


def pad_token(model: Any, given: int | None, stop: tuple[int, ...]) -> int:
    """``given``, or else the model's own, the first token that stops, or 0."""
    own = getattr(getattr(model, "generation_config", None), "pad_token_id", None)
    return next(token for token in (given, own, *stop, 0) if token is not None)
