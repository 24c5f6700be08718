"""Teacher forcing: what a model draws at every position of given answers, in one pass over their tokens.

By contract, each position's logits have the same bits as in decoding, however the pass is cut into steps. Given these
logits and the tokens before them, the sampler draws the answer's tokens again.

Legend: R rows of logits, V vocabulary size.
"""

import itertools
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from detcompile.models.compiled import CompiledModel
from detcompile.runtime.grammars.matcher import Mask
from detcompile.runtime.kv.block_pool import BLOCK_SIZE
from detcompile.runtime.requests.request import Request
from detcompile.runtime.requests.sequence import Sequence
from detcompile.runtime.sampling.sampler import ELEMENTS_AT_ONCE, Sampler, SampleRow
from detcompile.runtime.step.builder import build_step
from detcompile.runtime.step.worker import logprob_entries, row_logprobs
from detcompile.serving.receipts.receipt import PlainLogprobs, plain_logprobs
from detcompile.templates.cpu.fp_mode import float_mode


class Drawn(NamedTuple):
    """The draw at one position.

    Attributes:
        sample: index of the sample; None for a token of the prompt.
        position: index of the token in its answer, or in the prompt.
        token: the drawn token, or the prompt's; None if nothing can be drawn.
        logprobs: the token's; None if not requested.
    """

    sample: int | None
    position: int
    token: int | None
    logprobs: PlainLogprobs | None


def teacher_forced(
    model: CompiledModel, request: Request, answers: SequenceOf[SequenceOf[int]], chunk: int
) -> Iterator[list[Drawn]]:
    """Yield each step's draws, in the order of the samples.

    Args:
        request: the request; not modified.
        answers: tokens of each sample, at least one each and no more than the context holds.
        chunk: maximum tokens per step.
    """
    prompt = request.output.prompt_token_ids
    sequences = [Sequence([*prompt, *tokens[:-1]], request.params, sample_index=i) for i, tokens in enumerate(answers)]
    room = sum(-(-len(sequence.token_ids) // BLOCK_SIZE) for sequence in sequences) * BLOCK_SIZE
    runner, blocks = model.new_runner(room, num_sequences=len(sequences))
    runner.adapter = request.sequences[0].adapter
    draw = _Draw(model, request, answers)
    while any(sequence.num_uncomputed for sequence in sequences):
        plan = _next_step(sequences, chunk)
        wanted = [place for place in _places(plan) if draw.wants(place)]
        rows = np.array([place.row for place in wanted] or [0], np.int64)  # a step has at least one row
        with float_mode(model.device):
            logits = runner.run(build_step(plan, blocks)._replace(logits_to_keep=rows))
            draws = draw(logits, wanted) if wanted else []
        for sequence, num_tokens in plan:
            sequence.num_computed += num_tokens
        yield draws


class _Place(NamedTuple):
    """A token of a step, and the position that its logits draw."""

    row: int  # index in the packed tokens
    sample: int
    target: int  # index of the drawn token in prompt and answer together


def _next_step(sequences: list[Sequence], chunk: int) -> list[tuple[Sequence, int]]:
    """Return the next tokens, in the order of the sequences."""
    plan, room = [], chunk
    for sequence in sequences:
        taken = min(sequence.num_uncomputed, room)
        if taken:
            plan.append((sequence, taken))
            room -= taken
    return plan


def _places(plan: list[tuple[Sequence, int]]) -> Iterator[_Place]:
    row = 0
    for sequence, num_tokens in plan:
        for index in range(sequence.num_computed, sequence.num_computed + num_tokens):
            yield _Place(row, sequence.sample_index, index + 1)
            row += 1


class _Draw:
    """Draws from a step's logits."""

    def __init__(self, model: CompiledModel, request: Request, answers: SequenceOf[SequenceOf[int]]) -> None:
        self._sampler = Sampler(model.facts.num_logits, model.device, is_exact=model.facts.is_exact)
        self._rows_at_once = max(1, ELEMENTS_AT_ONCE // model.facts.num_logits)  # penalties need a row of counts each
        self._request = request
        self._prompt = request.output.prompt_token_ids
        self._answers = answers
        self._masks = [_masks(sequence, tokens) for sequence, tokens in zip(request.sequences, answers)]

    def wants(self, place: _Place) -> bool:
        """Return True for an answer's token, or a prompt's token with requested logprobs."""
        wants_prompt = self._request.params.prompt_logprobs is not None and place.sample == 0
        return place.target >= len(self._prompt) or wants_prompt

    @torch.no_grad()
    def __call__(self, logits: Tensor, wanted: list[_Place]) -> list[Drawn]:
        draws: list[Drawn] = []
        of_prompt = [row for row, place in enumerate(wanted) if place.target < len(self._prompt)]
        if of_prompt:  # the step's first rows: the prompt is computed with the first sample
            draws += self._prompt_tokens(logits[: len(of_prompt)], wanted[: len(of_prompt)])
        for start in range(len(of_prompt), len(wanted), self._rows_at_once):
            stop = start + self._rows_at_once
            draws += self._answer_tokens(logits[start:stop], wanted[start:stop])
        return draws

    def _prompt_tokens(self, logits: Tensor, places: list[_Place]) -> list[Drawn]:
        tokens = [self._prompt[place.target] for place in places]
        most = self._request.params.prompt_logprobs or 0
        ids = torch.tensor(tokens, device=logits.device)
        known = logprob_entries(tokens, self._sampler.logprobs(logits, ids, most))
        return [
            Drawn(None, place.target, token, plain_logprobs(entry))
            for place, token, entry in zip(places, tokens, known)
        ]

    def _answer_tokens(self, logits: Tensor, places: list[_Place]) -> list[Drawn]:
        rows = tuple(self._row(place) for place in places)
        drawn = self._sampler(logits, self._sampler.prepare(rows))
        for row in rows:
            self._sampler.forget(row.key)
        tokens = drawn.tokens.tolist()
        known, _ = row_logprobs(rows, tokens, drawn, {})
        return [
            Drawn(
                place.sample,
                place.target - len(self._prompt),
                None if bad else token,
                None if entry is None else plain_logprobs(entry),
            )
            for place, token, entry, bad in zip(places, tokens, known, drawn.invalid.tolist())
        ]

    def _row(self, place: _Place) -> SampleRow:
        sequence = self._request.sequences[place.sample]
        num_generated = place.target - len(self._prompt)
        before: SequenceOf[int] = ()
        if sequence.sampling.penalized or any(sequence.bad_words):
            before = self._answers[place.sample][:num_generated]
        return SampleRow(
            sequence.sampling,
            place.target,
            num_generated,
            place.sample,
            place,  # a unique key, so that counts start from the tokens before
            [*self._prompt, *before] if sequence.sampling.penalized else (),
            sequence.forbidden_after(before),
            next(self._masks[place.sample]),
        )


def _masks(sequence: Sequence, answer: SequenceOf[int]) -> Iterator[Mask | None]:
    """Yield the grammar's mask for each token of an answer; None without a grammar, and after a forbidden token."""
    return itertools.repeat(None) if sequence.matcher is None else sequence.matcher.copy().along(answer)
