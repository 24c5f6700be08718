"""MedusaHeads: guess several later tokens from one hidden state of the target.

Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", ICML 2024, section
2.1.1. Head k reads the state from which the target drew the newest token, and guesses the k-th token after that one.

Legend: K heads, R rows, H hidden size, V vocabulary size.
"""

import json
from pathlib import Path

import safetensors
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from detcompile.errors import InvalidInput

TINY = Path(__file__).parents[2] / "tiny" / "medusa"
WEIGHTS, CONFIG = "model.safetensors", "config.json"
# Exceptions of files that are not Medusa heads: missing, malformed, or with weights of other shapes.
UNREADABLE = (OSError, ValueError, TypeError, KeyError, StopIteration, RuntimeError, safetensors.SafetensorError)
FIELDS = ("hidden_size", "num_heads", "num_layers", "vocab_size")


class MedusaHeads(nn.Module):
    """Residual blocks and a language-model head for each offset.

    Args:
        hidden_size: size of the target's hidden states.
        num_heads: number of offsets to guess, starting with 1.
        num_layers: residual blocks x + silu(Wx + b) per head; W and b start as zero.
        vocab_size: rows of each head's language-model head; None shares the target's head.

    Raises:
        InvalidInput: a size is invalid.
    """

    def __init__(self, hidden_size: int, num_heads: int, *, num_layers: int = 1, vocab_size: int | None = None) -> None:
        super().__init__()
        sizes = (hidden_size, num_heads, num_layers, 1 if vocab_size is None else vocab_size)
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            raise InvalidInput(f"MedusaHeads: {dict(zip(FIELDS, sizes))} have to be positive integers")
        self.hidden_size, self.num_heads, self.num_layers, self.vocab_size = (*sizes[:3], vocab_size)
        self.blocks = nn.ModuleList(
            nn.Sequential(*(_ResidualBlock(hidden_size) for _ in range(num_layers))) for _ in range(num_heads)
        )
        num_lm_heads = 0 if vocab_size is None else num_heads
        self.lm_heads = nn.ParameterList(torch.empty(vocab_size or 0, hidden_size) for _ in range(num_lm_heads))
        for weight in self.lm_heads:
            nn.init.normal_(weight, std=hidden_size**-0.5)

    def hidden(self, rows: Tensor) -> list[Tensor]:
        """Map the target's states [.., H] to the inputs [.., H] of each language-model head."""
        return [block(rows) for block in self.blocks]

    def forward(self, rows: Tensor, lm_head: Tensor) -> Tensor:
        """Return logits [K, R, V] of hidden states [R, H].

        Args:
            lm_head: [V, H] of the target, for heads without a language-model head.
        """
        weights = list(self.lm_heads) or [lm_head] * self.num_heads
        return torch.stack([F.linear(value, weight) for value, weight in zip(self.hidden(rows), weights, strict=True)])

    def save(self, folder: str | Path) -> None:
        """Write config.json and model.safetensors to a folder."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config = {name: getattr(self, name) for name in FIELDS}
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        safetensors.torch.save_file(self.state_dict(), folder / WEIGHTS, metadata={"format": "pt"})

    @classmethod
    def load(cls, folder: str | Path) -> "MedusaHeads":
        """Read what ``save`` wrote, in its dtype, on the CPU; "tiny" loads the heads of the embedded model.

        Raises:
            InvalidInput: the folder is missing or does not hold Medusa heads.
        """
        folder = TINY if str(folder) == "tiny" else Path(folder)
        try:
            config = json.loads((folder / CONFIG).read_text())
            sizes = {name: config[name] for name in FIELDS}
            weights = safetensors.torch.load_file(folder / WEIGHTS)
            heads = cls(sizes.pop("hidden_size"), sizes.pop("num_heads"), **sizes)
            heads.to(next(iter(weights.values())).dtype).load_state_dict(weights)
        except UNREADABLE as error:
            raise InvalidInput(f"{folder} holds no Medusa heads: {error!r}") from error
        return heads.eval().requires_grad_(False)


class _ResidualBlock(nn.Linear):
    """x + silu(Wx + b), initially the identity."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, hidden_size)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(super().forward(x))
