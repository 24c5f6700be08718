"""What a call of a model is given, checked by name: Hugging Face's keywords that are served, idle, or refused."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from detcompile.errors import InvalidInput

__all__ = ["require_served", "require_tensors"]

IDLE = ("cache_position", "use_cache")  # a call keeps no cache, and gives none back
REFUSED = {
    "inputs_embeds": "a compiled model reads token ids: pass input_ids",
    "past_key_values": "a call keeps no cache of the caller's: generate(), or an engine, continues a prompt",
    "output_hidden_states": "the program gives logits alone: take them from the Hugging Face module",
    "output_attentions": "the program gives logits alone: take them from the Hugging Face module",
}
SERVED = "input_ids, attention_mask, position_ids, labels, logits_to_keep and return_dict"


def require_served(keywords: Mapping[str, Any], served: str = SERVED) -> None:
    """Fail if one of these keywords of a call changes what it gives; ``served`` are the others, in words.

    Raises:
        InvalidInput: naming the keyword.
    """
    for name, value in keywords.items():
        asked = value is not None and value is not False
        if name in REFUSED and asked:
            raise InvalidInput(f"{name} is not served: {REFUSED[name]}")
        if name == "cache_position" and asked:
            raise InvalidInput("cache_position is not served: pass position_ids, for each token its own")
        if name not in REFUSED and name not in IDLE:
            raise InvalidInput(f"{name}: no argument of a call; there are {served}")


def require_tensors(
    input_ids: object, attention_mask: object, position_ids: object, labels: object
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The first three, as the tensors that all of them have to be; None if they are not given.

    Raises:
        InvalidInput: naming the argument.
    """
    if input_ids is None:
        raise InvalidInput("input_ids is missing: pass token ids, [batch, length]")
    given = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids, "labels": labels}
    for name, value in given.items():
        if value is not None and not isinstance(value, Tensor):
            raise InvalidInput(
                f"{name} must be a tensor [batch, length], not {type(value).__name__}: pass torch.tensor(...), or what"
                ' a tokenizer gives with return_tensors="pt"'
            )
    found: Any = (input_ids, attention_mask, position_ids)
    return found
