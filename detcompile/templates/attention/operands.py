"""What attention is handed, as records: a layer's Caches and HeadNorm, a step's metadata, a kernel's launch."""

from typing import NamedTuple

from torch import Tensor

from detcompile.templates.attention.schedules import AttentionProblem, AttentionSchedule, most_tiles
from detcompile.templates.attention.scores import AttentionRule
from detcompile.templates.device.launcher import cdiv, next_power_of_2

__all__ = ["AttentionLaunch", "Caches", "HeadNorm", "StepMetadata", "padded"]


class Caches(NamedTuple):
    """Keys [num_blocks, block_size, KV heads, D] and values [..., DV] of one layer."""

    k: Tensor
    v: Tensor


class HeadNorm(NamedTuple):
    """The RMS norm of each head of the queries and of the keys.

    Attributes:
        q_weight: weights [D] of the queries' norm, or None.
        k_weight: weights [D] of the keys' norm, or None.
        eps: what is added to the mean of the squares; None for no norm.
        round_before_weight: whether a normed head is rounded before it meets its weights.
    """

    q_weight: Tensor | None
    k_weight: Tensor | None
    eps: float | None
    round_before_weight: bool


class StepMetadata(NamedTuple):
    """Where a step's sequences lie among its tokens, and their keys among the blocks: see `step.StepInputs`."""

    cu_seqlens: Tensor
    seq_lens: Tensor
    block_table: Tensor


class AttentionLaunch(NamedTuple):
    """One launch of an attention kernel, whichever it is: each reads what it needs.

    Attributes:
        q: queries [B, T, H, D]; B = 1 where keys are paged.
        k: keys [num_blocks, block_size, KV heads, D]; dense: [B, T, KV heads, D].
        v: values as k, DV for D.
        out: results [B, T, H, DV].
        target: out, or if split the chunks' outputs [T, H, chunks, DV].
        max_and_sum: out, or if split the chunks' maxima and sums [T, H, chunks, 2].
        step: metadata; dense: tensors that nobody reads.
        S: sequences; dense: B.
        chunks: chunks that the block table has room for.
        split: whether each chunk has programs of its own.
    """

    schedule: AttentionSchedule
    problem: AttentionProblem
    rule: AttentionRule
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    target: Tensor
    max_and_sum: Tensor
    step: StepMetadata
    T: int
    S: int
    chunks: int
    split: bool

    def tiles(self, heads: int) -> int:
        """Tiles of the schedule's rows, so many heads of a token in each; if paged, their upper bound."""
        if self.problem.block_size:
            return most_tiles(self.T, self.S, self.schedule.block_m, self.problem.group)
        return self.S * cdiv(self.T, self.schedule.block_m // heads)


def padded(width: int) -> int:
    """The next power of two, 16 or more: what a product takes."""
    return max(16, next_power_of_2(width))
