"""Importing this module registers every operation of torch.ops.detcompile."""

from detcompile.templates import (
    attention,
    batched_matmul,
    causal_conv,
    collectives,
    dequant_matmul,
    embedding,
    experts,
    gates,
    linear_recurrence,
    matmul,
    moves,
    norms,
    rope,
    rows,
    running_max,
    softmax,
    wkv,
)

__all__ = ["FAMILIES"]

FAMILIES = (
    attention,
    batched_matmul,
    causal_conv,
    collectives,
    dequant_matmul,
    embedding,
    experts,
    gates,
    linear_recurrence,
    matmul,
    moves,
    norms,
    rope,
    rows,
    running_max,
    softmax,
    wkv,
)
