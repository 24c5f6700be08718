"""DraftStatistics: acceptance of an engine's drafts, and the expected tokens per step."""

from collections import Counter
from dataclasses import dataclass, field


def expected_tokens(rate: float, depth: int) -> float:
    """Return the tokens per step of a chain accepted at ``rate`` per guess: (1 - rate^(depth + 1)) / (1 - rate).

    Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", ICML 2023, equation 1.
    """
    return depth + 1.0 if rate == 1 else (1 - rate ** (depth + 1)) / (1 - rate)


@dataclass(slots=True)
class DraftStatistics:
    """Counts over all verified trees.

    Attributes:
        num_drafted, num_accepted: nodes, and accepted nodes.
        num_rejected: trees that ended in a wrong guess; the others were accepted to a leaf, or cut by a stop.
        depths: number of trees by depth.
    """

    num_drafted: int = 0
    num_accepted: int = 0
    num_rejected: int = 0
    depths: Counter[int] = field(default_factory=Counter)

    def add(self, num_nodes: int, depth: int, num_accepted: int, *, rejected: bool) -> None:
        """Count a tree."""
        self.num_drafted += num_nodes
        self.num_accepted += num_accepted
        self.num_rejected += rejected
        self.depths[depth] += 1

    @property
    def num_trees(self) -> int:
        """Number of verified trees."""
        return self.depths.total()

    @property
    def acceptance_rate(self) -> float:
        """Fraction of reached nodes below which a guess was right: the alpha of Leviathan et al."""
        reached = self.num_accepted + self.num_rejected
        return self.num_accepted / reached if reached else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Measured tokens per step of a sequence with drafts."""
        return 1.0 + self.num_accepted / self.num_trees if self.num_trees else 1.0

    @property
    def expected_tokens_per_step(self) -> float:
        """Tokens per step expected from ``acceptance_rate`` for trees of these depths."""
        if not self.num_trees:
            return 1.0
        rate = self.acceptance_rate
        return sum(count * expected_tokens(rate, depth) for depth, count in self.depths.items()) / self.num_trees
