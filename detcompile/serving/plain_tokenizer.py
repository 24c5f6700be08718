"""A model's tokenizer as JSON of the tokenizers library, which the front reads and writes text with."""

import functools
import hashlib
from typing import Any

from tokenizers import Tokenizer

from detcompile.errors import UnsupportedModel

__all__ = ["plain_tokenizer", "tokenizer_digest"]

PROBE = "A probe: Ünïcode 東京 🎉\n\tdef f(x):  return x  <s>"  # both ways to tokenize are compared by it


def plain_tokenizer(tokenizer: Any) -> str:
    """The JSON of a tokenizer of transformers.

    Raises:
        UnsupportedModel: a tokenizer that only its own code can run.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    name = type(tokenizer).__name__
    if not isinstance(backend, Tokenizer):
        raise UnsupportedModel(f"the server needs a tokenizer of the tokenizers library, and {name} is none")
    alone = Tokenizer.from_str(backend.to_str())
    alone.no_truncation()
    alone.no_padding()
    for added in (True, False):
        ids = tokenizer(PROBE, add_special_tokens=added, verbose=False)["input_ids"]
        if alone.encode(PROBE, add_special_tokens=added).ids != ids:
            raise UnsupportedModel(f"{name} tokenizes by code of its own, which the server does not run")
        text = tokenizer.decode(ids, skip_special_tokens=added, clean_up_tokenization_spaces=False)
        if alone.decode(ids, skip_special_tokens=added) != text:
            raise UnsupportedModel(f"{name} makes text by code of its own, which the server does not run")
    return alone.to_str()


@functools.lru_cache(maxsize=2)  # a server asks for each receipt, of a text of megabytes
def tokenizer_digest(source: str | None) -> str | None:
    """sha256, in hex, of a tokenizer's JSON; None for a model without one."""
    return None if source is None else hashlib.sha256(source.encode()).hexdigest()
