"""Layers of transformers that compute their recurrence in place, written anew around a call of ours."""

from collections.abc import Callable
from typing import Any

__all__ = ["OWN_MIXERS"]

OWN_MIXERS: dict[str, Callable[..., Any]] = {}
