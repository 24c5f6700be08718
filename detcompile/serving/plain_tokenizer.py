"""A model's tokenizer as JSON of the tokenizers library, which the front reads and writes text with."""

import functools
import hashlib
import unicodedata
from collections.abc import Iterator
from typing import Any

import msgspec
from tokenizers import Tokenizer, pre_tokenizers

from detcompile.errors import InvalidInput, UnsupportedModel
from detcompile.runtime.requests.prompts import require_one_reading

__all__ = ["longest_token", "plain_tokenizer", "tokenizer_digest"]

NFC_SHRINKS = 4  # no text has more bytes than so many times those of its NFC
PROBE = "A probe: Ünïcode 東京 🎉\n\tdef f(x):  return x  <s>"  # both ways to tokenize are compared by it


def plain_tokenizer(tokenizer: Any) -> str:
    """Return the JSON of a tokenizer of transformers. Whether it splits special tokens is not in it.

    Raises:
        UnsupportedModel: a tokenizer that only its own code can run, or that draws at random.
    """
    try:
        require_one_reading(tokenizer)
    except InvalidInput as error:
        raise UnsupportedModel(str(error)) from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    name = type(tokenizer).__name__
    if not isinstance(backend, Tokenizer):
        raise UnsupportedModel(f"the server needs a tokenizer of the tokenizers library, and {name} is none")
    alone = Tokenizer.from_str(backend.to_str())
    alone.no_truncation()
    alone.no_padding()
    alone.encode_special_tokens = tokenizer.split_special_tokens
    probe = PROBE + "".join(f" {token.content}a" for token in alone.get_added_tokens_decoder().values())
    for added in (True, False):
        ids = tokenizer(probe, add_special_tokens=added, verbose=False)["input_ids"]
        if alone.encode(probe, add_special_tokens=added).ids != ids:
            raise UnsupportedModel(f"{name} tokenizes by code of its own, which the server does not run")
        text = tokenizer.decode(ids, skip_special_tokens=added, clean_up_tokenization_spaces=False)
        if alone.decode(ids, skip_special_tokens=added) != text:
            raise UnsupportedModel(f"{name} makes text by code of its own, which the server does not run")
    return alone.to_str()


def longest_token(source: str) -> int | None:
    """Bytes of a text that one token can stand for at most; None where that cannot be told.

    It can of byte-level BPE that reads every byte: its pre-tokenizers remove nothing, its added tokens take no spaces
    beside them, and its normalizer is none or NFC.

    Args:
        source: a tokenizer as JSON.
    """
    plain: dict[str, Any] = msgspec.json.decode(source)
    model, added = plain["model"], plain["added_tokens"]
    normalizers = {own["type"] for own in _parts(plain["normalizer"], "normalizers")}
    splits = list(_parts(plain["pre_tokenizer"], "pretokenizers"))
    reads_all = (
        model.get("type") == "BPE"
        and model["vocab"].keys() >= set(pre_tokenizers.ByteLevel.alphabet())
        and normalizers <= {"NFC"}
        and {own["type"] for own in splits} <= {"ByteLevel", "Split", "Digits", "Punctuation"}
        and any(own["type"] == "ByteLevel" for own in splits)
        and not any(own.get("behavior") == "Removed" for own in splits)
        and not any(own["lstrip"] or own["rstrip"] for own in added)
    )
    if not reads_all:
        return None
    forms = (form for own in added for form in (own["content"], unicodedata.normalize("NFC", own["content"])))
    most = max(*map(len, model["vocab"]), *(len(form.encode()) for form in forms), 0)
    return most * NFC_SHRINKS if normalizers else most


def _parts(own: dict[str, Any] | None, name: str) -> Iterator[dict[str, Any]]:
    """The parts of a sequence in a tokenizer's JSON, or what is none as its only part."""
    if own is None:
        return
    if own["type"] != "Sequence":
        yield own
        return
    for part in own[name]:
        yield from _parts(part, name)


@functools.lru_cache(maxsize=2)  # a server asks for each receipt, of a text of megabytes
def tokenizer_digest(source: str | None) -> str | None:
    """sha256, in hex, of a tokenizer's JSON; None for a model without one."""
    return None if source is None else hashlib.sha256(source.encode()).hexdigest()
