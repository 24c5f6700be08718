"""MedusaHeads: guesses at several later tokens from one hidden state of the target (Cai et al., "Medusa: Simple LLM
Inference Acceleration Framework with Multiple Decoding Heads", ICML 2024, section 2.1.1).

Head k reads the state that the target's own head drew the newest token from, and guesses the k-th token after that one.

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

__all__ = ["MedusaHeads"]

TINY = Path(__file__).parents[2] / "tiny" / "medusa"
WEIGHTS, CONFIG = "model.safetensors", "config.json"
# What files that are none of ours raise, from one that is missing to weights of other shapes.
UNREADABLE = (OSError, ValueError, TypeError, KeyError, StopIteration, RuntimeError, safetensors.SafetensorError)
FIELDS = ("hidden_size", "num_heads", "num_layers", "vocab_size")


class MedusaHeads(nn.Module):
    """Residual blocks and a language-model head for each offset.

    Args:
        hidden_size: features of the target's hidden states.
        num_heads: offsets that are guessed, 1 the nearest.
        num_layers: residual blocks x + silu(Wx + b) of a head, W and b zero at first.
        vocab_size: rows of each head's own language-model head; None has all use the target's, which need not be
            shipped again.

    Raises:
        InvalidInput: sizes that cannot be.
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
        own = 0 if vocab_size is None else num_heads
        self.lm_heads = nn.ParameterList(torch.empty(vocab_size or 0, hidden_size) for _ in range(own))
        for weight in self.lm_heads:
            nn.init.normal_(weight, std=hidden_size**-0.5)

    def hidden(self, rows: Tensor) -> list[Tensor]:
        """[.., H] of the target -> what each head hands to its language-model head, [.., H]."""
        return [block(rows) for block in self.blocks]

    def forward(self, rows: Tensor, lm_head: Tensor) -> Tensor:
        """Logits [K, R, V] of hidden states [R, H].

        Args:
            lm_head: [V, H] of the target, for heads without one of their own.
        """
        weights = list(self.lm_heads) or [lm_head] * self.num_heads
        return torch.stack([F.linear(value, weight) for value, weight in zip(self.hidden(rows), weights, strict=True)])

    def save(self, folder: str | Path) -> None:
        """Write config.json and model.safetensors."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config = {name: getattr(self, name) for name in FIELDS}
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        safetensors.torch.save_file(self.state_dict(), folder / WEIGHTS, metadata={"format": "pt"})

    @classmethod
    def load(cls, folder: str | Path) -> "MedusaHeads":
        """Read what ``save`` wrote, in its dtype, on the CPU; "tiny" are the heads of the embedded model.

        Raises:
            InvalidInput: no such folder, or not heads.
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
    """x + silu(Wx + b), which starts as the identity."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, hidden_size)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(super().forward(x))
