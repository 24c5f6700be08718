"""Records of attention's operands: a layer's Caches and HeadNorm, a step's metadata, a kernel launch."""

from typing import NamedTuple

from torch import Tensor

from detcompile.templates.attention.schedules import AttentionProblem, AttentionSchedule, most_tiles
from detcompile.templates.attention.scores import AttentionRule
from detcompile.templates.device.launcher import cdiv, next_power_of_2


class Caches(NamedTuple):
    """Keys [num_blocks, block_size, KV heads, D] and values [..., DV] of one layer."""

    k: Tensor
    v: Tensor


class HeadNorm(NamedTuple):
    """RMS norm of each head of the queries and keys.

    Attributes:
        q_weight: weights [D] of the queries' norm, or None.
        k_weight: weights [D] of the keys' norm, or None.
        eps: added to the mean of the squares; None for no norm.
        round_before_weight: True if a normed head is rounded before the multiplication by its weights.
    """

    q_weight: Tensor | None
    k_weight: Tensor | None
    eps: float | None
    round_before_weight: bool


class StepMetadata(NamedTuple):
    """A step's sequences among its tokens, and their keys among the blocks: see `step.StepInputs`."""

    cu_seqlens: Tensor
    seq_lens: Tensor
    block_table: Tensor


class AttentionLaunch(NamedTuple):
    """One launch of any attention kernel; each kernel reads the fields it needs.

    Attributes:
        q: queries [B, T, H, D]; B = 1 if keys are paged.
        k: keys [num_blocks, block_size, KV heads, D]; dense: [B, T, KV heads, D].
        v: values as k, with DV for D.
        out: results [B, T, H, DV].
        target: out, or if split the chunks' outputs [T, H, chunks, DV].
        max_and_sum: out, or if split the chunks' maxima and sums [T, H, chunks, 2].
        step: metadata; dense: unused tensors.
        S: sequences; dense: B.
        chunks: chunks that fit in the block table.
        split: True if each chunk has separate programs.
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
        """Return the number of tiles with ``heads`` heads per token; an upper bound if paged."""
        if self.problem.block_size:
            return most_tiles(self.T, self.S, self.schedule.block_m, self.problem.group)
        return self.S * cdiv(self.T, self.schedule.block_m // heads)


def unit_rows(rows: Tensor) -> Tensor:
    """Return a tensor whose last dim has stride 1; a copy if it has not."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def padded(width: int) -> int:
    """Return the next power of two, at least 16: the smallest size of a product."""
    return max(16, next_power_of_2(width))
