"""Drafter: guesses at the next tokens of a sequence. A guess can be wrong, late or missing; it never changes a bit."""

import abc
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

import torch
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.runtime.requests.sequence import Sequence
from detcompile.runtime.sampling.likeliest import likeliest
from detcompile.runtime.sampling.plan import SamplingPlan
from detcompile.runtime.sampling.sampler import Sampler
from detcompile.runtime.speculation.draft_tree import DraftTree

__all__ = ["Drafter", "NO_DRAFT", "as_drafter", "draw_drafts", "require_fitting"]

NO_DRAFT = DraftTree({})


class Drafter(abc.ABC):
    """What the engine asks of a drafter: ``propose`` and ``forget``; the rest does nothing unless a subclass says so.

    A sequence is given as a DraftedSequence, a view that can be read and not written. It is the same object each time,
    so that it may be a key.

    Where one of the methods raises for a sequence, the drafter is not asked about that sequence again.

    Attributes:
        vocab_size: tokens of the vocabulary, which has to be the target's; None fits any.
        tokenizer: tokenizer of the tokens that are guessed, which has to give the target's ids; None fits any.
        reads_states: whether the target's forward has to return hidden states, which ``observe`` is then given.
        hidden_size: values of a hidden state, where ``reads_states``.
        device: device that ``propose`` works on; a mirror gives a drafter on a GPU a stream of its own.
    """

    vocab_size: int | None = None
    tokenizer: Any | None = None
    reads_states: bool = False
    hidden_size: int = 0
    device: torch.device = torch.device("cpu")

    @abc.abstractmethod
    def propose(self, sequences: SequenceOf[Sequence], max_depth: SequenceOf[int]) -> SequenceOf[DraftTree]:
        """Return a tree for each sequence, no deeper than ``max_depth``; NO_DRAFT for none. All tokens are known."""

    @abc.abstractmethod
    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended, or will not be asked about for long: drop what is kept of it."""

    def draft_ahead(self) -> None:  # noqa: B027  a subclass may do without
        """The target verifies what was proposed: a drafter that can work meanwhile does."""

    def observe(self, rows: Mapping[Sequence, int], hidden: Tensor) -> None:  # noqa: B027
        """A step was drawn from the states ``hidden`` [R, H]; ``rows`` is the row of each sequence's newest token.

        Called where ``reads_states``; the states are good until the target's next launch.
        """

    def give_distributions(self) -> None:  # noqa: B027
        """Guesses will be accepted by rejection: trees should tell what they were drawn from, where it is known."""


def as_drafter(given: Any) -> Drafter:
    """The drafter itself, or a Drafter around an object that has ``propose`` and ``forget``, and perhaps more of it.

    Raises:
        InvalidInput: an object without one of the two.
    """
    if isinstance(given, Drafter):
        return given
    for name in sorted(Drafter.__abstractmethods__):
        if not callable(getattr(given, name, None)):
            raise InvalidInput(f"drafter={given!r} has no method {name}: give an instance of detcompile.Drafter")
    return _Lookalike(given)


class _Lookalike(Drafter):
    """An object with a drafter's methods that is no Drafter; what it lacks is as in Drafter."""

    def __init__(self, given: Any) -> None:
        self._given = given
        optional = vars(Drafter).keys() - Drafter.__abstractmethods__
        own = [name for name in optional if not name.startswith("_") and hasattr(given, name)]
        vars(self).update({name: getattr(given, name) for name in own})

    def propose(self, sequences: SequenceOf[Sequence], max_depth: SequenceOf[int]) -> SequenceOf[DraftTree]:
        found: SequenceOf[DraftTree] = self._given.propose(sequences, max_depth)
        return found

    def forget(self, sequence: Sequence) -> None:
        self._given.forget(sequence)


def draw_drafts(sampler: Sampler, logits: Tensor, plan: SamplingPlan, drawn: Tensor | None = None) -> Tensor:
    """Draw a draft from each row of ``logits`` [R', V].

    Args:
        drawn: [R', 2] int64, what ``likeliest`` gives for these logits, if that is known; this may be written to.

    Returns:
        [R, 3] int64: whether the logits are not numbers, which is the drafter's fault; whether nothing can be drawn,
        which may be the request's, whose bias or temperature overflows; and the token.
    """
    drawn = likeliest(logits[: plan.num_rows]) if drawn is None else drawn
    not_numbers = drawn[: plan.num_rows, :1].clone()
    return torch.cat([not_numbers, sampler(logits, plan, drawn).drawn], dim=1)


def require_fitting(drafter: Drafter | None, vocab_size: int, hidden_size: int, tokenizer: Any | None) -> None:
    """Refuse a drafter for another model.

    Args:
        drafter: drafter that was given; None, the n-grams of a text, fits every model.
        vocab_size: tokens of the target's vocabulary.
        hidden_size: values of a hidden state that the target gives; 0 if it gives none.
        tokenizer: the target's tokenizer, where it is known.

    Raises:
        InvalidInput: another vocabulary or tokenizer, or states of another size, where they are known.
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
        raise InvalidInput("the drafter reads hidden states, which this model does not hand out: take another drafter")
    if drafter.hidden_size != hidden_size:
        raise InvalidInput(
            f"the drafter reads states of {drafter.hidden_size} values, the model's have {hidden_size}: take one that"
            " was made for this model"
        )


def _known_to_differ(own: Any | None, other: Any | None, vocab_size: int) -> bool:
    """Whether two tokenizers give other ids. A stub, as transformers makes where files are missing, says nothing."""
    if own is None or other is None or own is other:
        return False
    vocabularies = own.get_vocab(), other.get_vocab()
    return min(map(len, vocabularies)) > vocab_size // 2 and vocabularies[0] != vocabularies[1]
