"""Sampler: logits to tokens on the device, by Gumbel-max with a counter RNG; rows do not affect each other.

A row's token depends only on its logits, its SamplingParams, its sample_index and position and, with penalties, its own
tokens. Floating-point sums across a row occur only in the detcompile softmax operations, whose order is fixed. The host
never waits for the device.

Legend: R rows, V vocabulary size, Q rows of a group.
"""

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.runtime.requests.bad_words import BadWords
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.runtime.sampling.filters import filtered, likeliest, log_softmax, masked, not_finite, softmax
from detcompile.runtime.sampling.logprobs import TokenLogprobs, joined, token_logprobs
from detcompile.runtime.sampling.penalties import FreshCounts, TokenCounts, penalize
from detcompile.runtime.sampling.plan import RowGroup, SamplingPlan, plan_rows
from detcompile.runtime.sampling.rejection import resolve
from detcompile.runtime.sampling.sampling_tensors import SampleRow, SamplingTensors
from detcompile.templates.cpu.fp_mode import float_mode
from detcompile.templates.tokens.gumbel import gumbel_argmax

ELEMENTS_AT_ONCE = 1 << 24  # bounds the memory of a large batch; rows are independent, so it cannot change a bit
ELEMENTS_ON_CPU = 1 << 18  # stay in the cache


class Sampled(NamedTuple):
    """Tokens drawn by one step, on the device and perhaps not computed yet."""

    drawn: Tensor  # [R, 2] int64, contiguous: ``invalid`` and ``tokens`` of each row
    logprobs: TokenLogprobs | None  # of the rows plan.logprob_rows; None if there are none
    sampling: TokenLogprobs | None  # in the distributions drawn from, of the drawn rows that want them, in order

    @property
    def tokens(self) -> Tensor:
        """[R] int64; valid ids even where invalid."""
        return self.drawn[:, 1]

    @property
    def invalid(self) -> Tensor:
        """[R] bool: NaN or +inf among the logits, or no token left to draw."""
        return self.drawn[:, 0] != 0


class Sampler:
    """Draws the tokens of one engine worker's steps.

    ``prepare`` does not touch logits and may run while the device still works on the previous step. Call plans once
    each, in the order in which they were made. If a plan is dropped, ``forget`` the keys of its rows with penalties,
    whose counts would otherwise be wrong.

    Args:
        eos_token_ids: tokens that end requests; min_tokens forbids them too, unless a request ignores them.
        penalized_slots: number of sequences with penalties whose counts are allocated from the start.
        is_exact: probabilities are those of docs/exact.md.
    """

    def __init__(
        self,
        vocab_size: int,
        device: torch.device | str,
        eos_token_ids: Sequence[int] = (),
        penalized_slots: int = 0,
        is_exact: bool = False,
    ) -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.is_exact = is_exact
        self.eos_token_ids = tuple(eos_token_ids)
        self._counts = TokenCounts(vocab_size, self.device, penalized_slots)
        self._float_mode = float_mode(self.device)

    def prepare(self, rows: Sequence[SampleRow], refused: dict[int, Exception] | None = None) -> SamplingPlan:
        """Plan a step on the host.

        Args:
            refused: receives the exceptions of rows that cannot be planned, by index; such rows are drawn greedily.
                None re-raises the exception.

        Raises:
            InvalidInput: a sampled row has no seed, or a biased token has no logit.
        """
        most = ELEMENTS_AT_ONCE if self.device.type == "cuda" else min(ELEMENTS_AT_ONCE, ELEMENTS_ON_CPU)
        at_once = max(1, most // self.vocab_size)
        return plan_rows(rows, self._counts, self.device, self.eos_token_ids, at_once, refused)

    def forget(self, key: Hashable) -> None:
        """Drop the counts of a sequence; its next row must bring all tokens."""
        self._counts.forget(key)

    @torch.no_grad()
    def __call__(
        self, logits: Tensor, plan: SamplingPlan, drawn: Tensor | None = None, scores: Tensor | None = None
    ) -> Sampled:
        """Draw from ``logits`` [R', V], whose first R rows are the plan's.

        Args:
            drawn: [R', 2] int64, ``likeliest`` of these logits, if already computed; may be overwritten.
            scores: [R, V] float32, receives the logits that each row is drawn from, after all modifications.
        """
        assert logits.shape[0] >= plan.num_rows and logits.shape[1] == self.vocab_size
        with self._float_mode:
            rows = logits[: plan.num_rows]
            if scores is not None:
                scores.copy_(rows)
            return self._sampled(rows, plan, likeliest(rows) if drawn is None else drawn[: plan.num_rows], scores)

    def _sampled(self, rows: Tensor, plan: SamplingPlan, drawn: Tensor, scores: Tensor | None) -> Sampled:
        if plan.tensors is None:
            return Sampled(drawn, None, None)
        tensors = plan.tensors.to(self.device)
        if plan.num_slots:
            self._counts.admit(plan.num_slots, _fresh(tensors))
        distributions = torch.stack(plan.distributions) if plan.distributions else None
        reported: list[TokenLogprobs] = []
        for group in plan.groups:
            scaled = self._work(group, rows, tensors, drawn, distributions, scores)
            if group.needs.reported:
                tokens = drawn[:, 1].index_select(0, tensors["rows"][group.start : group.stop])
                reported.append(self.logprobs(scaled, tokens, plan.num_reported))
        logprobs = None
        if plan.logprob_rows:
            wanted = tensors["logprob_rows"]
            logits = rows.index_select(0, wanted)
            logprobs = self.logprobs(logits, drawn[:, 1].index_select(0, wanted), plan.num_logprobs)
        sampling = None
        if reported:
            order = tensors["reported_order"]
            sampling = TokenLogprobs(*(part.index_select(0, order) for part in joined(reported)))
        return Sampled(drawn, logprobs, sampling)

    def logprobs(self, logits: Tensor, tokens: Tensor, num_top: int) -> TokenLogprobs:
        """Return logprobs of ``tokens`` [R] int64 and of the ``num_top`` most likely ones, from ``logits`` [R, V]."""
        return token_logprobs(logits, tokens, num_top, self.is_exact)

    @torch.no_grad()
    def probabilities(self, logits: Tensor, plan: SamplingPlan) -> Tensor:
        """Return the distributions [R, V] float32 that the rows would be drawn from; zeros for greedy rows."""
        with self._float_mode:
            return self._chances(logits, plan)

    def _chances(self, logits: Tensor, plan: SamplingPlan) -> Tensor:
        result = torch.zeros(plan.num_rows, self.vocab_size, dtype=torch.float32, device=logits.device)
        tensors: SamplingTensors = {} if plan.tensors is None else plan.tensors.to(self.device)
        for group in plan.groups:
            if group.needs.drawn:
                part = slice(group.start, group.stop)
                scaled = self._scaled(self._group_logits(group, logits, tensors), group, tensors)
                chances = softmax(scaled, self.is_exact)
                result.index_copy_(0, tensors["rows"][part], chances)
        return result

    def _work(
        self,
        group: RowGroup,
        rows: Tensor,
        tensors: SamplingTensors,
        drawn: Tensor,
        distributions: Tensor | None,
        scores: Tensor | None,
    ) -> Tensor:
        """Draw the rows of one group again, into ``drawn`` and ``scores``; return the logits they are drawn from."""
        needs, part = group.needs, slice(group.start, group.stop)
        index = tensors["rows"][part]
        logits = self._group_logits(group, rows, tensors)
        result = likeliest(logits) if needs.changed else drawn.index_select(0, index)
        scaled = self._scaled(logits, group, tensors) if needs.drawn else logits
        if scores is not None:
            scores.index_copy_(0, index, scaled)
        if needs.drawn:
            chosen, bad = (
                self._resolve(scaled, tensors, part, distributions)
                if needs.proposed
                else self._draw(scaled, tensors, part)
            )
            result = torch.stack([result[:, 0] | bad, chosen], dim=1)
        drawn.index_copy_(0, index, result)
        if needs.penalized:
            self._counts.count(tensors["slots"][part], result[:, 1])
        return scaled

    def _group_logits(self, group: RowGroup, rows: Tensor, tensors: SamplingTensors) -> Tensor:
        """Return a group's logits [Q, V] float32 after biases, allowed tokens, grammar masks and penalties."""
        needs, part = group.needs, slice(group.start, group.stop)
        if group.first_row is None:
            logits = rows.index_select(0, tensors["rows"][part])
        else:
            logits = rows[group.first_row : group.first_row + group.stop - group.start]
        logits = logits.to(torch.float32, copy=needs.biased)
        if needs.biased:
            entries = slice(group.bias_start, group.bias_stop)
            place = tensors["bias_rows"][entries], tensors["bias_tokens"][entries]
            logits.index_put_(place, logits[place] + tensors["bias_values"][entries])
        if needs.restricted:
            entries = slice(group.allowed_start, group.allowed_stop)
            place = tensors["allowed_rows"][entries], tensors["allowed_tokens"][entries]
            logits = torch.full_like(logits, -math.inf).index_put_(place, logits[place])
        if needs.masked:
            logits = masked(logits, tensors["masks"][group.mask_start : group.mask_stop])
        if needs.penalized:
            words = self._counts.words.index_select(0, tensors["slots"][part])
            logits = penalize(
                logits, words, tensors["repetition"][part], tensors["frequency"][part], tensors["presence"][part]
            )
        return logits

    def _scaled(self, logits: Tensor, group: RowGroup, tensors: SamplingTensors) -> Tensor:
        """Return logits [Q, V] after temperature and filters."""
        part = slice(group.start, group.stop)
        # A tensor, not a number: CUDA turns a division by a number into a product with its reciprocal.
        scaled = logits / tensors["temperature"][part]
        if group.needs.filtered:
            top_k, mass_limit, min_p = tensors["top_k"][part], tensors["mass_limit"][part], tensors["min_p"][part]
            scaled = filtered(scaled, top_k, mass_limit, min_p, self.is_exact, group.filters)
        return scaled

    def _draw(self, scaled: Tensor, tensors: SamplingTensors, part: slice) -> tuple[Tensor, Tensor]:
        """Return tokens [Q] drawn by Gumbel-max (argmax of logprob + noise), and whether they are invalid."""
        logprobs = log_softmax(scaled, self.is_exact)
        tokens = gumbel_argmax(logprobs, tensors["keys"][part])
        return tokens, not_finite(logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1))

    def _resolve(
        self, scaled: Tensor, tensors: SamplingTensors, part: slice, distributions: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Accept a guess or draw from the residual. Return tokens [Q], and whether invalid."""
        probabilities = softmax(scaled, self.is_exact)
        keys = tensors["acceptance_keys"][part], tensors["residual_keys"][part]
        tokens = resolve(probabilities, tensors["guesses"][part], tensors["sources"][part], distributions, keys)
        return tokens, not_finite(probabilities.sum(1))


def sample(
    logits: Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    *,
    sample_indices: Sequence[int] | None = None,
    num_prompt_tokens: Sequence[int] | None = None,
    token_ids: Sequence[Sequence[int]] | None = None,
    eos_token_ids: Sequence[int] = (),
) -> Tensor:
    """Draw one token per row; rows do not affect each other.

    Args:
        logits: [R, V] floating point.
        params: one per row; all but greedy ones must have a seed (``SamplingParams.seeded``).
        positions: one per row: the index of the drawn token in its sequence.
        sample_indices: one per row: which of the n completions it is; default 0.
        num_prompt_tokens: one per row; needed with penalties and min_tokens.
        token_ids: one list per row: all tokens so far, prompt and output; needed with penalties.
        eos_token_ids: forbidden until min_tokens, like stop_token_ids.

    Returns:
        [R] int64 on the device of ``logits``.

    Raises:
        InvalidInput: the lengths differ, or a seed, num_prompt_tokens or token_ids are missing.
    """
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise InvalidInput(f"logits must be [R, V], not {list(logits.shape)}")
    if not len(params) == len(positions) == logits.shape[0]:
        counts = f"{logits.shape[0]} rows of logits, {len(params)} params and {len(positions)} positions"
        raise InvalidInput(f"{counts}: give one of each")
    if num_prompt_tokens is None and any(p.penalized or p.min_tokens for p in params):
        raise InvalidInput("penalties and min_tokens need num_prompt_tokens: give the prompt length of each row")
    if any(p.penalized and (token_ids is None or len(token_ids[r]) != positions[r]) for r, p in enumerate(params)):
        raise InvalidInput("penalties need token_ids: give all tokens before each row's position")
    if any(p.bad_words or p.grammar for p in params):
        raise InvalidInput("bad_words and grammars need a tokenizer, which sample() does not have: give bad_words_ids")
    words = [BadWords.of(p.bad_words_ids, ()) for p in params]
    if any(any(longer) and token_ids is None for longer, _ in words):
        raise InvalidInput("bad_words_ids need token_ids: give all tokens before each row's position")
    sampler = Sampler(logits.shape[1], logits.device, eos_token_ids)
    rows = [
        SampleRow(
            row_params,
            positions[r],
            num_generated=positions[r] - num_prompt_tokens[r] if num_prompt_tokens is not None else 0,
            sample_index=sample_indices[r] if sample_indices is not None else 0,
            key=r,
            token_ids=token_ids[r] if token_ids is not None else (),
            forbidden=single + (longer.completions(token_ids[r], 0) if token_ids is not None else ()),
        )
        for r, (row_params, (longer, single)) in enumerate(zip(params, words))
    ]
    return sampler(logits, sampler.prepare(rows)).tokens


def _fresh(tensors: SamplingTensors) -> FreshCounts:
    return FreshCounts(
        tensors["fresh_slots"],
        tensors["fresh_entry_slots"],
        tensors["fresh_entry_tokens"],
        tensors["fresh_entry_words"],
    )
