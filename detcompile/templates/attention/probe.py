"""Data on which the gate compares attention schedules: two sequences over three chunks, with NaN in unused slots.

One sequence decodes and one is in the middle of its prefill. Their blocks are scattered. If dense, both are whole
sequences.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from detcompile.templates.attention.operands import Caches, StepMetadata
from detcompile.templates.attention.schedules import AttentionProblem
from detcompile.templates.attention.scores import AttentionRule
from detcompile.templates.device.gate import heavy_tailed
from detcompile.templates.device.launcher import cdiv

Draw = Callable[..., Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeStep:
    """One step of two sequences.

    Attributes:
        q: queries [T, H, D] of the step's tokens.
        k: keys [T, KV heads, D].
        v: values [T, KV heads, DV].
        rule: features of the problem, with biases [T, H, E] if it has any.
        past: keys and values [2, longest, KV heads, D or DV] of whole sequences.
        blocks: the blocks of each sequence [2, n].
        block_size: keys of a block.
        slot_mapping: slots of the step's tokens.
        step: metadata of the step.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    rule: AttentionRule
    past: tuple[Tensor, Tensor]
    blocks: Tensor
    block_size: int
    slot_mapping: Tensor
    step: StepMetadata

    def dense(self) -> tuple[Tensor, Tensor, Tensor, AttentionRule]:
        """Return q, k, v and the rule in the dense operation's layout: [2, heads, T / 2, …]."""
        bias = self.rule.relative_bias
        rule = self.rule if bias is None else self.rule._replace(relative_bias=_of_batch(bias))
        return _of_batch(self.q), _of_batch(self.k), _of_batch(self.v), rule

    def caches(self) -> Caches:
        """Return new caches with the keys and values up to each sequence's length."""
        return Caches(*(self._cache(values) for values in self.past))

    def _cache(self, past: Tensor) -> Tensor:
        shape = (self.blocks.numel(), self.block_size, *past.shape[2:])
        cache = torch.full(shape, math.nan, dtype=past.dtype, device=past.device)
        for values, blocks, length in zip(past, self.blocks.to(past.device), self.step.seq_lens.tolist()):
            filled = cache[blocks].flatten(0, 1)
            filled[:length] = values[:length]
            cache[blocks] = filled.unflatten(0, (len(blocks), self.block_size))
        return cache


def draw_probe(problem: AttentionProblem, device: torch.device) -> ProbeStep:
    """Draw a problem's step; every call draws the same."""
    generator = torch.Generator(device).manual_seed(21)

    def draw(*shape: int) -> Tensor:
        return heavy_tailed(*shape, generator=generator, spread=0.5).to(getattr(torch, problem.dtype))

    lens, block_size = [2 * problem.chunk + 37, problem.chunk + 131], problem.block_size or 16
    new = [1, 70] if problem.block_size else [max(lens)] * 2
    num_blocks = cdiv(max(lens), block_size)
    q = draw(sum(new), problem.heads, problem.d)
    k, v = (draw(sum(new), problem.kv_heads, width) for width in (problem.d, problem.dv))
    rule = _rule(problem, sum(new), draw, device)
    blocks = torch.randperm(2 * num_blocks, generator=torch.Generator().manual_seed(1), device="cpu")
    blocks = blocks.view(2, num_blocks)
    slots = [
        blocks[s, p // block_size].item() * block_size + p % block_size
        for s in range(2)
        for p in range(lens[s] - new[s], lens[s])
    ]
    keys, values = (draw(2, max(lens), problem.kv_heads, width) for width in (problem.d, problem.dv))
    metadata = ([0, new[0], sum(new)], lens, blocks.tolist())
    return ProbeStep(
        q=q, k=k, v=v, rule=rule, past=(keys, values), blocks=blocks, block_size=block_size,
        slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
        step=StepMetadata(*(torch.tensor(values, dtype=torch.int32, device=device) for values in metadata)),
    )  # fmt: skip


def _rule(problem: AttentionProblem, T: int, draw: Draw, device: torch.device) -> AttentionRule:
    """Return a rule with the problem's features."""
    tokens, scale = problem.chunk + 17 if problem.windowed else 0, problem.d**-0.5
    shaped = problem.capped or problem.alibi or problem.relative
    return AttentionRule(
        scale=-scale if problem.needs_scores and not shaped else scale,
        sliding_window=0 if problem.chunked else tokens,
        kv_chunk=problem.chunk,
        softcap=2.5 if problem.capped else 0.0,
        sinks=torch.linspace(-3, 3, problem.heads, dtype=torch.float32, device=device) if problem.sinks else None,
        alibi_slopes=2.0 ** -torch.linspace(1, 8, problem.heads, dtype=torch.float32, device=device)
        if problem.alibi
        else None,
        attention_chunk=tokens if problem.chunked else 0,
        relative_bias=draw(T, problem.heads, problem.chunk + 5) if problem.relative else None,
    )


def _of_batch(rows: Tensor) -> Tensor:
    return rows.unflatten(0, (2, -1)).transpose(1, 2)
