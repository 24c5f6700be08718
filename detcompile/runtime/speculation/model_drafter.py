"""ModelDrafter: a smaller model drafts, with a paged KV cache of its own and the target's random numbers.

It draws each draft with the seed, sample index and position that the target will draw with. Where both models' logits
are close, the same noise then picks the same token, also at high temperature.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from detcompile.errors import EngineError, InvalidInput
from detcompile.runtime.kv.kv_blocks import KVBlocks
from detcompile.runtime.requests.sequence import Sequence
from detcompile.runtime.sampling.sampler import Sampler, SampleRow
from detcompile.runtime.speculation.draft_tree import DraftTree, Path, require_shape
from detcompile.runtime.speculation.drafter import NO_DRAFT, Drafter, draw_drafts
from detcompile.runtime.speculation.growing_tree import FixedTree, GrowingTree
from detcompile.runtime.speculation.tree_drafting import TreeDrafting
from detcompile.runtime.step.builder import StepEntry, block_tables, build_arrays, pending_arrays
from detcompile.runtime.step.layout import FEWEST_MIXED, MIXED_BUCKETS
from detcompile.runtime.step.runner import Runner
from detcompile.runtime.step.worker import Worker

__all__ = ["ModelDrafter", "TreeKind"]

WIDTH = 4  # nodes of a level that a grown tree expands, and candidates of each
NEWEST = 64  # tokens that are compared one by one: drafts that were wrong are among them

TreeKind = Literal["chain", "grown"] | SequenceOf[Path]


class ModelDrafter(Drafter):
    """Drafts by a model of the same vocabulary, a level of all sequences' trees at a time.

    The tree is a chain of the draft model's own draws; with ``siblings``, each node of it has that many of the next
    likeliest tokens beside it. Other trees branch further. Made by ``CompiledModel.drafter``.

    Args:
        runner, blocks: run steps over the draft model's KV cache.
        max_context: tokens that the draft model can read.
        num_tokens: tokens of the chain, or of the longest path.
        num_sequences: most sequences of a step whose CUDA graphs are captured at once.
        tokenizer: the draft model's, if it is known.
        tree: "chain"; "grown" to the ``max_nodes`` likeliest nodes, WIDTH of a level expanded (GrowingTree); or the
            paths of a fixed shape, such as [(0,), (0, 0), (0, 1), (1,)]. A chain is read back once, a tree every level.

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
        num_sequences: int = 32,
        siblings: int = 0,
        tree: TreeKind = "chain",
        max_nodes: int = 16,
        tokenizer: Any | None = None,
    ) -> None:
        if num_tokens < 1 or not 0 <= siblings < vocab_size:
            raise InvalidInput(
                f"ModelDrafter: num_tokens={num_tokens} must be at least 1, and siblings={siblings} within 0 and"
                f" {vocab_size - 1}"
            )
        if tree != "chain" and siblings:
            raise InvalidInput(f"ModelDrafter: siblings={siblings} are of a chain: leave them out, or give a shape")
        self.vocab_size = vocab_size
        self.tokenizer = tokenizer
        self.device = runner.kv_cache.device
        self.num_tokens = num_tokens
        self.siblings = siblings
        self._runner = runner
        self._blocks = blocks
        self._max_context = max_context
        self._sampler = Sampler(vocab_size, self.device)
        self._shadows: dict[Sequence, Sequence] = {}
        self._new_tree, num_candidates = _trees(tree, max_nodes)
        self._drafting = TreeDrafting(runner, blocks, self._sampler, min(num_candidates, vocab_size))
        self._gives_distributions = False
        self._distributions: list[Tensor] = []  # [S, V] of each level in the making
        if runner.cuda_graphs:
            self._warm_up(num_sequences, chains=tree == "chain" and not siblings)

    @torch.no_grad()
    def propose(self, sequences: SequenceOf[Sequence], max_depth: SequenceOf[int]) -> list[DraftTree]:
        """A tree for each sequence that the draft model's context and cache have room for.

        Raises:
            EngineError: the draft model's logits are not numbers.
        """
        self._distributions = []  # those of a call that failed half-way
        depths: dict[Sequence, int] = {}
        for sequence, most in zip(sequences, max_depth, strict=True):
            depth = min(most, self.num_tokens, self._max_context - len(sequence.token_ids))
            if depth > 0 and self._follow(sequence, depth, sequences):
                depths[sequence] = depth
        if not depths:
            return [NO_DRAFT] * len(sequences)
        if self._new_tree is None:
            trees = self._draft_greedy(depths) if self._is_greedy(depths) else self._draft(depths)
        else:
            copies = {sequence: self._shadows[sequence] for sequence in depths}
            trees = self._drafting.draft(copies, depths, {sequence: self._new_tree() for sequence in depths})
        return [trees.get(sequence, NO_DRAFT) for sequence in sequences]

    def give_distributions(self) -> None:
        """From now on, tell what each token of a chain was drawn from; siblings are certain guesses."""
        self._gives_distributions = True

    def forget(self, sequence: Sequence) -> None:
        """Free the draft model's keys of a sequence."""
        shadow = self._shadows.pop(sequence, None)
        if shadow is not None and shadow.block_tables:
            self._blocks.release(shadow)

    def _warm_up(self, num_sequences: int, *, chains: bool) -> None:
        """Capture graphs before anyone is served; after a pause, many tokens are read at once."""
        worker = Worker(self._runner, self._sampler)
        most = max(num_sequences, FEWEST_MIXED)
        worker.warm_up(most, MIXED_BUCKETS[-1], self._blocks.pool.blocks_for(self._max_context))
        if chains:
            worker.warm_up_chains(num_sequences, self.num_tokens)

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
        while True:
            if not shadow.block_tables:
                enough = self._blocks.admit(shadow, num_tokens, reuse=False) is not None
            else:
                enough = self._blocks.grow(shadow, num_tokens)
            other = None if enough else next((other for other in self._shadows if other not in kept), None)
            if other is None:
                return enough
            self.forget(other)

    def _is_greedy(self, depths: dict[Sequence, int]) -> bool:
        """Whether every draft is the likeliest token, the chains are whole, and little is to be read first.

        Of shorter chains there are many kinds, and capturing each costs more than it saves.
        """
        shadows = [self._shadows[sequence] for sequence in depths]
        short = sum(shadow.num_uncomputed for shadow in shadows) <= 2 * len(shadows)
        whole = short and not self.siblings and set(depths.values()) == {self.num_tokens}
        return whole and self._sampler.prepare(_rows(depths, shadows, 0)).columns is None

    def _draft_greedy(self, depths: dict[Sequence, int]) -> dict[Sequence, DraftTree]:
        """Launch all levels as one chain: all that they read is known but the tokens."""
        shadows = [self._shadows[sequence] for sequence in depths]
        tables = block_tables(shadows, len(self._blocks.groups))
        size, depth = self._blocks.pool.block_size, self.num_tokens
        entries = [StepEntry(shadow, shadow.num_computed, shadow.num_uncomputed) for shadow in shadows]
        ends = np.array([shadow.num_tokens for shadow in shadows], np.int64)
        rows = list(range(len(shadows)))
        later = ends + np.arange(depth - 1)[:, None]
        steps = [build_arrays(entries, tables, size, {}), *pending_arrays(later, rows, tables, size)]
        found = self._runner.launch_chain(steps).tolist()
        trees: dict[Sequence, dict[Path, int]] = {sequence: {} for sequence in depths}
        for row, (sequence, shadow) in enumerate(zip(depths, shadows)):
            shadow.num_pending = depth
            shadow.num_computed = shadow.num_tokens - 1
            for level, drawn in enumerate(found):
                invalid, token = drawn[row]  # nothing but the logits decides
                self._read(sequence, [invalid, invalid, token], (0,) * level, trees[sequence])
        return {sequence: DraftTree(tree) for sequence, tree in trees.items()}

    def _draft(self, depths: dict[Sequence, int]) -> dict[Sequence, DraftTree]:
        """Launch all levels, each reading the tokens of the one before on the device, then read them back at once."""
        levels = [
            [sequence for sequence, depth in depths.items() if level < depth] for level in range(max(depths.values()))
        ]
        tables = block_tables([self._shadows[sequence] for sequence in depths], len(self._blocks.groups))
        rows = {sequence: row for row, sequence in enumerate(depths)}
        launched: list[Tensor] = []
        pending: dict[Sequence, int] = {}
        for level, sequences in enumerate(levels):
            own = tables[:, [rows[sequence] for sequence in sequences]]
            launched.append(self._launch_level(sequences, level, own, pending))
            pending = {self._shadows[sequence]: row for row, sequence in enumerate(sequences)}
        found = iter(torch.cat(launched).tolist())
        trees: dict[Sequence, dict[Path, int]] = {sequence: {} for sequence in depths}
        drawn_from: dict[Sequence, dict[Path, Tensor]] = {sequence: {} for sequence in depths}
        for level, sequences in enumerate(levels):
            for row, sequence in enumerate(sequences):
                self._read(sequence, next(found), (0,) * level, trees[sequence])
                path = (0,) * (level + 1)
                if self._distributions and not sequence.sampling.greedy and path in trees[sequence]:
                    drawn_from[sequence][path] = self._distributions[level][row]
        self._distributions = []
        return {sequence: DraftTree(tree, drawn_from[sequence]) for sequence, tree in trees.items()}

    def _launch_level(
        self, sequences: list[Sequence], level: int, tables: NDArray[np.int32], pending: dict[Sequence, int]
    ) -> Tensor:
        """The next token of each chain, [S, 3 + siblings + 1]: what ``draw_drafts`` gives, and the likeliest tokens."""
        shadows = [self._shadows[sequence] for sequence in sequences]
        rows = _rows(sequences, shadows, level)
        plan = self._sampler.prepare(rows)
        size = self._blocks.pool.block_size
        if level == 0:
            entries = [StepEntry(shadow, shadow.num_computed, shadow.num_uncomputed) for shadow in shadows]
            arrays = build_arrays(entries, tables, size, {})
        else:
            positions = np.array([[shadow.num_computed for shadow in shadows]], np.int64)
            arrays = pending_arrays(positions, [pending[shadow] for shadow in shadows], tables, size)[0]
        logits = self._runner.launch(arrays)
        drawn = draw_drafts(self._sampler, logits, plan, self._runner.drawn)
        if self._gives_distributions:
            self._distributions.append(self._sampler.probabilities(logits, plan))
        self._runner.keep(drawn[:, 1:])
        for shadow in shadows:
            shadow.num_computed = shadow.num_tokens
            shadow.num_pending += 1
        if not self.siblings:
            return drawn
        return torch.cat([drawn, torch.topk(logits[: len(rows)], self.siblings + 1, dim=-1).indices], dim=1)

    def _read(self, sequence: Sequence, found: list[int], parent: Path, tree: dict[Path, int]) -> None:
        """Put a level's token, and its siblings, into the tree; it ends where nothing could be drawn."""
        not_numbers, invalid, token, *likeliest = found
        shadow = self._shadows[sequence]
        if shadow.num_pending == 0:
            return
        if not_numbers:
            raise EngineError("the draft model's logits are not numbers: check its weights and its dtype")
        if invalid:
            shadow.num_pending = 0
            return
        shadow.num_pending -= 1
        shadow.token_ids.append(token)
        tree[(*parent, 0)] = token
        for index, other in enumerate([other for other in likeliest if other != token][: self.siblings]):
            tree[(*parent, index + 1)] = other


def _rows(sequences: Iterable[Sequence], shadows: list[Sequence], level: int) -> list[SampleRow]:
    """What the draft of a level is drawn with: the target's seed and place."""
    return [
        SampleRow(shadow.sampling, shadow.num_tokens, sequence.num_generated + level, shadow.sample_index)
        for sequence, shadow in zip(sequences, shadows)
    ]


def _trees(tree: TreeKind, max_nodes: int) -> tuple[Callable[[], GrowingTree | FixedTree] | None, int]:
    """What makes a sequence's tree, None for a chain, and the candidates of a node."""
    if tree == "chain":
        return None, 1
    if tree == "grown":
        GrowingTree(max_nodes, WIDTH)  # refuses what cannot be
        return lambda: GrowingTree(max_nodes, WIDTH), WIDTH
    if isinstance(tree, str):
        raise InvalidInput(f"ModelDrafter: tree={tree!r}: 'chain', 'grown', or a list of paths")
    try:
        shape = require_shape([tuple(path) for path in tree])
    except TypeError as error:
        raise InvalidInput(f"ModelDrafter: tree={tree!r}: 'chain', 'grown', or a list of paths, as (0, 1)") from error
    return lambda: FixedTree(shape), 1 + max(max(path) for path in shape)


def _common(left: list[int], right: list[int], most: int) -> int:
    """How many of the first ``most`` tokens agree, all before the first that differs."""
    most = min(most, len(left), len(right))
    start = max(0, most - NEWEST)
    if left[:start] != right[:start]:
        start = 0
    return next((index for index in range(start, most) if left[index] != right[index]), most)
