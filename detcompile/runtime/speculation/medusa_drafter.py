"""MedusaDrafter: heads on the target's hidden state guess several tokens ahead, without an extra forward.

The state is the one from which the newest token was drawn, so the verifying forward has computed it already. Cai et
al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", ICML 2024.

Legend: S sequences, K heads, C candidates per head, H hidden size, V vocabulary size.
"""

import heapq
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import torch
from torch import Tensor

from detcompile.errors import EngineError, InvalidInput
from detcompile.runtime.requests.sequence import Sequence
from detcompile.runtime.sampling.sampler import Sampler, SampleRow
from detcompile.runtime.speculation.draft_tree import DraftTree, Path, require_shape
from detcompile.runtime.speculation.drafter import NO_DRAFT, Drafter, draw_drafts
from detcompile.runtime.speculation.medusa_heads import MedusaHeads


class MedusaDrafter(Drafter):
    """Drafts trees of the heads' most likely tokens. Made by ``CompiledModel.medusa_drafter``.

    A head's first candidate is drawn with the target's noise at that position; the others are its most likely tokens.
    Without ``paths``, each step's tree takes the paths with the largest product of the heads' probabilities.

    Args:
        heads: Medusa heads on the target's device.
        lm_head: [V, H], the target's language-model head, for heads without one.
        num_nodes: nodes of a tree that grows by probability.
        num_candidates: candidates per head.
        paths: a fixed tree; (0, 2) is the first head's first candidate followed by the second head's third.

    Raises:
        InvalidInput: the heads' hidden size or vocabulary does not match ``lm_head``, or the tree is invalid.
    """

    vocab_size: int
    reads_states = True

    def __init__(
        self,
        heads: MedusaHeads,
        lm_head: Tensor,
        *,
        num_nodes: int = 8,
        num_candidates: int = 4,
        paths: SequenceOf[Path] | None = None,
    ) -> None:
        self.vocab_size, self.hidden_size = lm_head.shape
        _require_fitting(heads, self.vocab_size, self.hidden_size)
        if paths is not None:
            if max(map(len, require_shape(paths))) > heads.num_heads:
                raise InvalidInput(
                    f"MedusaDrafter: paths={list(paths)} must not be deeper than the {heads.num_heads} heads"
                )
            num_candidates = 1 + max(max(path) for path in paths)
        if num_nodes < 1 or not 1 <= num_candidates < self.vocab_size:
            raise InvalidInput(
                f"MedusaDrafter: num_nodes={num_nodes} and num_candidates={num_candidates}: give at least one node, and"
                f" 1 to {self.vocab_size - 1} candidates"
            )
        self.heads = heads
        self.num_nodes, self.num_candidates, self.paths = num_nodes, num_candidates, paths
        self._lm_head = lm_head
        self._sampler = Sampler(self.vocab_size, lm_head.device)
        self._states: dict[Sequence, tuple[int, Tensor]] = {}  # number of tokens, and state [H] of the newest one

    def observe(self, rows: Mapping[Sequence, int], hidden: Tensor) -> None:
        """Keep the state from which each sequence's newest token was drawn: rows of ``hidden`` [R, H]."""
        index = torch.tensor(list(rows.values()), dtype=torch.int64, device="cpu").to(hidden.device, non_blocking=True)
        kept = hidden.index_select(0, index)
        for sequence, state in zip(rows, kept.unbind(), strict=True):
            self._states[sequence] = (len(sequence.token_ids), state)

    @torch.no_grad()
    def propose(self, sequences: SequenceOf[Sequence], max_depth: SequenceOf[int]) -> list[DraftTree]:
        """Return a tree for each sequence whose newest state is known.

        Raises:
            EngineError: the heads' logits are NaN or infinite.
        """
        states: dict[Sequence, Tensor] = {}
        for sequence in sequences:
            num_tokens, state = self._states.get(sequence, (-1, self._lm_head))
            if num_tokens == len(sequence.token_ids):
                states[sequence] = state
        candidates = self._candidates(states) if states else {}
        return [
            self._tree(*candidates[sequence], depth) if sequence in candidates and depth > 0 else NO_DRAFT
            for sequence, depth in zip(sequences, max_depth, strict=True)
        ]

    def forget(self, sequence: Sequence) -> None:
        """Drop a sequence's state."""
        self._states.pop(sequence, None)

    def _candidates(self, states: dict[Sequence, Tensor]) -> dict[Sequence, tuple[list[list[int]], list[list[float]]]]:
        """Return tokens and probabilities [K, C] of each sequence for which every head can draw a token."""
        logits = self.heads(torch.stack(list(states.values())), self._lm_head)  # [K, S, V]
        rows = [
            SampleRow(
                replace(sequence.sampling, logprobs=None, prompt_logprobs=None),
                sequence.num_tokens + offset,
                sequence.num_generated + offset,
                sequence.sample_index,
            )
            for offset in range(1, self.heads.num_heads + 1)
            for sequence in states
        ]
        flat = logits.flatten(0, 1)
        drafts = draw_drafts(self._sampler, flat, self._sampler.prepare(rows))
        likeliest = flat.float().softmax(-1).topk(self.num_candidates, dim=-1)
        not_numbers, invalid, drawn = drafts.T.tolist()
        if any(not_numbers):
            raise EngineError("the Medusa heads' logits are NaN or infinite: check their weights and their dtype")
        tokens, chances = likeliest.indices.tolist(), likeliest.values.tolist()
        candidates = {}
        for index, sequence in enumerate(states):
            head_rows = range(index, len(rows), len(states))  # the sequence's row of each head
            if any(invalid[row] for row in head_rows):
                continue
            firsts = [_first(drawn[row], tokens[row]) for row in head_rows]
            candidates[sequence] = firsts, [chances[row] for row in head_rows]
        return candidates

    def _tree(self, tokens: list[list[int]], chances: list[list[float]], max_depth: int) -> DraftTree:
        paths = likeliest_paths(chances[:max_depth], self.num_nodes) if self.paths is None else self.paths
        return DraftTree({path: tokens[len(path) - 1][path[-1]] for path in paths if len(path) <= max_depth})


def likeliest_paths(chances: SequenceOf[SequenceOf[float]], num_nodes: int) -> list[Path]:
    """Return the paths with the largest products, each after its parents, most likely first.

    Args:
        chances: [K, C] probabilities of each level's candidates, descending; the same after every path.
        num_nodes: most paths to return.
    """
    best: list[Path] = []
    heap: list[tuple[float, Path]] = [(-chances[0][0], (0,))] if chances else []
    while heap and len(best) < num_nodes:
        product, path = heapq.heappop(heap)
        best.append(path)
        level, rank = len(path), path[-1]
        if level < len(chances):
            heapq.heappush(heap, (product * chances[level][0], (*path, 0)))
        if rank + 1 < len(chances[level - 1]) and chances[level - 1][rank] > 0:
            sibling = product / chances[level - 1][rank] * chances[level - 1][rank + 1]
            heapq.heappush(heap, (sibling, (*path[:-1], rank + 1)))
    return best


def _first(token: int, others: list[int]) -> list[int]:
    """Return the same number of candidates with ``token`` first."""
    return [token, *(other for other in others if other != token)][: len(others)]


def _require_fitting(heads: MedusaHeads, vocab_size: int, hidden_size: int) -> None:
    if heads.hidden_size != hidden_size:
        raise InvalidInput(
            f"these Medusa heads read states of {heads.hidden_size} values, the model's have {hidden_size}: take heads"
            " that were trained for it"
        )
    if heads.vocab_size not in (None, vocab_size):
        raise InvalidInput(
            f"the Medusa heads' vocabulary has {heads.vocab_size} tokens, the model's {vocab_size}: take heads that"
            " were trained for it"
        )
