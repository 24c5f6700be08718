"""Speculation: verify a tree of guesses in the decoding forward, and keep what plain decoding would have drawn.

runtime/speculation/tree_verification.py makes a tree part of the forward.

Acceptance is exact: at each node the target draws its own token, with the noise of that position; a guess is accepted
if it equals that token. Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", ICML 2023, give
the expected accept length; Miao et al., "SpecInfer", ASPLOS 2024, the trees.
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
from detcompile.templates.device.launcher import on_device

logger = logging.getLogger(__name__)

DRAFT_ROWS = 1024  # most rows of logits for drafts in a step, besides one row per sequence

AcceptanceName = Literal["exact", "rejection"]
SwitchName = Literal["automatic", "always"]


@dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    """Settings of speculative decoding. With exact acceptance, no setting can change a token or a logprob.

    Args:
        drafter: makes the guesses: a Drafter, or any object with ``propose`` and ``forget``, which is then wrapped.
            None looks up n-grams in the sequence itself (NGramDrafter).
        max_nodes: most nodes of one sequence's tree.
        max_sequences: a step with more decodes drafts for none of them.
        acceptance: "exact" accepts a guess if plain decoding draws the same token there. "rejection" accepts it with
            the probability that preserves the target's distribution (runtime.sampling.rejection). More guesses are
            accepted for sampled requests, but tokens then depend on the guesses, and thus on batch-mates, timing and
            the switch. This is outside the bit contract: tokens repeat only with equal drafts in equal steps, for
            example for a single request with ``switch="always"``. Greedy requests are accepted exactly in both modes.
        switch: "automatic" drafts where it was measured to be faster (SpeculationSwitch), "always" in every step.

    Raises:
        InvalidInput: a value is invalid.
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
                raise InvalidInput(
                    f"SpeculationConfig: {name}={getattr(self, name)!r} must be one of {', '.join(known)}"
                )
        if self.drafter is not None:
            object.__setattr__(self, "drafter", as_drafter(self.drafter))

    @property
    def reads_states(self) -> bool:
        """True if the target's forward must return hidden states for the drafter."""
        return self.drafter is not None and self.drafter.reads_states


class Speculator:
    """Drafts for the decodes of a step, and allocates blocks for the branches.

    If the drafter fails for a sequence, that sequence is decoded without drafts to its end; others keep theirs.
    ``error`` is the last failure.
    """

    def __init__(self, config: SpeculationConfig, blocks: KVBlocks, vocab_size: int) -> None:
        self.config = config
        self.vocab_size = vocab_size
        self.error: Exception | None = None
        self.statistics = DraftStatistics()
        self.draft_seconds = 0.0
        self._accepted_now = 0  # since the last call of ``timed``
        self.switch = SpeculationSwitch()
        self._drafter: Drafter = config.drafter or NGramDrafter()
        self._views: dict[Sequence, Any] = {}  # read-only views for the drafter
        self._disabled: set[Sequence] = set()  # sequences for which the drafter has failed
        if config.acceptance == "rejection":
            self._call(self._drafter.give_distributions)
        self._blocks = blocks

    @property
    def num_drafted(self) -> int:
        """Number of draft tokens verified."""
        return self.statistics.num_drafted

    @property
    def num_accepted(self) -> int:
        """Number of draft tokens accepted."""
        return self.statistics.num_accepted

    def wants(self, load: Load) -> bool:
        """Return True if a step with this load should draft; every earlier token must then be known."""
        if load.num_decodes > self.config.max_sequences:
            return False
        return self.config.switch == "always" or self.switch.wants(load)

    def draft(self, entries: SequenceOf[StepEntry], budget: int) -> dict[Sequence, Verification]:
        """Draft trees for the decoding sequences of a planned step, within the rest of its token budget."""
        decoding = [e for e in entries if e.num_tokens == 1 and e.start + 1 == e.sequence.num_tokens and _fit(e)]
        decoding = [entry for entry in decoding if entry.sequence not in self._disabled]
        if not decoding or len(decoding) > self.config.max_sequences or budget < 1:
            return {}
        sequences = [entry.sequence for entry in decoding]
        room = [min(s.most_tokens - s.num_tokens - 1, self.config.max_nodes, budget) for s in sequences]
        started = time.perf_counter()
        trees = self._propose(sequences, room)
        self.draft_seconds += time.perf_counter() - started
        drafted = {}
        for entry, tree, depth in zip(decoding, trees, room, strict=True):
            fitting = self._allowed(entry.sequence, tree.pruned(self.config.max_nodes, depth))
            verification = self._lay_out(entry, fitting, budget) if len(fitting) else None
            if verification is not None:
                drafted[entry.sequence] = verification
                budget -= len(verification.tree)
        return drafted

    def draft_ahead(self) -> None:
        """Let the drafter work while a launched step is not read back yet."""
        self._call(self._drafter.draft_ahead)

    def observe(self, rows: Mapping[Sequence, int], hidden: Tensor) -> None:
        """Show the drafter the hidden states [R, H] from which the newest tokens were drawn, by row."""
        rows = {sequence: row for sequence, row in rows.items() if sequence not in self._disabled}
        seen = {self._view(sequence): row for sequence, row in rows.items()}
        if not self._call(self._drafter.observe, seen, hidden) and len(rows) > 1:
            for sequence, row in rows.items():
                if not self._call(self._drafter.observe, {self._view(sequence): row}, hidden):
                    self._disabled.add(sequence)
                    self._call(self._drafter.forget, self._view(sequence))

    def commit(self, verification: Verification, path: Path, *, cut: bool) -> None:
        """Keep the blocks of the branch through ``path``, the accepted node, and free the others.

        Args:
            cut: the sequence ended there although a guess for the next token was right.
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
        """Free the blocks of the branches of a sequence that has ended in the meantime."""
        self._blocks.discard(verification.forked.reshape(-1).tolist())

    def timed(self, load: Load, seconds: float, *, drafting: bool) -> None:
        """Report the duration of a step whose drafts are committed."""
        if self.config.switch == "always":
            return  # the switch is not used
        accepted, self._accepted_now = self._accepted_now, 0
        tokens = 1.0 + accepted / max(1, load.num_decodes)
        self.switch.observe(load, seconds, tokens, drafted=drafting)

    def forget(self, sequence: Sequence) -> None:
        """Drop all state of a sequence that has ended."""
        self._disabled.discard(sequence)
        self._call(self._drafter.forget, self._view(sequence))
        self._views.pop(sequence, None)

    def _view(self, sequence: Sequence) -> Any:
        """Return the drafter's read-only view of a sequence, always the same object."""
        view = self._views.get(sequence)
        if view is None:
            view = self._views[sequence] = DraftedSequence(sequence)
        return view

    def _propose(self, sequences: SequenceOf[Sequence], room: SequenceOf[int]) -> SequenceOf[DraftTree]:
        """Return the drafter's trees. If it fails, ask for each sequence alone; those that fail get none."""
        try:
            with on_device(self._drafter.device):
                trees = self._drafter.propose([self._view(sequence) for sequence in sequences], list(room))
            self._check(trees, len(sequences))
            return trees
        except Exception as error:
            self._record(error)
        for sequence in sequences:
            self._call(self._drafter.forget, self._view(sequence))  # drop what the failed call began
        if len(sequences) == 1:
            self._disabled.update(sequences)
            return [NO_DRAFT]
        return [tree for one, most in zip(sequences, room) for tree in self._propose([one], [most])]

    def _call(self, act: Callable[..., None], *arguments: object) -> bool:
        """Call a drafter method without a result. Return False if it raised."""
        try:
            with on_device(self._drafter.device):
                act(*arguments)
        except Exception as error:
            self._record(error)
            return False
        return True

    def _record(self, error: Exception) -> None:
        if repr(error) != repr(self.error):
            logger.warning("the drafter failed; affected sequences are decoded without it: %r", error)
        self.error = error

    def _check(self, trees: SequenceOf[DraftTree], count: int) -> None:
        if len(trees) != count:
            raise InvalidInput(f"the drafter returned {len(trees)} trees for {count} sequences: return one each")
        other = next((tree for tree in trees if not isinstance(tree, DraftTree)), None)
        if other is not None:
            raise InvalidInput(f"the drafter returned {shown(other)}, {kind(other)}: return a DraftTree")
        bad = next((t for tree in trees for t in tree.tokens.values() if not 0 <= t < self.vocab_size), None)
        if bad is not None:
            raise InvalidInput(f"the drafter returned token {bad}; ids are 0 to {self.vocab_size - 1}")

    def _rejects(self, sequence: Sequence) -> bool:
        return self.config.acceptance == "rejection" and not sequence.sampling.greedy

    def _allowed(self, sequence: Sequence, tree: DraftTree) -> DraftTree:
        """Remove nodes that the grammar forbids or that end the sequence; no token is drawn after them.

        Rejection sampling keeps all guesses, because even impossible ones are part of the proposal.
        """
        if sequence.matcher is None or self._rejects(sequence):
            return tree
        return tree.only([path for path in tree.tokens if sequence.mask_after(tree.along(path)) is not None])

    def _lay_out(self, entry: StepEntry, tree: DraftTree, budget: int) -> Verification | None:
        """Lay out as many branches as the pool and the budget allow, first guesses first."""
        sequence, start = entry.sequence, entry.start
        layout = tree_layout(tree.paths)
        num_fit = bisect_right(layout.ends, budget + 1)  # the root is already in the budget
        if not num_fit or not self._blocks.grow(sequence, start + 1 + len(layout.leaves[0])):
            return None
        forked = self._blocks.fork(start, start + 1 + tree.depth, num_fit - 1)
        num_branches = 1 + forked.shape[1]
        if num_branches < len(layout.leaves):
            tree = tree.only(path for path in tree.tokens if layout.firsts[path] < num_branches)
            layout = tree_layout(tree.paths)
        return Verification(sequence, tree, layout, start, forked, self._rejects(sequence))


def _fit(entry: StepEntry) -> bool:
    """Return True if drafts can be verified. Penalties rule it out: only plain decoding counts the tokens they need."""
    sequence = entry.sequence
    return (
        not sequence.sampling.penalized and sequence.num_pending == 0 and sequence.most_tokens - sequence.num_tokens > 1
    )
