"""ModelDrafter: a smaller model drafts, with its own paged KV cache and the target's random numbers.

It draws each draft with the seed, sample index and position that the target will use. Where the logits of both models
are close, the same noise picks the same token, even at high temperature.
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

WIDTH = 4  # nodes that a grown tree expands per level, and candidates per node
NEWEST = 64  # tokens to compare one by one; rejected drafts are among them

TreeKind = Literal["chain", "grown"] | SequenceOf[Path]


class ModelDrafter(Drafter):
    """Drafts with a model of the same vocabulary, one level of all sequences' trees at a time.

    The tree is a chain of the draft model's draws; with ``siblings``, each node has that many of the next most likely
    tokens beside it. Other trees branch further. Created by ``CompiledModel.drafter``.

    Args:
        runner, blocks: run steps over the draft model's KV cache.
        max_context: most tokens that the draft model can read.
        num_tokens: tokens of the chain, or of the longest path.
        num_sequences: CUDA graphs are captured at the start for steps of up to this many sequences.
        tokenizer: the draft model's, if known.
        tree: "chain"; "grown" to the ``max_nodes`` most likely nodes, expanding WIDTH nodes per level (GrowingTree); or
            the paths of a fixed shape, such as [(0,), (0, 0), (0, 1), (1,)]. A chain is read back once, a tree at every
            level.

    Raises:
        InvalidInput: a number is out of range, or the tree is invalid.
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
                f"ModelDrafter: num_tokens={num_tokens} must be at least 1, and siblings={siblings} between 0 and"
                f" {vocab_size - 1}"
            )
        if tree != "chain" and siblings:
            raise InvalidInput(f"ModelDrafter: siblings={siblings} requires tree='chain': drop siblings, or pass paths")
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
        self._distributions: list[Tensor] = []  # [S, V] per level of the current proposal
        if runner.cuda_graphs:
            worker = Worker(self._runner, self._sampler)
            most = max(num_sequences, FEWEST_MIXED)  # after a pause, many tokens are read at once
            worker.warm_up(most, MIXED_BUCKETS[-1], self._blocks.pool.blocks_for(self._max_context))
            if tree == "chain" and not siblings:
                worker.warm_up_chains(num_sequences, self.num_tokens)

    @torch.no_grad()
    def propose(self, sequences: SequenceOf[Sequence], max_depth: SequenceOf[int]) -> list[DraftTree]:
        """Return a tree for each sequence that fits in the draft model's context and cache.

        Raises:
            EngineError: the draft model's logits are NaN or infinite.
        """
        self._distributions = []  # left over if the last call failed
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
        """From now on, include the distribution of each token of a chain; siblings count as certain guesses."""
        self._gives_distributions = True

    def forget(self, sequence: Sequence) -> None:
        """Free the draft model's blocks of a sequence."""
        shadow = self._shadows.pop(sequence, None)
        if shadow is not None and shadow.block_tables:
            self._blocks.release(shadow)

    def _follow(self, sequence: Sequence, depth: int, kept: SequenceOf[Sequence]) -> bool:
        """Update the draft model's copy of a sequence; rejected drafts are overwritten."""
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
        """Allocate blocks for a copy; evict sequences that are not in ``kept`` if necessary."""
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
        """Return True if every draft is the argmax, all chains are complete, and few tokens must be read first.

        Shorter chains have many layouts, and capturing each would cost more than it saves.
        """
        shadows = [self._shadows[sequence] for sequence in depths]
        short = sum(shadow.num_uncomputed for shadow in shadows) <= 2 * len(shadows)
        whole = short and not self.siblings and set(depths.values()) == {self.num_tokens}
        return whole and self._sampler.prepare(_rows(depths, shadows, 0)).tensors is None

    def _draft_greedy(self, depths: dict[Sequence, int]) -> dict[Sequence, DraftTree]:
        """Launch all levels as one chain; its inputs are known except for the tokens."""
        shadows = [self._shadows[sequence] for sequence in depths]
        tables = block_tables(shadows, len(self._blocks.groups))
        size, depth = self._blocks.pool.block_size, self.num_tokens
        entries = [StepEntry(shadow, shadow.num_computed, shadow.num_uncomputed) for shadow in shadows]
        ends = np.array([shadow.num_tokens for shadow in shadows], np.int64)
        rows = list(range(len(shadows)))
        later = ends + np.arange(depth - 1)[:, None]
        steps = [build_arrays(entries, tables, size, {}), *pending_arrays(later, rows, tables, size)]
        levels = self._runner.launch_chain(steps).tolist()
        trees: dict[Sequence, dict[Path, int]] = {sequence: {} for sequence in depths}
        for row, (sequence, shadow) in enumerate(zip(depths, shadows)):
            shadow.num_pending = depth
            shadow.num_computed = shadow.num_tokens - 1
            for level, drawn in enumerate(levels):
                invalid, token = drawn[row]  # only the logits decide
                self._read(sequence, [invalid, invalid, token], (0,) * level, trees[sequence])
        return {sequence: DraftTree(tree) for sequence, tree in trees.items()}

    def _draft(self, depths: dict[Sequence, int]) -> dict[Sequence, DraftTree]:
        """Launch all levels, each reading the previous tokens on the device, and read them back together."""
        levels = [
            [sequence for sequence, depth in depths.items() if level < depth] for level in range(max(depths.values()))
        ]
        tables = block_tables([self._shadows[sequence] for sequence in depths], len(self._blocks.groups))
        rows = {sequence: row for row, sequence in enumerate(depths)}
        launched: list[Tensor] = []
        pending: dict[Sequence, int] = {}
        for level, sequences in enumerate(levels):
            level_tables = tables[:, [rows[sequence] for sequence in sequences]]
            launched.append(self._launch_level(sequences, level, level_tables, pending))
            pending = {self._shadows[sequence]: row for row, sequence in enumerate(sequences)}
        values = iter(torch.cat(launched).tolist())
        trees: dict[Sequence, dict[Path, int]] = {sequence: {} for sequence in depths}
        drawn_from: dict[Sequence, dict[Path, Tensor]] = {sequence: {} for sequence in depths}
        for level, sequences in enumerate(levels):
            for row, sequence in enumerate(sequences):
                self._read(sequence, next(values), (0,) * level, trees[sequence])
                path = (0,) * (level + 1)
                if self._distributions and not sequence.sampling.greedy and path in trees[sequence]:
                    drawn_from[sequence][path] = self._distributions[level][row]
        self._distributions = []
        return {sequence: DraftTree(tree, drawn_from[sequence]) for sequence, tree in trees.items()}

    def _launch_level(
        self, sequences: list[Sequence], level: int, tables: NDArray[np.int32], pending: dict[Sequence, int]
    ) -> Tensor:
        """Draw the next token of each chain. Return [S, 3 + siblings + 1]: ``draw_drafts``, and most likely tokens."""
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

    def _read(self, sequence: Sequence, values: list[int], parent: Path, tree: dict[Path, int]) -> None:
        """Add a level's token and its siblings to the tree, which ends if no token could be drawn."""
        not_numbers, invalid, token, *likeliest = values
        shadow = self._shadows[sequence]
        if shadow.num_pending == 0:
            return
        if not_numbers:
            raise EngineError("the draft model's logits are NaN or infinite: check its weights and its dtype")
        if invalid:
            shadow.num_pending = 0
            return
        shadow.num_pending -= 1
        shadow.token_ids.append(token)
        tree[(*parent, 0)] = token
        for index, other in enumerate([other for other in likeliest if other != token][: self.siblings]):
            tree[(*parent, index + 1)] = other


def _rows(sequences: Iterable[Sequence], shadows: list[Sequence], level: int) -> list[SampleRow]:
    """Return the sample rows of a level's drafts, with the target's seed and positions."""
    return [
        SampleRow(shadow.sampling, shadow.num_tokens, sequence.num_generated + level, shadow.sample_index)
        for sequence, shadow in zip(sequences, shadows)
    ]


def _trees(tree: TreeKind, max_nodes: int) -> tuple[Callable[[], GrowingTree | FixedTree] | None, int]:
    """Return a factory of a sequence's tree (None for a chain), and the number of candidates per node."""
    if tree == "chain":
        return None, 1
    if tree == "grown":
        GrowingTree(max_nodes, WIDTH)  # checks the arguments
        return lambda: GrowingTree(max_nodes, WIDTH), WIDTH
    if isinstance(tree, str):
        raise InvalidInput(f"ModelDrafter: tree={tree!r} must be 'chain', 'grown', or a list of paths")
    try:
        shape = require_shape([tuple(path) for path in tree])
    except TypeError as error:
        message = f"ModelDrafter: tree={tree!r} must be 'chain', 'grown', or a list of paths like (0, 1)"
        raise InvalidInput(message) from error
    return lambda: FixedTree(shape), 1 + max(max(path) for path in shape)


def _common(left: list[int], right: list[int], most: int) -> int:
    """Return the length of the common prefix of the first ``most`` tokens."""
    most = min(most, len(left), len(right))
    start = max(0, most - NEWEST)
    if left[:start] != right[:start]:
        start = 0
    return next((index for index in range(start, most) if left[index] != right[index]), most)
