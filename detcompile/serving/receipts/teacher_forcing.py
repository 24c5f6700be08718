"""Teacher forcing: what a model draws at every position of answers that are given, in one pass over their tokens.

Each position's logits have the bits that decoding gave them, however the pass is cut into steps: that is the contract.
So the sampler, shown these logits and the tokens before them, draws the answer's own tokens.

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
from detcompile.runtime.sampling.sampler import ELEMENTS_AT_ONCE, Sampler, SampleRow, TokenLogprobs, token_logprobs
from detcompile.runtime.step.builder import build_step
from detcompile.templates.cpu.fp_mode import float_mode

__all__ = ["Drawn", "PlainLogprobs", "teacher_forced"]

PlainLogprobs = tuple[int, float, list[tuple[int, float]]]  # token, logprob, the likeliest tokens with theirs


class Drawn(NamedTuple):
    """What stands at one position.

    Attributes:
        sample: index of the sample; None for a token of the prompt.
        position: index of the token in its answer, or in the prompt.
        token: the token drawn, or that of the prompt; None where nothing can be drawn.
        logprobs: the token's; None where none are asked for.
    """

    sample: int | None
    position: int
    token: int | None
    logprobs: PlainLogprobs | None


def teacher_forced(
    model: CompiledModel, request: Request, answers: SequenceOf[SequenceOf[int]], chunk: int
) -> Iterator[list[Drawn]]:
    """What each step found, in the order of the samples; a step has ``chunk`` tokens at most.

    Args:
        request: what was asked; nothing of it is changed.
        answers: tokens of each of its samples, at least one each, and no more than the context holds.
    """
    prompt = request.output.prompt_token_ids
    sequences = [Sequence([*prompt, *tokens[:-1]], request.params, sample_index=i) for i, tokens in enumerate(answers)]
    room = sum(-(-len(sequence.token_ids) // BLOCK_SIZE) for sequence in sequences) * BLOCK_SIZE
    runner, blocks = model.new_runner(room, num_sequences=len(sequences))
    draw = _Draw(model, request, answers)
    while any(sequence.num_uncomputed for sequence in sequences):
        plan = _next_step(sequences, chunk)
        wanted = [place for place in _places(plan) if draw.wants(place)]
        rows = np.array([place.row for place in wanted] or [0], np.int64)  # a step gives one row at least
        with float_mode(model.device):
            logits = runner.run(build_step(plan, blocks)._replace(logits_to_keep=rows))
            found = draw(logits, wanted) if wanted else []
        for sequence, num_tokens in plan:
            sequence.num_computed += num_tokens
        yield found


class _Place(NamedTuple):
    """A token of a step, and what its logits draw."""

    row: int  # of the packed tokens
    sample: int
    target: int  # index, in prompt and answer together, of the token that is drawn


def _next_step(sequences: list[Sequence], chunk: int) -> list[tuple[Sequence, int]]:
    """The next tokens, in the order of the sequences."""
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
    """Draws what is wanted of a step's logits."""

    def __init__(self, model: CompiledModel, request: Request, answers: SequenceOf[SequenceOf[int]]) -> None:
        self._sampler = Sampler(model.facts.num_logits, model.device)
        self._rows_at_once = max(1, ELEMENTS_AT_ONCE // model.facts.num_logits)  # penalties take a row of counts each
        self._request = request
        self._prompt = request.output.prompt_token_ids
        self._answers = answers
        self._masks = [_masks(own, tokens) for own, tokens in zip(request.sequences, answers)]  # each place comes once

    def wants(self, place: _Place) -> bool:
        """Whether it is about an answer's token, or one of a prompt whose logprobs are asked for."""
        asked = self._request.params.prompt_logprobs is not None and place.sample == 0
        return place.target >= len(self._prompt) or asked

    @torch.no_grad()
    def __call__(self, logits: Tensor, wanted: list[_Place]) -> list[Drawn]:
        found: list[Drawn] = []
        of_prompt = [row for row, place in enumerate(wanted) if place.target < len(self._prompt)]
        if of_prompt:  # the first of the step's, as they are of the first sample
            found += self._prompt_tokens(logits[: len(of_prompt)], wanted[: len(of_prompt)])
        for start in range(len(of_prompt), len(wanted), self._rows_at_once):
            stop = start + self._rows_at_once
            found += self._answer_tokens(logits[start:stop], wanted[start:stop])
        return found

    def _prompt_tokens(self, logits: Tensor, places: list[_Place]) -> list[Drawn]:
        tokens = [self._prompt[place.target] for place in places]
        most = self._request.params.prompt_logprobs or 0
        known = _plain(tokens, token_logprobs(logits, torch.tensor(tokens, device=logits.device), most))
        return [Drawn(None, place.target, token, own) for place, token, own in zip(places, tokens, known)]

    def _answer_tokens(self, logits: Tensor, places: list[_Place]) -> list[Drawn]:
        rows = [self._row(place) for place in places]
        drawn = self._sampler(logits, self._sampler.prepare(rows))
        for row in rows:
            self._sampler.forget(row.key)
        tokens = drawn.tokens.tolist()
        known = [None] * len(rows) if drawn.logprobs is None else _plain(tokens, drawn.logprobs)
        return [
            Drawn(place.sample, place.target - len(self._prompt), None if bad else token, own)
            for place, token, own, bad in zip(places, tokens, known, drawn.invalid.tolist())
        ]

    def _row(self, place: _Place) -> SampleRow:
        sequence = self._request.sequences[place.sample]
        num_generated = place.target - len(self._prompt)
        before: SequenceOf[int] = ()
        if sequence.sampling.penalised or any(sequence.bad_words):
            before = self._answers[place.sample][:num_generated]
        return SampleRow(
            sequence.sampling,
            place.target,
            num_generated,
            place.sample,
            place,  # a row a key: its counts start from the tokens before it
            [*self._prompt, *before] if sequence.sampling.penalised else (),
            sequence.forbidden_after(before),
            next(self._masks[place.sample]),
        )


def _masks(sequence: Sequence, answer: SequenceOf[int]) -> Iterator[Mask | None]:
    """What the grammar lets each token of an answer be; None without one, and behind a token that it forbids."""
    return itertools.repeat(None) if sequence.matcher is None else sequence.matcher.copy().along(answer)


def _plain(tokens: list[int], found: TokenLogprobs) -> list[PlainLogprobs]:
    top = [list(zip(ids, values)) for ids, values in zip(found.top_ids.tolist(), found.top.tolist())]
    return list(zip(tokens, found.chosen.tolist(), top))
