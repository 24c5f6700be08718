"""MirrorDrafter: drafts the next trees while the target still verifies the previous ones.

It bets that the first branch of a tree is accepted to its end, and drafts the target's next token and what follows. If
the bet is won, the next tree is ready at once; if not, only the work is lost. On a GPU it works on its own stream.
After Bhendawade et al., "Mirror Speculative Decoding: Breaking the Serial Barrier in LLM Inference", 2025.
"""

import contextlib
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf

import torch

from detcompile.errors import InvalidInput
from detcompile.runtime.requests.sequence import Sequence
from detcompile.runtime.speculation.draft_tree import DraftTree
from detcompile.runtime.speculation.drafter import NO_DRAFT, Drafter, as_drafter


class MirrorDrafter(Drafter):
    """Runs another drafter one step early.

    The inner drafter sees a stand-in for each sequence, whose tokens run ahead and are corrected later. Its random
    numbers belong to the target's positions. If the guess ahead was right, the tree is therefore the one that it would
    have drafted later, one level shorter.

    Args:
        inner: a drafter that needs only tokens. If its ``device`` is a GPU, it gets its own stream.

    Raises:
        InvalidInput: the drafter reads states that only the verification gives.
    """

    def __init__(self, inner: Drafter) -> None:
        inner = as_drafter(inner)
        if inner.reads_states:
            raise InvalidInput(
                "MirrorDrafter: the inner drafter needs hidden states of the verification, so it cannot draft ahead:"
                " use it directly"
            )
        self.inner = inner
        self.vocab_size, self.tokenizer, self.device = inner.vocab_size, inner.tokenizer, inner.device
        self.num_ahead = self.num_used = 0  # trees drafted ahead, and how many of them were used
        self._stand_ins: dict[Sequence, Sequence] = {}
        self._bets: dict[Sequence, tuple[list[int], int]] = {}  # tokens including the first branch, and max_depth
        self._ready: dict[Sequence, tuple[list[int], DraftTree]] = {}  # tokens before the tree drafted ahead
        self._stream = torch.cuda.Stream(inner.device) if inner.device.type == "cuda" else None
        self._proposed = torch.cuda.Event() if self._stream is not None else None

    def propose(self, sequences: SequenceOf[Sequence], max_depth: SequenceOf[int]) -> list[DraftTree]:
        """Return the tree drafted ahead where the bet was won, otherwise the inner drafter's tree."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
        trees = {s: tree for s, most in zip(sequences, max_depth) if (tree := self._ready_tree(s, most)) is not None}
        left = [(s, most) for s, most in zip(sequences, max_depth, strict=True) if s not in trees]
        if left:
            stand_ins = [self._stand_in(sequence, sequence.token_ids) for sequence, _ in left]
            drafted = self.inner.propose(stand_ins, [most for _, most in left])
            trees |= {sequence: tree for (sequence, _), tree in zip(left, drafted, strict=True)}
        for sequence, most in zip(sequences, max_depth):
            branches = trees[sequence].branches()
            if branches:
                self._bets[sequence] = (sequence.token_ids + trees[sequence].along(branches[0]), most)
        self._ready.clear()
        if self._proposed is not None:
            self._proposed.record(torch.cuda.current_stream(self.device))
        return [trees[sequence] for sequence in sequences]

    def draft_ahead(self) -> None:
        """Draft beyond the first branches of the last proposed trees."""
        bets, self._bets = self._bets, {}
        if not bets:
            return
        stand_ins = [self._stand_in(sequence, tokens) for sequence, (tokens, _) in bets.items()]
        with self._drafting_stream():
            trees = self.inner.propose(stand_ins, [most + 1 for _, most in bets.values()])
        for (sequence, (tokens, _)), tree in zip(bets.items(), trees, strict=True):
            if len(tree):
                self.num_ahead += 1
                self._ready[sequence] = (tokens, tree)

    def give_distributions(self) -> None:
        """Let the inner drafter include the distributions of its guesses, if it can."""
        self.inner.give_distributions()

    def forget(self, sequence: Sequence) -> None:
        """Drop a sequence's state, here and in the inner drafter."""
        self._bets.pop(sequence, None)
        self._ready.pop(sequence, None)
        stand_in = self._stand_ins.pop(sequence, None)
        if stand_in is not None:
            self.inner.forget(stand_in)

    def _ready_tree(self, sequence: Sequence, max_depth: int) -> DraftTree | None:
        """Return the subtree below the newest token in the tree drafted ahead, if that token is among its guesses."""
        tokens, tree = self._ready.get(sequence, ([], NO_DRAFT))
        if not tokens or sequence.token_ids[:-1] != tokens:
            return None
        root = tree.child((), sequence.token_ids[-1])
        below = [path for path in tree.tokens if path[:1] == root and len(path) > 1]
        if not below:
            return None
        self.num_used += 1
        known = {path[1:]: tree.distributions[path] for path in below if path in tree.distributions}
        return DraftTree({path[1:]: tree.tokens[path] for path in below}, known).pruned(len(below), max_depth)

    def _stand_in(self, sequence: Sequence, tokens: list[int]) -> Sequence:
        stand_in = self._stand_ins.get(sequence)
        if stand_in is None:
            stand_in = Sequence(
                sequence.token_ids[: sequence.num_prompt_tokens],
                sequence.sampling,
                sample_index=sequence.sample_index,
                max_length=sequence.max_length,
            )
            self._stand_ins[sequence] = stand_in
        stand_in.token_ids = list(tokens)
        return stand_in

    @contextlib.contextmanager
    def _drafting_stream(self) -> Iterator[None]:
        if self._stream is None or self._proposed is None:
            yield
            return
        self._stream.wait_event(self._proposed)  # the inner drafter's last work, not the verification after it
        with torch.cuda.stream(self._stream):
            yield
