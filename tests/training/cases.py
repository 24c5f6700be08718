"""Tiny trainers, the sequences that they read, and the gradients of a step."""

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

import detcompile
from detcompile import Numerics, Trainer
from tests.model_cases import MAX_CONTEXT, VOCAB_SIZE, random_model

__all__ = ["ARCHITECTURES", "add_gradients", "gradients", "padded", "sequences", "trained"]

ARCHITECTURES = (
    *("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "gpt2", "gpt_neox", "opt", "olmo2"),
    "granite",
)


@functools.cache
def trained(name: str, dtype: torch.dtype = torch.bfloat16, numerics: Numerics | None = None) -> Trainer:
    """``random_model`` as a trainer, once a process: its gradients are the caller's to clear."""
    return detcompile.trainer(random_model(name, dtype), numerics=numerics, max_context=MAX_CONTEXT)


def sequences(lengths: Sequence[int], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, VOCAB_SIZE, (length,), generator=generator) for length in lengths]


def padded(rows: Sequence[Tensor], left: Sequence[int] = (), width: int = 0) -> tuple[Tensor, Tensor]:
    """Token ids and mask [B, C], each row behind so many columns of padding."""
    left = left or [0] * len(rows)
    columns = max(width, *(start + len(row) for start, row in zip(left, rows, strict=True)))
    ids, mask = (torch.zeros(len(rows), columns, dtype=torch.int64) for _ in range(2))
    for place, (start, row) in enumerate(zip(left, rows, strict=True)):
        ids[place, start : start + len(row)], mask[place, start : start + len(row)] = row, 1
    return ids, mask


def gradients(trainer: Trainer, rows: Sequence[Tensor], groups: Sequence[Sequence[int]]) -> Mapping[str, Tensor]:
    """Gradients of minus the mean log-probability, over micro-batches of the sequences of these numbers."""
    trainer.zero_grad()
    add_gradients(trainer, rows, groups)
    named = trainer.named_parameters()
    return {name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None}


def add_gradients(trainer: Trainer, rows: Sequence[Tensor], groups: Sequence[Sequence[int]]) -> None:
    """Add what ``gradients`` gives to the gradients that there are, whatever rows other ranks read."""
    weights = [torch.linspace(0.5, 1.5, len(row) - 1) for row in rows]  # every token has its own
    for group in groups:
        ids, mask = padded([rows[number] for number in group])
        logprobs = trainer.logprobs(ids, mask)
        weight = torch.zeros_like(logprobs)
        for place, number in enumerate(group):
            weight[place, : len(rows[number]) - 1] = weights[number]
        (-(logprobs * weight).sum() / sum(map(len, rows))).backward()
