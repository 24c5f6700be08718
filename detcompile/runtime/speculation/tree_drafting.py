"""TreeDrafting: a model drafts trees; each level runs the expanded nodes, each after its own path, in one forward.

A node's path is computed again in its own blocks, after the sequence's keys, and the blocks are freed at once: drafts
are short and the draft model is small. The next nodes to expand depend on the results, so every level is read back.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from detcompile.errors import EngineError
from detcompile.runtime.kv.kv_blocks import KVBlocks
from detcompile.runtime.requests.sequence import Sequence
from detcompile.runtime.sampling.sampler import Sampler, SampleRow
from detcompile.runtime.speculation.draft_tree import DraftTree, Path
from detcompile.runtime.speculation.drafter import draw_drafts
from detcompile.runtime.speculation.growing_tree import FixedTree, GrowingTree
from detcompile.runtime.step.builder import StepEntry, block_tables, build_arrays
from detcompile.runtime.step.runner import Runner


class _Node(NamedTuple):
    """A node expanded by a level."""

    sequence: Sequence
    copy: Sequence  # the sequence's copy in the draft model's cache
    path: Path
    entry: StepEntry


class TreeDrafting:
    """Drafts trees for sequences that have copies in the draft model's cache.

    For sampled requests the first candidate is the draft model's draw with the target's noise, and the others are the
    most likely tokens; the n-th candidate gets the probability of the n-th most likely token.

    Args:
        num_candidates: candidates per node.
    """

    def __init__(self, runner: Runner, blocks: KVBlocks, sampler: Sampler, num_candidates: int) -> None:
        self._runner = runner
        self._blocks = blocks
        self._sampler = sampler
        self._num_candidates = num_candidates

    def draft(
        self,
        copies: Mapping[Sequence, Sequence],
        depths: Mapping[Sequence, int],
        trees: Mapping[Sequence, GrowingTree | FixedTree],
    ) -> dict[Sequence, DraftTree]:
        """Fill ``trees``, each to its depth.

        Args:
            copies: each sequence's copy in the draft model's cache, with blocks for all its tokens.

        Raises:
            EngineError: the draft model's logits are NaN or infinite.
        """
        for level in range(max(depths.values())):
            frontiers = {
                sequence: frontier
                for sequence, depth in depths.items()
                if level < depth and (frontier := trees[sequence].frontier())
            }
            nodes = [
                node
                for sequence, paths in frontiers.items()
                for path in paths
                if (node := self._node(sequence, copies[sequence], path, trees[sequence].along(path))) is not None
            ]
            if not nodes:
                break
            candidates = self._run(nodes)
            for sequence in frontiers:
                expanded = [(node.path, part) for node, part in zip(nodes, candidates) if node.sequence is sequence]
                trees[sequence].expand(expanded)
                copies[sequence].num_computed = copies[sequence].num_tokens
        return {sequence: trees[sequence].tree() for sequence in depths}

    def _node(self, sequence: Sequence, copy: Sequence, path: Path, drafts: list[int]) -> _Node | None:
        """Return a node to run: the root is the copy itself, others follow it; None if no block is free."""
        if not path:
            return _Node(sequence, copy, path, StepEntry(copy, copy.num_computed, copy.num_uncomputed))
        start = copy.num_tokens
        tables = self._blocks.branch(copy, start, start + len(path))
        if tables is None:
            return None
        stand_in = Sequence(drafts, copy.sampling, sample_index=copy.sample_index, block_tables=tables)
        return _Node(sequence, copy, path, StepEntry(stand_in, start, len(path), start))

    def _run(self, nodes: list[_Node]) -> list[list[tuple[int, float]]]:
        """Return the candidates of each node as (token, probability); none if no token can be drawn."""
        size = self._blocks.pool.block_size
        entries = [node.entry for node in nodes]
        plan = self._sampler.prepare([_row(node) for node in nodes])
        self._copy_heads(nodes)
        tables = block_tables([entry.sequence for entry in entries], len(self._blocks.groups))
        logits = self._runner.launch(build_arrays(entries, tables, size, {}))
        drawn = draw_drafts(self._sampler, logits, plan, self._runner.drawn)
        likeliest = torch.topk(torch.softmax(logits.float(), -1), self._num_candidates, dim=-1)
        columns = (drawn, likeliest.indices, likeliest.values)
        values = torch.cat([column.double() for column in columns], dim=1).tolist()  # one copy; ids are exact in double
        for node in nodes:
            if node.path:
                first = node.entry.start // size
                self._blocks.discard([block for table in node.entry.sequence.block_tables for block in table[first:]])
        return [self._candidates(row) for row in values]

    def _copy_heads(self, nodes: list[_Node]) -> None:
        """Copy the tokens before a node's path in its first block."""
        size = self._blocks.pool.block_size
        copies = [
            (source[start // size], target[start // size], start % size)
            for _, copy, path, (stand_in, start, _, _) in nodes
            if path and start % size
            for source, target in zip(copy.block_tables, stand_in.block_tables, strict=True)
        ]
        if copies:
            cache = self._runner.kv_cache
            cache.copy_blocks(torch.tensor(list(zip(*copies)), device=cache.device))

    def _candidates(self, row: list[float]) -> list[tuple[int, float]]:
        not_numbers, invalid, drawn, *rest = row
        if not_numbers:
            raise EngineError("the draft model's logits are NaN or infinite: check its weights and its dtype")
        if invalid:
            return []
        ids, chances = rest[: self._num_candidates], rest[self._num_candidates :]
        tokens = [drawn] + [token for token in ids if token != drawn]
        return [(int(token), min(1.0, chance)) for token, chance in zip(tokens, chances)]


def _row(node: _Node) -> SampleRow:
    sequence, _, path, (carrier, start, count, _) = node
    return SampleRow(
        carrier.sampling, start + count, sequence.num_generated + len(path), sample_index=carrier.sample_index
    )
