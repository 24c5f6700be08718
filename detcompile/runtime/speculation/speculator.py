"""Speculation: verify a tree of guesses in the forward that decodes, and keep what plain decoding would have drawn.

How a tree becomes a part of the forward is runtime/speculation/tree_verification.py's.

Acceptance is exact: at each node the target draws its own token, with the noise of that position; a guess is right if
it is that token. Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", ICML 2023, give the
expected length for a rate of right guesses; Miao et al., "SpecInfer", ASPLOS 2024, the trees.
"""

import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.runtime.kv.kv_blocks import KVBlocks
from detcompile.runtime.requests.plain_values import kind, shown, whole_number
from detcompile.runtime.requests.sequence import Sequence
from detcompile.runtime.speculation.draft_tree import DraftTree, Path
from detcompile.runtime.speculation.drafted_sequence import DraftedSequence
from detcompile.runtime.speculation.drafter import NO_DRAFT, Drafter, as_drafter
from detcompile.runtime.speculation.ngram_drafter import NGramDrafter
from detcompile.runtime.speculation.statistics import DraftStatistics
from detcompile.runtime.speculation.switch import Load, SpeculationSwitch
from detcompile.runtime.speculation.tree_verification import Verification, tree_layout
from detcompile.runtime.step.builder import StepEntry

__all__ = ["AcceptanceName", "DRAFT_ROWS", "SpeculationConfig", "Speculator", "SwitchName"]

logger = logging.getLogger(__name__)

DRAFT_ROWS = 1024  # of logits in a step at most, beside one of each sequence

AcceptanceName = Literal["exact", "rejection"]
SwitchName = Literal["automatic", "always"]


@dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    """Settings of speculative decoding. With exact acceptance, none of it can change a token or a logprob.

    Args:
        drafter: what guesses: a Drafter, or any object with its ``propose`` and ``forget``, which is then wrapped in
            one. None looks the tokens up in the sequence itself (NGramDrafter).
        max_nodes: most nodes of one sequence's tree.
        max_sequences: most decodes of a step that drafts.
        acceptance: "exact" keeps a guess if it is the token that plain decoding draws there. "rejection" keeps it with
            the probability that makes the outcome a draw from the target's distribution (runtime.sampling.rejection):
            more guesses stay where requests sample, but the tokens then depend on what was guessed, and so on
            batch-mates, timing and the switch. Outside the bit contract; only equal drafts in equal steps give equal
            tokens again, as one request alone with ``switch="always"`` gets. Greedy requests are accepted exactly in
            both.
        switch: "automatic" drafts where that was measured to be sooner (SpeculationSwitch), "always" in every step.

    Raises:
        InvalidInput: a value that cannot be.
    """

    drafter: Drafter | None = None
    max_nodes: int = 16
    max_sequences: int = 128
    acceptance: AcceptanceName = "exact"
    switch: SwitchName = "automatic"

    def __post_init__(self) -> None:
        for name in ("max_nodes", "max_sequences"):
            object.__setattr__(self, name, whole_number(getattr(self, name), f"SpeculationConfig: {name}"))
            if getattr(self, name) < 1:
                raise InvalidInput(f"SpeculationConfig: {name}={getattr(self, name)} must be at least 1")
        for name, known in (("acceptance", get_args(AcceptanceName)), ("switch", get_args(SwitchName))):
            if getattr(self, name) not in known:
                raise InvalidInput(f"SpeculationConfig: {name}={getattr(self, name)!r}: one of {', '.join(known)}")
        if self.drafter is not None:
            object.__setattr__(self, "drafter", as_drafter(self.drafter))

    @property
    def reads_states(self) -> bool:
        """Whether the target's forward has to return hidden states for the drafter."""
        return self.drafter is not None and self.drafter.reads_states


class Speculator:
    """Drafts for the decodes of a step, and blocks for the branches.

    A sequence that the drafter fails with is decoded without drafts to its end, the others with them; ``error`` is the
    last failure.
    """

    def __init__(self, config: SpeculationConfig, blocks: KVBlocks, vocab_size: int) -> None:
        self.config = config
        self.vocab_size = vocab_size
        self.error: Exception | None = None
        self.statistics = DraftStatistics()
        self.draft_seconds = 0.0
        self._accepted_now = 0  # since the switch was told of a step
        self.switch = SpeculationSwitch()
        self._drafter: Drafter = config.drafter or NGramDrafter()
        self._views: dict[Sequence, Any] = {}  # what the drafter is given of each sequence
        self._barred: set[Sequence] = set()  # the drafter failed with them
        if config.acceptance == "rejection":
            self._tell(self._drafter.give_distributions)
        self._blocks = blocks

    @property
    def num_drafted(self) -> int:
        """Draft tokens verified."""
        return self.statistics.num_drafted

    @property
    def num_accepted(self) -> int:
        """Draft tokens that were right."""
        return self.statistics.num_accepted

    def wants(self, load: Load) -> bool:
        """Whether a step that is like ``load`` should draft; then every token before it has to be known."""
        if load.num_decodes > self.config.max_sequences:
            return False
        return self.config.switch == "always" or self.switch.wants(load)

    def draft(self, entries: SequenceOf[StepEntry], budget: int) -> dict[Sequence, Verification]:
        """Trees for the decoding sequences of a planned step, within what is left of its token budget."""
        decoding = [e for e in entries if e.num_tokens == 1 and e.start + 1 == e.sequence.num_tokens and _fit(e)]
        decoding = [entry for entry in decoding if entry.sequence not in self._barred]
        if not decoding or len(decoding) > self.config.max_sequences or budget < 1:
            return {}
        sequences = [entry.sequence for entry in decoding]
        room = [min(s.most_tokens - s.num_tokens - 1, self.config.max_nodes, budget) for s in sequences]
        started = time.perf_counter()
        trees = self._propose(sequences, room)
        self.draft_seconds += time.perf_counter() - started
        found = {}
        for entry, tree, depth in zip(decoding, trees, room, strict=True):
            fitting = self._allowed(entry.sequence, tree.pruned(self.config.max_nodes, depth))
            verification = self._lay_out(entry, fitting, budget) if len(fitting) else None
            if verification is not None:
                found[entry.sequence] = verification
                budget -= len(verification.tree)
        return found

    def draft_ahead(self) -> None:
        """A step was launched and is not read back yet: a drafter that can work meanwhile does."""
        self._tell(self._drafter.draft_ahead)

    def observe(self, rows: Mapping[Sequence, int], hidden: Tensor) -> None:
        """Show a drafter that reads them the states that newest tokens were drawn from: rows of [R, H]."""
        rows = {sequence: row for sequence, row in rows.items() if sequence not in self._barred}
        seen = {self._view(sequence): row for sequence, row in rows.items()}
        if not self._tell(self._drafter.observe, seen, hidden) and len(rows) > 1:
            for sequence, row in rows.items():
                if not self._tell(self._drafter.observe, {self._view(sequence): row}, hidden):
                    self._bar(sequence)

    def settle(self, verification: Verification, path: Path, *, cut: bool) -> None:
        """Keep the blocks of a branch through ``path``, the node reached, and give the others back.

        Args:
            cut: the sequence ended there, though a guess for what follows was right.
        """
        winner, forked = verification.layout.firsts[path], verification.forked
        if winner:
            first = verification.start // self._blocks.pool.block_size
            self._blocks.adopt(verification.sequence, forked[:, winner - 1].tolist(), first)
            forked = np.delete(forked, winner - 1, axis=1)
        self._blocks.discard(forked.reshape(-1).tolist())
        tree = verification.tree
        rejected = not cut and bool(tree.children(path))
        self.statistics.add(len(tree), tree.depth, len(path), rejected=rejected)
        self._accepted_now += len(path)

    def discard(self, verification: Verification) -> None:
        """The sequence has ended meanwhile, its own blocks are gone: give back those of its branches."""
        self._blocks.discard(verification.forked.reshape(-1).tolist())

    def timed(self, load: Load, seconds: float, *, drafting: bool) -> None:
        """A step has taken so long, its drafts settled."""
        if self.config.switch == "always":
            return  # nobody asks the switch
        accepted, self._accepted_now = self._accepted_now, 0
        tokens = 1.0 + accepted / max(1, load.num_decodes)
        self.switch.observe(load, seconds, tokens, drafted=drafting)

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        self._barred.discard(sequence)
        self._tell(self._drafter.forget, self._view(sequence))
        self._views.pop(sequence, None)

    def _view(self, sequence: Sequence) -> Any:
        """What the drafter is given of a sequence, the same object each time: it may write nothing of the engine's."""
        view = self._views.get(sequence)
        if view is None:
            view = self._views[sequence] = DraftedSequence(sequence)
        return view

    def _propose(self, sequences: SequenceOf[Sequence], room: SequenceOf[int]) -> SequenceOf[DraftTree]:
        """The drafter's trees; where it fails, it is asked for each sequence alone, and those at fault get none."""
        try:
            trees = self._drafter.propose([self._view(sequence) for sequence in sequences], list(room))
            self._check(trees, len(sequences))
            return trees
        except Exception as error:
            self._note(error)
        for sequence in sequences:
            self._tell(self._drafter.forget, self._view(sequence))  # what was begun for them
        if len(sequences) == 1:
            self._barred.update(sequences)
            return [NO_DRAFT]
        return [tree for one, most in zip(sequences, room) for tree in self._propose([one], [most])]

    def _tell(self, act: Callable[..., None], *arguments: object) -> bool:
        """Call one of the drafter's methods that give nothing back; returns whether that went well."""
        try:
            act(*arguments)
        except Exception as error:
            self._note(error)
            return False
        return True

    def _bar(self, sequence: Sequence) -> None:
        self._barred.add(sequence)
        self._tell(self._drafter.forget, self._view(sequence))

    def _note(self, error: Exception) -> None:
        if repr(error) != repr(self.error):
            logger.warning("the drafter failed; decoding goes on without it where it does: %r", error)
        self.error = error

    def _check(self, trees: SequenceOf[DraftTree], count: int) -> None:
        if len(trees) != count:
            raise InvalidInput(f"the drafter gave {len(trees)} trees for {count} sequences")
        other = next((tree for tree in trees if not isinstance(tree, DraftTree)), None)
        if other is not None:
            raise InvalidInput(f"the drafter gave {shown(other)}, {kind(other)}: give a DraftTree")
        bad = next((t for tree in trees for t in tree.tokens.values() if not 0 <= t < self.vocab_size), None)
        if bad is not None:
            raise InvalidInput(f"the drafter gave token {bad}; ids are 0 to {self.vocab_size - 1}")

    def _rejects(self, sequence: Sequence) -> bool:
        return self.config.acceptance == "rejection" and not sequence.sampling.greedy

    def _allowed(self, sequence: Sequence, tree: DraftTree) -> DraftTree:
        """The tree less what the grammar forbids, or what ends the sequence: behind that nothing is drawn.

        Rejection sampling has to see every guess: those that cannot be right are a part of what was proposed.
        """
        if sequence.matcher is None or self._rejects(sequence):
            return tree
        return tree.only([path for path in tree.tokens if sequence.mask_after(tree.along(path)) is not None])

    def _lay_out(self, entry: StepEntry, tree: DraftTree, budget: int) -> Verification | None:
        """Branches that the pool and the budget have room for, the first guesses first."""
        sequence, start = entry.sequence, entry.start
        layout = tree_layout(tree.paths)
        num_fit = bisect_right(layout.ends, budget + 1)  # the root was planned
        if not num_fit or not self._blocks.grow(sequence, start + 1 + len(layout.leaves[0])):
            return None
        forked = self._blocks.fork(start, start + 1 + tree.depth, num_fit - 1)
        num_branches = 1 + forked.shape[1]
        if num_branches < len(layout.leaves):
            tree = tree.only(path for path in tree.tokens if layout.firsts[path] < num_branches)
            layout = tree_layout(tree.paths)
        return Verification(sequence, tree, layout, start, forked, self._rejects(sequence))


def _fit(entry: StepEntry) -> bool:
    """Whether drafts can be verified: with penalties a token's logits hang on counts that plain decoding keeps."""
    sequence = entry.sequence
    return (
        not sequence.sampling.penalised and sequence.num_pending == 0 and sequence.most_tokens - sequence.num_tokens > 1
    )
