"""Compare exact arithmetic with float64: perplexity, KL divergence, top tokens and scored items (docs/exact.md).

    detcompile fetch smollm2
    python -m benchmarks.exact_accuracy [--models tiny,smollm2] [--tokens 3072] [--device cpu]

The text is from Python's standard library. Modules run eagerly, with the bits of compiled models. "x16" adds outliers:
three channels of each norm are 16 times larger and the columns of the next linears 16 times smaller, so the model's
function is the same. "rotated" multiplies rows and weights by a Hadamard matrix before they are quantized, in blocks of
256 features or of the largest power of two that divides their number; exact-1 has no such variant.
"""

import argparse
import copy
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import detcompile
from benchmarks.items import items
from detcompile import Numerics
from detcompile.models.loading import tokenizer_of
from detcompile.orders.exact import ARITHMETICS
from detcompile.passes.modules.exact import ExactLinear
from detcompile.passes.modules.quantized_linear import replace_module
from detcompile.passes.preparation import prepare

MODULES = ("lzma.py", "copyreg.py", "code.py", "http/__init__.py", "http/client.py", "http/cookiejar.py")
CHUNK = 1024  # tokens in a row
OUTLIERS = (3, 77, 200)  # channels
Make = Callable[[Any], Any]


class Rotated(ExactLinear):
    """An exact linear whose rows and weights are rotated."""

    def __init__(self, linear: nn.Linear, variant: str) -> None:
        linear = copy.deepcopy(linear).float()
        linear.weight.data = rotated(linear.weight.data)
        super().__init__(linear, ARITHMETICS[variant])

    def forward(self, x: Tensor) -> Tensor:
        """Rotate x [..., K] and multiply."""
        return super().forward(rotated(x))


def rotated(x: Tensor) -> Tensor:
    """Return x [..., K] with each block of features multiplied by a normalized Hadamard matrix."""
    size = min(256, x.shape[-1] & -x.shape[-1])
    y, half = x, 1
    while half < size:
        low, high = y.unflatten(-1, (-1, 2, half)).unbind(-2)
        y, half = torch.stack([low + high, low - high], -2).flatten(-3), 2 * half
    return y * size**-0.5


def exact(variant: str, rotate: bool = False) -> Make:
    """Return a function that changes a model to exact arithmetic."""

    def change(model: Any) -> Any:
        linears = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        prepare(model, Numerics(arithmetic=variant), CHUNK)
        for name, linear in linears if rotate else ():
            replace_module(model, name, Rotated(linear, variant))
        return model

    return change


def with_outliers(model: Any) -> Any:
    """Plant outliers in the inputs of linears without changing the model's function."""
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for norm, linears in (
            (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        ):
            norm.weight.data[list(OUTLIERS)] *= 16
            for linear in linears:
                linear.weight.data[:, list(OUTLIERS)] /= 16
    return model


def arms() -> Iterator[tuple[str, Make]]:
    """Yield each arm that is compared with float64: its name, and a function that changes a model to it."""
    yield "float32", lambda model: model.float()
    yield "bfloat16", lambda model: model  # the checkpoints' dtype
    for variant in reversed(ARITHMETICS):
        yield variant, exact(variant)
    yield "exact8, rotated", exact("exact8", rotate=True)
    for variant in reversed(ARITHMETICS):
        yield f"{variant}, x16", lambda model, change=exact(variant): change(with_outliers(model))
    yield "exact8, x16, rotated", lambda model: exact("exact8", rotate=True)(with_outliers(model))


@torch.no_grad()
def logprobs_of(model: Any, rows: Tensor) -> Tensor:
    """Return log-probabilities [B, T, V] in float64."""
    logits = torch.cat([model(input_ids=row[None], use_cache=False).logits for row in rows])
    return logits.double().log_softmax(-1)


def compared(model: Any, rows: Tensor, truth: Tensor) -> dict[str, float]:
    """Return perplexity, the mean KL divergence from the truth, and the share of equal top tokens."""
    logprobs = logprobs_of(model, rows)
    chosen = logprobs[:, :-1].gather(2, rows[:, 1:, None])
    return {
        "perplexity": round(float((-chosen.mean()).exp()), 4),
        "KL": float(f"{float((truth.exp() * (truth - logprobs)).sum(-1).mean()):.2g}"),
        "top-1": round(float((truth.argmax(-1) == logprobs.argmax(-1)).double().mean()), 4),
    }


def right_items(model: Any, tokenizer: Any) -> int:
    """Return how many items of benchmarks.items a model answers right, by the log-likelihood of the choices."""
    tested, by_length = items(), defaultdict(list)
    pairs = [(item.stem, choice) for item in tested for choice in item.choices]
    for place, pair in enumerate(pairs):
        stem, end = (tokenizer(text, add_special_tokens=False).input_ids for text in pair)
        by_length[len(stem + end)].append((place, len(stem), stem + end))
    scores = torch.zeros(len(pairs), dtype=torch.float64)
    for group in by_length.values():  # equal lengths need no padding
        rows = torch.tensor([tokens for _, _, tokens in group], device=model.device)
        logprobs = logprobs_of(model, rows).cpu()
        for (place, start, tokens), row in zip(group, logprobs):
            scores[place] = sum(row[at - 1, tokens[at]] for at in range(start, len(tokens)))
    return int((scores.view(-1, 3).argmax(1) == 0).sum())  # the first choice is the right one


def text_rows(tokenizer: Any, count: int, device: str) -> Tensor:
    """Return rows of CHUNK tokens from the standard library."""
    folder = Path(json.__file__).parents[1]
    text = "\n".join((folder / name).read_text(encoding="utf-8") for name in MODULES)
    return torch.tensor(tokenizer(text, add_special_tokens=False).input_ids[:count], device=device).view(-1, CHUNK)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="tiny,smollm2")
    parser.add_argument("--tokens", type=int, default=3 * CHUNK, help=f"a multiple of {CHUNK}")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    for name in arguments.models.split(","):
        base = detcompile.load_model(name, device=arguments.device)
        tokenizer = tokenizer_of(base)
        rows = text_rows(tokenizer, arguments.tokens, arguments.device)
        truth = logprobs_of(copy.deepcopy(base).double(), rows)
        print(f"\n| {name} | perplexity | KL | top-1 | items right |\n|---|---|---|---|---|")
        for arm, change in [("float64", lambda model: model.double()), *arms()]:
            model = change(copy.deepcopy(base))
            result = compared(model, rows, truth)
            right = right_items(model, tokenizer) if name != "tiny" else ""
            print(f"| {arm} | {result['perplexity']} | {result['KL']} | {result['top-1']} | {right} |", flush=True)


if __name__ == "__main__":
    main()
