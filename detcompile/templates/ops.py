"""Importing this module registers every operation of torch.ops.detcompile."""

from detcompile.templates import (
    attention,
    collectives,
    dequant_matmul,
    embedding,
    experts,
    gates,
    matmul,
    norms,
    rope,
    rows,
    softmax,
)

__all__ = ["FAMILIES"]

FAMILIES = (
    attention,
    collectives,
    dequant_matmul,
    embedding,
    experts,
    gates,
    matmul,
    norms,
    rope,
    rows,
    softmax,
)
