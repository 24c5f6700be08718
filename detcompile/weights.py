"""weights_digest: one hash over every weight of a model, whole: before its ranks take their shares."""

import hashlib

import torch
from torch import nn

__all__ = ["weights_digest"]

CHUNK_BYTES = 1 << 26


def weights_digest(model: nn.Module) -> str:
    """sha256 over names, shapes, dtypes and bytes of every parameter and buffer."""
    digest = hashlib.sha256()
    for name, tensor in sorted({**dict(model.named_parameters()), **dict(model.named_buffers())}.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        for chunk in flat.split(CHUNK_BYTES):
            digest.update(chunk.cpu().numpy().data)
    return digest.hexdigest()
