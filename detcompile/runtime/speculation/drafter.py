"""Drafter: guesses the next tokens of a sequence. A guess can be wrong, late or missing; it never changes a bit."""

import abc
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

import torch
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.runtime.requests.sequence import Sequence
from detcompile.runtime.sampling.filters import likeliest
from detcompile.runtime.sampling.plan import SamplingPlan
from detcompile.runtime.sampling.sampler import Sampler
from detcompile.runtime.speculation.draft_tree import DraftTree

NO_DRAFT = DraftTree({})


class Drafter(abc.ABC):
    """Interface of drafters: ``propose`` and ``forget``; the other methods do nothing by default.

    Sequences are passed as DraftedSequence, a read-only view. It is always the same object, so it can be a key. If a
    method raises for a sequence, the drafter is not used for that sequence again.

    Attributes:
        vocab_size: size of the vocabulary, which must be the target's; None fits any.
        tokenizer: tokenizer of the guessed tokens, which must give the target's ids; None fits any.
        reads_states: True if ``observe`` needs the hidden states of the target's forward.
        hidden_size: size of these hidden states, if ``reads_states``.
        device: device on which ``propose`` works; MirrorDrafter gives a drafter on a GPU its own stream.
    """

    vocab_size: int | None = None
    tokenizer: Any | None = None
    reads_states: bool = False
    hidden_size: int = 0
    device: torch.device = torch.device("cpu")

    @abc.abstractmethod
    def propose(self, sequences: SequenceOf[Sequence], max_depth: SequenceOf[int]) -> SequenceOf[DraftTree]:
        """Return a tree for each sequence, at most ``max_depth`` deep, or NO_DRAFT. All tokens are known."""

    @abc.abstractmethod
    def forget(self, sequence: Sequence) -> None:
        """Drop the state of a sequence that has ended, or will not be drafted for some time."""

    def draft_ahead(self) -> None:  # noqa: B027  a subclass may do without
        """Work ahead while the target verifies the last proposal."""

    def observe(self, rows: Mapping[Sequence, int], hidden: Tensor) -> None:  # noqa: B027
        """Receive the hidden states [R, H] of a step; ``rows`` gives the row of each sequence's newest token.

        Called if ``reads_states``; the states are valid until the target's next launch.
        """

    def give_distributions(self) -> None:  # noqa: B027
        """From now on, include in the trees the distributions that guesses were drawn from, where known."""


def as_drafter(given: Any) -> Drafter:
    """Return the drafter, or wrap an object that has ``propose`` and ``forget``.

    Raises:
        InvalidInput: one of the two methods is missing.
    """
    if isinstance(given, Drafter):
        return given
    for name in sorted(Drafter.__abstractmethods__):
        if not callable(getattr(given, name, None)):
            raise InvalidInput(f"drafter={given!r} has no method {name}: give an instance of detcompile.Drafter")
    return _Lookalike(given)


class _Lookalike(Drafter):
    """Wraps an object with a drafter's methods; missing optional methods are Drafter's."""

    def __init__(self, given: Any) -> None:
        self._given = given
        optional = vars(Drafter).keys() - Drafter.__abstractmethods__
        present = [name for name in optional if not name.startswith("_") and hasattr(given, name)]
        vars(self).update({name: getattr(given, name) for name in present})

    def propose(self, sequences: SequenceOf[Sequence], max_depth: SequenceOf[int]) -> SequenceOf[DraftTree]:
        trees: SequenceOf[DraftTree] = self._given.propose(sequences, max_depth)
        return trees

    def forget(self, sequence: Sequence) -> None:
        self._given.forget(sequence)


def draw_drafts(sampler: Sampler, logits: Tensor, plan: SamplingPlan, drawn: Tensor | None = None) -> Tensor:
    """Draw a draft from each row of ``logits`` [R', V].

    Args:
        drawn: [R', 2] int64, ``likeliest`` of these logits, if already computed; may be overwritten.

    Returns:
        [R, 3] int64: whether the logits are NaN or infinite (the drafter's fault); whether no token can be drawn
        (possibly the request's fault, if its bias or temperature overflows); and the token.
    """
    drawn = likeliest(logits[: plan.num_rows]) if drawn is None else drawn
    not_numbers = drawn[: plan.num_rows, :1].clone()
    return torch.cat([not_numbers, sampler(logits, plan, drawn).drawn], dim=1)


def require_fitting(drafter: Drafter | None, vocab_size: int, hidden_size: int, tokenizer: Any | None) -> None:
    """Reject a drafter made for another model.

    Args:
        drafter: the drafter; None (n-grams) fits every model.
        vocab_size: size of the target's vocabulary.
        hidden_size: size of the target's hidden states; 0 if it returns none.
        tokenizer: the target's tokenizer, if known.

    Raises:
        InvalidInput: the vocabularies, the tokenizers or the sizes of the states are known to differ.
    """
    if drafter is None:
        return
    if drafter.vocab_size not in (None, vocab_size):
        raise InvalidInput(
            f"the drafter's vocabulary has {drafter.vocab_size} tokens, the model's {vocab_size}: a drafter"
            " needs the model's tokenizer"
        )
    if _known_to_differ(drafter.tokenizer, tokenizer, vocab_size):
        raise InvalidInput("the drafter's tokenizer gives other ids than the model's: take a drafter made for this one")
    if not drafter.reads_states:
        return
    if hidden_size == 0:
        raise InvalidInput("the drafter needs hidden states, which this model does not return: use another drafter")
    if drafter.hidden_size != hidden_size:
        raise InvalidInput(
            f"the drafter reads states of {drafter.hidden_size} values, the model's have {hidden_size}: take one that"
            " was made for this model"
        )


def _known_to_differ(first: Any | None, other: Any | None, vocab_size: int) -> bool:
    """Return True if two tokenizers give different ids. A stub (of missing files) is ignored."""
    if first is None or other is None or first is other:
        return False
    vocabularies = first.get_vocab(), other.get_vocab()
    return min(map(len, vocabularies)) > vocab_size // 2 and vocabularies[0] != vocabularies[1]
