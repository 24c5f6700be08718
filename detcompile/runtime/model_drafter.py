"""ModelDrafter: a smaller model drafts, with a paged KV cache of its own and the target's random numbers.

It draws each draft with the seed, sample index and position that the target will draw with. Where both models' logits
are close, the same noise then picks the same token, also at high temperature.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import torch
from torch import Tensor

from detcompile.errors import EngineError, InvalidInput
from detcompile.runtime.draft_tree import DraftTree, Path
from detcompile.runtime.drafters import NO_DRAFT
from detcompile.runtime.kv_blocks import KVBlocks
from detcompile.runtime.runner import Runner
from detcompile.runtime.sampling import Sampled, Sampler, SampleRow
from detcompile.runtime.sequence import Sequence
from detcompile.runtime.step_builder import build_step

__all__ = ["ModelDrafter"]


class ModelDrafter:
    """Drafts by a model of the same vocabulary, a level of all sequences' trees at a time.

    The tree is a chain of the draft model's own draws; with ``siblings``, each node of it has that many of the next
    likeliest tokens beside it. Made by ``CompiledModel.drafter``.

    Args:
        runner, blocks: over the draft model's KV cache. max_context: tokens that it can read.
        num_tokens: of the chain.

    Raises:
        InvalidInput: numbers that cannot be.
    """

    def __init__(
        self,
        runner: Runner,
        blocks: KVBlocks,
        *,
        vocab_size: int,
        max_context: int,
        num_tokens: int = 5,
        siblings: int = 0,
    ) -> None:
        if num_tokens < 1 or not 0 <= siblings < vocab_size:
            raise InvalidInput(
                f"ModelDrafter: num_tokens={num_tokens} must be at least 1, and siblings={siblings} at least 0"
            )
        self.vocab_size = vocab_size
        self.num_tokens = num_tokens
        self.siblings = siblings
        self._runner = runner
        self._blocks = blocks
        self._max_context = max_context
        self._sampler = Sampler(vocab_size, runner.kv_cache.device)
        self._shadows: dict[Sequence, Sequence] = {}

    @torch.no_grad()
    def propose(self, sequences: SequenceOf[Sequence], max_depth: SequenceOf[int]) -> list[DraftTree]:
        """A tree for each sequence that the draft model's context and cache have room for.

        Raises:
            EngineError: the draft model's logits are not numbers.
        """
        trees: dict[Sequence, dict[Path, int]] = {}
        depths: dict[Sequence, int] = {}
        for sequence, most in zip(sequences, max_depth, strict=True):
            depth = min(most, self.num_tokens, self._max_context - len(sequence.token_ids))
            if depth > 0 and self._follow(sequence, depth, sequences):
                trees[sequence], depths[sequence] = {}, depth
        for level in range(max(depths.values(), default=0)):
            self._draft_level([sequence for sequence, depth in depths.items() if level < depth], level, trees)
        return [DraftTree(trees[sequence]) if sequence in trees else NO_DRAFT for sequence in sequences]

    def forget(self, sequence: Sequence) -> None:
        """Free the draft model's keys of a sequence."""
        shadow = self._shadows.pop(sequence, None)
        if shadow is not None and shadow.block_tables:
            self._blocks.release(shadow)

    def _follow(self, sequence: Sequence, depth: int, kept: SequenceOf[Sequence]) -> bool:
        """Bring the draft's copy of a sequence up to date: drafts that were wrong are computed over."""
        shadow = self._shadows.get(sequence)
        if shadow is None:
            plain = replace(sequence.sampling, logprobs=None, prompt_logprobs=None)
            shadow = Sequence(list(sequence.token_ids), plain, sample_index=sequence.sample_index)
            self._shadows[sequence] = shadow
        agreed = _common(shadow.token_ids, sequence.token_ids, shadow.num_computed)
        shadow.num_computed = min(agreed, len(sequence.token_ids) - 1)
        shadow.token_ids[agreed:] = sequence.token_ids[agreed:]
        return self._make_room(shadow, len(sequence.token_ids) + depth, kept)

    def _make_room(self, shadow: Sequence, num_tokens: int, kept: SequenceOf[Sequence]) -> bool:
        """Blocks for a copy; those of sequences that are not asked about go first."""
        others = [other for other in self._shadows if other not in kept]
        while True:
            if not shadow.block_tables:
                enough = self._blocks.admit(shadow, num_tokens, reuse=False) is not None
            else:
                enough = self._blocks.grow(shadow, num_tokens)
            if enough or not others:
                return enough
            self.forget(others.pop())

    def _draft_level(
        self, sequences: SequenceOf[Sequence], level: int, trees: dict[Sequence, dict[Path, int]]
    ) -> None:
        """The next token of each chain, and its siblings."""
        shadows = [self._shadows[sequence] for sequence in sequences]
        logits = self._runner.launch(build_step([(shadow, shadow.num_uncomputed) for shadow in shadows], self._blocks))
        rows = [
            SampleRow(shadow.sampling, shadow.num_tokens, sequence.num_generated + level, shadow.sample_index)
            for sequence, shadow in zip(sequences, shadows)
        ]
        sampled = self._sampler(logits, self._sampler.prepare(rows))
        beside = self._beside(logits, len(rows))
        self._check(sampled)
        for sequence, shadow, token, others in zip(sequences, shadows, sampled.tokens.tolist(), beside):
            shadow.num_computed = shadow.num_tokens
            shadow.token_ids.append(token)
            tree, parent = trees[sequence], (0,) * level
            tree[(*parent, 0)] = token
            for index, other in enumerate([other for other in others if other != token][: self.siblings]):
                tree[(*parent, index + 1)] = other

    def _beside(self, logits: Tensor, num_rows: int) -> list[list[int]]:
        """The likeliest tokens of each row, one more than there are siblings."""
        if self.siblings == 0:
            return [[]] * num_rows
        return torch.topk(logits[:num_rows], self.siblings + 1, dim=-1).indices.tolist()

    def _check(self, sampled: Sampled) -> None:
        if bool(sampled.invalid.any()):
            raise EngineError("the draft model's logits are not numbers: check its weights and its dtype")


def _common(left: list[int], right: list[int], most: int) -> int:
    """How many of the first ``most`` tokens agree."""
    most = min(most, len(left), len(right))
    if left[:most] == right[:most]:
        return most
    return next(index for index in range(most) if left[index] != right[index])
