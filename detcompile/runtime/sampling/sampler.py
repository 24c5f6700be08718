"""From logits to tokens, on the device: Gumbel-max under a counter RNG, one row blind to the others.

A row's token is a function of its logits, its SamplingParams, its place (sample_index and position) and, with
penalties, its own tokens. Nothing here sums floating-point numbers across a row but the detcompile softmax
operations, whose order is fixed. The host never waits for the device.

Legend: R rows, V vocabulary size, Q rows of a group.
"""

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import detcompile.templates.rows.softmax  # noqa: F401  registers torch.ops.detcompile.softmax and log_softmax
from detcompile.errors import InvalidInput
from detcompile.runtime.requests.bad_words import BadWords
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.runtime.sampling.columns import Columns
from detcompile.runtime.sampling.filters import filtered, masked
from detcompile.runtime.sampling.likeliest import likeliest, not_finite
from detcompile.runtime.sampling.logprobs import TokenLogprobs, token_logprobs
from detcompile.runtime.sampling.penalties import FreshCounts, TokenCounts, penalise
from detcompile.runtime.sampling.plan import RowGroup, RowNeeds, SamplingPlan, plan_rows
from detcompile.runtime.sampling.rejection import resolve
from detcompile.runtime.sampling.rows import SampleRow
from detcompile.templates.cpu.fp_mode import float_mode
from detcompile.templates.tokens.gumbel import gumbel_argmax

__all__ = [
    "SampleRow",
    "Sampled",
    "Sampler",
    "SamplingParams",
    "TokenLogprobs",
    "sample",
    "token_logprobs",
]

ELEMENTS_AT_ONCE = 1 << 24  # bounds the memory of a large batch; rows are independent, so it cannot change a bit


class Sampled(NamedTuple):
    """What one step drew; on the device, perhaps not computed yet."""

    drawn: Tensor  # [R, 2] int64, one piece of memory: ``invalid`` and ``tokens`` of each row
    logprobs: TokenLogprobs | None  # of the rows plan.logprob_rows; None if there are none

    @property
    def tokens(self) -> Tensor:
        """[R] int64, ids of the vocabulary even where invalid."""
        return self.drawn[:, 1]

    @property
    def invalid(self) -> Tensor:
        """[R] bool: NaN or +inf among the logits, or nothing left to draw."""
        return self.drawn[:, 0] != 0


class Sampler:
    """Draws the tokens of the steps of one engine worker.

    ``prepare`` touches no logits and may run while the device still works on the step before. Plans are called once
    each, in the order in which they were made. A plan that is not called leaves the counts of its rows with penalties
    wrong: forget their keys.

    Args:
        eos_token_ids: end requests, so min_tokens forbids them too, unless a request ignores them.
        radices: leaves of the sums over the vocabulary, as the softmax operations take them.
        penalised_seats: sequences with penalties whose counts have their memory from the start.
    """

    def __init__(
        self,
        vocab_size: int,
        device: torch.device | str,
        radices: Sequence[int] = (),
        eos_token_ids: Sequence[int] = (),
        penalised_seats: int = 0,
    ) -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.radices = tuple(radices)
        self.eos_token_ids = tuple(eos_token_ids)
        self._counts = TokenCounts(vocab_size, self.device, penalised_seats)
        self._float_mode = float_mode(self.device)

    def prepare(self, rows: Sequence[SampleRow], refused: dict[int, Exception] | None = None) -> SamplingPlan:
        """Lay out a step on the host.

        Args:
            refused: gets what each row raised that cannot be planned, by its index; such a row is drawn greedily.
                None: it is raised.

        Raises:
            InvalidInput: a row that samples has no seed, or a bias of a token without a logit.
        """
        at_once = max(1, ELEMENTS_AT_ONCE // self.vocab_size)
        return plan_rows(rows, self._counts, self.device, self.eos_token_ids, at_once, refused)

    def forget(self, key: Hashable) -> None:
        """Drop what is kept of a sequence; a later row of it must bring all its tokens."""
        self._counts.forget(key)

    @torch.no_grad()
    def __call__(
        self, logits: Tensor, plan: SamplingPlan, drawn: Tensor | None = None, scores: Tensor | None = None
    ) -> Sampled:
        """Draw from ``logits`` [R', V], of which the first R rows are the plan's.

        Args:
            drawn: [R', 2] int64, what ``likeliest`` gives for these logits, if that is known; this may be written to.
            scores: [R, V] float32, gets what each row is drawn from: its logits after all that changes them.
        """
        assert logits.shape[0] >= plan.num_rows and logits.shape[1] == self.vocab_size
        with self._float_mode:
            rows = logits[: plan.num_rows]
            if scores is not None:
                scores.copy_(rows)
            return self._sampled(rows, plan, likeliest(rows) if drawn is None else drawn[: plan.num_rows], scores)

    def _sampled(self, rows: Tensor, plan: SamplingPlan, drawn: Tensor, scores: Tensor | None) -> Sampled:
        if plan.columns is None:
            return Sampled(drawn, None)
        columns = plan.columns.to(self.device)
        if plan.num_slots:
            self._counts.admit(plan.num_slots, _fresh(columns))
        distributions = torch.stack(plan.distributions) if plan.distributions else None
        for group in plan.groups:
            self._work(group, rows, columns, drawn, distributions, scores)
        logprobs = None
        if plan.logprob_rows:
            wanted = columns["logprob_rows"]
            own = rows.index_select(0, wanted)
            logprobs = token_logprobs(own, drawn[:, 1].index_select(0, wanted), plan.num_logprobs, self.radices)
        return Sampled(drawn, logprobs)

    @torch.no_grad()
    def probabilities(self, logits: Tensor, plan: SamplingPlan) -> Tensor:
        """What each row of ``logits`` [R, V] would be drawn from, [R, V] float32; zeros of rows that are greedy."""
        with self._float_mode:
            return self._chances(logits, plan)

    def _chances(self, logits: Tensor, plan: SamplingPlan) -> Tensor:
        found = torch.zeros(plan.num_rows, self.vocab_size, dtype=torch.float32, device=logits.device)
        columns: Columns = {} if plan.columns is None else plan.columns.to(self.device)
        for group in plan.groups:
            if group.needs.drawn:
                part = slice(group.start, group.stop)
                scaled = self._scaled(self._own_logits(group, logits, columns), group.needs, columns, part)
                chances = torch.ops.detcompile.softmax(scaled, torch.float32, list(self.radices))
                found.index_copy_(0, columns["rows"][part], chances)
        return found

    def _work(
        self,
        group: RowGroup,
        rows: Tensor,
        columns: Columns,
        drawn: Tensor,
        distributions: Tensor | None,
        scores: Tensor | None,
    ) -> None:
        """Redo the rows of one group in ``drawn``, and in ``scores``."""
        needs, part = group.needs, slice(group.start, group.stop)
        index = columns["rows"][part]
        logits = self._own_logits(group, rows, columns)
        found = likeliest(logits) if needs.changed else drawn.index_select(0, index)
        scaled = self._scaled(logits, needs, columns, part) if needs.drawn else logits
        if scores is not None:
            scores.index_copy_(0, index, scaled)
        if needs.drawn:
            chosen, bad = (
                self._resolve(scaled, columns, part, distributions)
                if needs.proposed
                else self._draw(scaled, columns, part)
            )
            found = torch.stack([found[:, 0] | bad, chosen], dim=1)
        drawn.index_copy_(0, index, found)
        if needs.penalised:
            self._counts.count(columns["slots"][part], found[:, 1])

    def _own_logits(self, group: RowGroup, rows: Tensor, columns: Columns) -> Tensor:
        """Logits [Q, V] float32 of a group, after biases, what is not allowed or a grammar forbids, and penalties."""
        needs, part = group.needs, slice(group.start, group.stop)
        if group.first_row is None:
            own = rows.index_select(0, columns["rows"][part])
        else:
            own = rows[group.first_row : group.first_row + group.stop - group.start]
        logits = own.to(torch.float32, copy=needs.biased)
        if needs.biased:
            entries = slice(group.bias_start, group.bias_stop)
            place = columns["bias_rows"][entries], columns["bias_tokens"][entries]
            logits.index_put_(place, logits[place] + columns["bias_values"][entries])
        if needs.restricted:
            entries = slice(group.allowed_start, group.allowed_stop)
            place = columns["allowed_rows"][entries], columns["allowed_tokens"][entries]
            logits = torch.full_like(logits, -math.inf).index_put_(place, logits[place])
        if needs.masked:
            logits = masked(logits, columns["masks"][group.mask_start : group.mask_stop])
        if needs.penalised:
            words = self._counts.words.index_select(0, columns["slots"][part])
            logits = penalise(
                logits, words, columns["repetition"][part], columns["frequency"][part], columns["presence"][part]
            )
        return logits

    def _scaled(self, logits: Tensor, needs: RowNeeds, columns: Columns, part: slice) -> Tensor:
        """Logits [Q, V] after temperature and filters."""
        # A tensor, not a number: CUDA turns a division by a number into a product with its reciprocal.
        scaled = logits / columns["temperature"][part]
        if needs.filtered:
            top_k, mass_limit, min_p = columns["top_k"][part], columns["mass_limit"][part], columns["min_p"][part]
            scaled = filtered(scaled, top_k, mass_limit, min_p, self.radices)
        return scaled

    def _draw(self, scaled: Tensor, columns: Columns, part: slice) -> tuple[Tensor, Tensor]:
        """Gumbel-max: argmax of logprob + noise has the distribution of the softmax. Tokens [Q], and whether bad."""
        logprobs = torch.ops.detcompile.log_softmax(scaled, torch.float32, list(self.radices))
        tokens = gumbel_argmax(logprobs, columns["keys"][part])
        return tokens, not_finite(logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1))

    def _resolve(
        self, scaled: Tensor, columns: Columns, part: slice, distributions: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Accept a guess or draw from the residual. Tokens [Q], and whether bad."""
        probabilities = torch.ops.detcompile.softmax(scaled, torch.float32, list(self.radices))
        keys = columns["acceptance_keys"][part], columns["residual_keys"][part]
        tokens = resolve(probabilities, columns["guesses"][part], columns["sources"][part], distributions, keys)
        return tokens, not_finite(probabilities.sum(1))


def sample(
    logits: Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    radices: Sequence[int] = (),
    *,
    sample_indices: Sequence[int] | None = None,
    num_prompt_tokens: Sequence[int] | None = None,
    token_ids: Sequence[Sequence[int]] | None = None,
    eos_token_ids: Sequence[int] = (),
) -> Tensor:
    """Draw a token a row, each alone.

    Args:
        logits: [R, V] floating point.
        params: R of them; those that are not greedy must have a seed (``SamplingParams.seeded``).
        positions: R of them; the index in its sequence of the token that a row draws.
        radices: leaves of the sums over the vocabulary, as the softmax operations take them.
        sample_indices: R of them; which of the n completions a row belongs to; default: 0.
        num_prompt_tokens: R of them; needed with penalties and min_tokens.
        token_ids: R of them; the tokens so far, prompt and output, needed with penalties.
        eos_token_ids: forbidden up to min_tokens, as stop_token_ids are.

    Returns:
        [R] int64 on the device of ``logits``.

    Raises:
        InvalidInput: not one of each a row, or a seed, num_prompt_tokens or token_ids are missing.
    """
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise InvalidInput(f"logits must be [R, V], not {list(logits.shape)}")
    if not len(params) == len(positions) == logits.shape[0]:
        counts = f"{logits.shape[0]} rows of logits, {len(params)} params and {len(positions)} positions"
        raise InvalidInput(f"{counts}: give one of each")
    if num_prompt_tokens is None and any(p.penalised or p.min_tokens for p in params):
        raise InvalidInput("penalties and min_tokens need num_prompt_tokens: say where each row's output begins")
    if any(p.penalised and (token_ids is None or len(token_ids[r]) != positions[r]) for r, p in enumerate(params)):
        raise InvalidInput("penalties need token_ids: give a row's tokens before its position, all of them")
    if any(p.bad_words or p.grammar for p in params):
        raise InvalidInput("bad_words and grammars are text, which nothing here reads: give bad_words_ids")
    words = [BadWords.of(p.bad_words_ids, ()) for p in params]
    if any(any(longer) and token_ids is None for longer, _ in words):
        raise InvalidInput("bad_words_ids need token_ids: give a row's tokens before its position, all of them")
    sampler = Sampler(logits.shape[1], logits.device, radices, eos_token_ids)
    rows = [
        SampleRow(
            own,
            positions[r],
            num_generated=positions[r] - num_prompt_tokens[r] if num_prompt_tokens is not None else 0,
            sample_index=sample_indices[r] if sample_indices is not None else 0,
            key=r,
            token_ids=token_ids[r] if token_ids is not None else (),
            forbidden=single + (longer.completions(token_ids[r], 0) if token_ids is not None else ()),
        )
        for r, (own, (longer, single)) in enumerate(zip(params, words))
    ]
    return sampler(logits, sampler.prepare(rows)).tokens


def _fresh(columns: Columns) -> FreshCounts:
    return FreshCounts(
        columns["fresh_slots"],
        columns["fresh_entry_slots"],
        columns["fresh_entry_tokens"],
        columns["fresh_entry_words"],
    )
