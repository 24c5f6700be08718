"""The weights of a model: one hash over all of them, and where they are.

The hash is of the whole weights: ranks compute it before they take their shares.
"""

import hashlib
from collections.abc import Callable, Mapping

import torch
from torch import nn

from detcompile.errors import InvalidInput

__all__ = ["require_weights_at", "weight_addresses", "weights_digest"]

CHUNK_BYTES = 1 << 26


def weights_digest(model: nn.Module, on_read: Callable[[int, int], None] | None = None) -> str:
    """sha256 over names, shapes, dtypes and bytes of every parameter and buffer.

    Args:
        on_read: is told the bytes read so far and of how many, once a part in a thousand or more, and at the end.
    """
    digest = hashlib.sha256()
    weights = sorted(_weights(model).items())
    done, told, total = 0, 0, sum(tensor.nbytes for _, tensor in weights)
    for name, tensor in weights:
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        for chunk in flat.split(CHUNK_BYTES):
            digest.update(chunk.cpu().numpy().data)
            done += chunk.nbytes
            if on_read is not None and (done == total or 1000 * (done - told) >= total):
                on_read(done, total)
                told = done
    return digest.hexdigest()


def weight_addresses(model: nn.Module) -> dict[str, int]:
    """Where each parameter and buffer begins in memory; another address is another storage."""
    return {name: tensor.data_ptr() for name, tensor in _weights(model).items()}


def require_weights_at(addresses: Mapping[str, int], model: nn.Module) -> None:
    """Fail unless every weight is where it was: a compiled graph holds the storage that it was given.

    Raises:
        InvalidInput: one is not.
    """
    now = weight_addresses(model)
    moved = next((name for name, address in addresses.items() if now.get(name) != address), None)
    if moved is not None:
        raise InvalidInput(
            f"{moved} was given another storage after compile(), and the graph still runs the old one: change weights"
            " in place (param.copy_()), or load and compile the model again"
        )


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
