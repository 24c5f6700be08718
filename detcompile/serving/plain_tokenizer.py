"""A model's tokenizer as JSON of the tokenizers library, for the front end."""

import functools
import hashlib
import unicodedata
from collections.abc import Iterator
from typing import Any

import msgspec
from tokenizers import Tokenizer, pre_tokenizers

from detcompile.errors import InvalidInput, UnsupportedModel
from detcompile.runtime.requests.prompts import require_one_reading

NFC_SHRINKS = 4  # a text has at most this many times the bytes of its NFC
PROBE = "A probe: Ünïcode 東京 🎉\n\tdef f(x):  return x  <s>"  # text on which both tokenizers are compared


def plain_tokenizer(tokenizer: Any) -> str:
    """Return a transformers tokenizer as JSON, without ``split_special_tokens``.

    Raises:
        UnsupportedModel: the tokenizer needs Python code of its own, or is random.
    """
    try:
        require_one_reading(tokenizer)
    except InvalidInput as error:
        raise UnsupportedModel(str(error)) from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    name = type(tokenizer).__name__
    if not isinstance(backend, Tokenizer):
        raise UnsupportedModel(f"the server needs a tokenizer of the tokenizers library, got {name}")
    alone = Tokenizer.from_str(backend.to_str())
    alone.no_truncation()
    alone.no_padding()
    alone.encode_special_tokens = tokenizer.split_special_tokens
    probe = PROBE + "".join(f" {token.content}a" for token in alone.get_added_tokens_decoder().values())
    for added in (True, False):
        ids = tokenizer(probe, add_special_tokens=added, verbose=False)["input_ids"]
        if alone.encode(probe, add_special_tokens=added).ids != ids:
            raise UnsupportedModel(f"{name} encodes with Python code, which the server does not run")
        text = tokenizer.decode(ids, skip_special_tokens=added, clean_up_tokenization_spaces=False)
        if alone.decode(ids, skip_special_tokens=added) != text:
            raise UnsupportedModel(f"{name} decodes with Python code, which the server does not run")
    return alone.to_str()


def longest_token(source: str) -> int | None:
    """Return the largest number of bytes that one token can stand for; None if unknown.

    It is known for byte-level BPE that reads every byte: pre-tokenizers that remove nothing, added tokens that strip no
    spaces, and no normalizer or NFC.

    Args:
        source: the tokenizer as JSON.
    """
    plain: dict[str, Any] = msgspec.json.decode(source)
    model, added = plain["model"], plain["added_tokens"]
    normalizers = {part["type"] for part in _parts(plain["normalizer"], "normalizers")}
    splits = list(_parts(plain["pre_tokenizer"], "pretokenizers"))
    reads_all = (
        model.get("type") == "BPE"
        and model["vocab"].keys() >= set(pre_tokenizers.ByteLevel.alphabet())
        and normalizers <= {"NFC"}
        and {split["type"] for split in splits} <= {"ByteLevel", "Split", "Digits", "Punctuation"}
        and any(split["type"] == "ByteLevel" for split in splits)
        and not any(split.get("behavior") == "Removed" for split in splits)
        and not any(token["lstrip"] or token["rstrip"] for token in added)
    )
    if not reads_all:
        return None
    contents = [token["content"] for token in added]
    forms = [*contents, *(unicodedata.normalize("NFC", content) for content in contents)]
    most = max(*map(len, model["vocab"]), *(len(form.encode()) for form in forms), 0)
    return most * NFC_SHRINKS if normalizers else most


def _parts(config: dict[str, Any] | None, name: str) -> Iterator[dict[str, Any]]:
    """Yield the parts of a Sequence in a tokenizer's JSON; anything else is its only part."""
    if config is None:
        return
    if config["type"] != "Sequence":
        yield config
        return
    for part in config[name]:
        yield from _parts(part, name)


@functools.lru_cache(maxsize=2)  # called for each receipt; the JSON has megabytes
def tokenizer_digest(source: str | None) -> str | None:
    """Return the sha256, in hex, of a tokenizer's JSON; None without a tokenizer."""
    return None if source is None else hashlib.sha256(source.encode()).hexdigest()
