"""Tiny trainers, their sequences, and the gradients of a step."""

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import detcompile
from detcompile import Numerics, Trainer
from tests.model_cases import MAX_CONTEXT, VOCAB_SIZE, random_model

__all__ = [
    "ARCHITECTURES",
    "TARGETS",
    "adapted",
    "add_gradients",
    "gradient_errors",
    "gradients",
    "padded",
    "sequences",
    "trained",
]

ARCHITECTURES = (
    *("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "gpt2", "gpt_neox", "opt", "olmo2"),
    "granite",
)
GROUPS = {  # of parameters, by parts of their names
    "attention": r"attn\.|attention\.",
    "MLP": "mlp|fc1|fc2",
    "norms": "norm|ln_",
    "embedding": "embed|wte|wpe",
    "head": "head",
    "all": "",
}
TARGETS = ["q_proj", "o_proj", "up_proj", "down_proj"]  # linears with adapters


@functools.cache
def trained(name: str, dtype: torch.dtype = torch.bfloat16, numerics: Numerics | None = None) -> Trainer:
    """Return ``random_model`` as a trainer, once per process; callers clear its gradients."""
    return detcompile.trainer(random_model(name, dtype), numerics=numerics, max_context=MAX_CONTEXT)


def adapted(name: str = "qwen3", dtype: torch.dtype = torch.bfloat16, **config: Any) -> Any:
    """Return ``random_model`` with nonzero adapters; the same at every call."""
    import peft  # needs the extra `lora`

    model = random_model(name, dtype)
    torch.manual_seed(1)
    given = {"r": 6, "lora_alpha": 24, "target_modules": TARGETS, "init_lora_weights": False} | config
    autocast = given.pop("autocast", False)
    return peft.get_peft_model(model, peft.LoraConfig(**given), autocast_adapter_dtype=autocast).eval()


def sequences(lengths: Sequence[int], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, VOCAB_SIZE, (length,), generator=generator) for length in lengths]


def padded(rows: Sequence[Tensor], left: Sequence[int] = (), width: int = 0) -> tuple[Tensor, Tensor]:
    """Return token ids and mask [B, C], each row after so many columns of padding."""
    left = left or [0] * len(rows)
    columns = max(width, *(start + len(row) for start, row in zip(left, rows, strict=True)))
    ids, mask = (torch.zeros(len(rows), columns, dtype=torch.int64) for _ in range(2))
    for place, (start, row) in enumerate(zip(left, rows, strict=True)):
        ids[place, start : start + len(row)], mask[place, start : start + len(row)] = row, 1
    return ids, mask


def gradients(trainer: Trainer, rows: Sequence[Tensor], groups: Sequence[Sequence[int]]) -> Mapping[str, Tensor]:
    """Return gradients of minus the mean log-probability, over micro-batches of the sequences with these indices."""
    trainer.zero_grad()
    add_gradients(trainer, rows, groups)
    named = trainer.named_parameters()
    return {name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None}


def add_gradients(trainer: Trainer, rows: Sequence[Tensor], groups: Sequence[Sequence[int]]) -> None:
    """Add the result of ``gradients`` to the present gradients, whatever rows other ranks read."""
    weights = [torch.linspace(0.5, 1.5, len(row) - 1) for row in rows]  # a separate one per token
    for group in groups:
        ids, mask = padded([rows[number] for number in group])
        logprobs = trainer.logprobs(ids, mask)
        weight = torch.zeros_like(logprobs)
        for place, number in enumerate(group):
            weight[place, : len(rows[number]) - 1] = weights[number]
        (-(logprobs * weight).sum() / sum(map(len, rows))).backward()


def gradient_errors(
    trainer: Trainer, name: str, dtype: torch.dtype, rows: Sequence[Tensor]
) -> Iterator[tuple[str, float, float]]:
    """Yield for each group of parameters the errors of a trainer's gradients and of torch's in ``dtype``.

    Both are relative to float64: the Frobenius norm of the difference over that of the gradient.
    """
    actual = gradients(trainer, rows, [range(len(rows))])
    truth, plain = (by_torch(name, dtype, other, rows) for other in (torch.float64, dtype))
    for group, pattern in GROUPS.items():
        names = [name for name in truth if re.search(pattern, name)]
        length = sum(float(truth[name].norm() ** 2) for name in names) ** 0.5
        if names:
            ours, torchs = (distance(values, truth, names) / length for values in (actual, plain))
            yield group, ours, torchs


def by_torch(name: str, dtype: torch.dtype, other: torch.dtype, rows: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return gradients of the Hugging Face model with its weights in ``dtype``."""
    model = random_model(name, dtype).to(other)
    model.set_attn_implementation("eager")  # sdpa leaves gemma2's soft cap out
    for row in rows:
        logits = model(row[None]).logits[0, :-1]
        logprobs = (logits if other is torch.float64 else logits.float()).log_softmax(-1)
        weights = torch.linspace(0.5, 1.5, len(row) - 1)
        (-(logprobs.gather(1, row[1:, None]).squeeze(1) * weights).sum() / sum(map(len, rows))).backward()
    return {name: parameter.grad.double() for name, parameter in model.named_parameters()}


def distance(actual: Mapping[str, Tensor], truth: Mapping[str, Tensor], names: Sequence[str]) -> float:
    return sum(float((actual[name].double() - truth[name]).norm() ** 2) for name in names) ** 0.5
