"""Teacher forcing: what a model draws at every position of given answers, in steps over the tokens of many answers.

By contract, each position's logits have the same bits as in decoding, whatever a step holds. Given these logits and the
tokens before them, the sampler draws the answer's tokens again.

Legend: R rows of logits, V vocabulary size.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from detcompile.models.compiled import CompiledModel
from detcompile.runtime.grammars.matcher import Mask
from detcompile.runtime.kv.block_pool import BLOCK_SIZE
from detcompile.runtime.kv.kv_blocks import KVBlocks
from detcompile.runtime.requests.outputs import Logprobs
from detcompile.runtime.requests.request import Request
from detcompile.runtime.requests.sequence import Sequence
from detcompile.runtime.sampling.sampler import ELEMENTS_AT_ONCE, Sampled, Sampler, SampleRow, TokenLogprobs
from detcompile.runtime.step.builder import build_step
from detcompile.runtime.step.interfaces import StepRunner
from detcompile.runtime.step.worker import logprob_entries, row_logprobs, to_host
from detcompile.serving.receipts.receipt import PlainLogprobs, plain_logprobs
from detcompile.templates.cpu.fp_mode import float_mode

MOST_STATES = 32  # sequences of a step, if layers keep a state of each


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


class ForcedAnswers:
    """The answers to one prompt, of which some positions are drawn again.

    Args:
        request: the request; not modified.
        answers: tokens of each sample, at least one each and no more than the context holds.
        weights: name of the weights that draw them.
        wants: (sample, position) -> whether this position is drawn; the sample is None for tokens of the prompt.

    Attributes:
        error: the exception that ended the pass over them; None if there is none.
    """

    def __init__(
        self,
        request: Request,
        answers: SequenceOf[list[int]],
        weights: str,
        wants: Callable[[int | None, int], bool],
    ) -> None:
        prompt = request.output.prompt_token_ids
        first = request.sequences[0]
        self.request, self.answers, self.weights, self.wants = request, answers, weights, wants
        self.adapter, self.prompt = first.adapter, prompt
        salt = f"{weights} {first.cache_salt}"
        self.open = deque(  # samples with tokens to compute
            Sequence([*prompt], request.params, sample_index=index, cache_salt=salt) for index in range(len(answers))
        )
        self.is_prompt_cached = False
        self.num_in_flight = 0  # parts of launched steps
        self.draws: list[Drawn] = []  # that nobody has taken
        self.error: Exception | None = None
        self._masks = [_masks(sequence, tokens) for sequence, tokens in zip(request.sequences, answers)]
        penalized = request.params.penalized
        self._tokens = [[*prompt, *tokens] for tokens in answers] if penalized else [()] * len(answers)

    @property
    def num_uncomputed(self) -> int:
        """Number of tokens to compute."""
        return sum(self.length(sequence) - sequence.num_computed for sequence in self.open)

    def length(self, sequence: Sequence) -> int:
        """Return the number of tokens to compute for a sample's sequence: all but the last one of the answer."""
        return len(self.prompt) + len(self.answers[sequence.sample_index]) - 1

    def taken(self) -> list[Drawn]:
        """Return the draws since the last call, in the order of the samples.

        Raises:
            Exception: ``error``.
        """
        if self.error is not None:
            raise self.error
        draws, self.draws = self.draws, []
        return draws

    @property
    def is_done(self) -> bool:
        """True if every draw was made."""
        return not self.open and not self.num_in_flight

    def waits(self, sequence: Sequence) -> bool:
        """Return True if a sample waits until another one has put the prompt into the prefix cache."""
        return sequence.sample_index > 0 and not self.is_prompt_cached and len(self.prompt) > BLOCK_SIZE

    def part(self, sequence: Sequence, num_tokens: int) -> "_Part":
        """Return a step's part: the next tokens of a sample.

        Raises:
            EngineError: the grammar is too large at a token.
        """
        start = sequence.num_computed
        drawn = start + 1, start + num_tokens + 1
        targets = self.prompt_targets(sequence, *drawn)
        return _Part(self, sequence, start, num_tokens, self._rows(sequence, *drawn), targets)

    def prompt_targets(self, sequence: Sequence, start: int, stop: int) -> list[int]:
        """Return indices of the prompt's tokens in ``start:stop`` whose log-probabilities are wanted."""
        wanted = self.request.params.prompt_logprobs is not None and sequence.sample_index == 0
        most = min(stop, len(self.prompt))
        return [at for at in range(start, most) if self.wants(None, at)] if wanted else []

    def _rows(self, sequence: Sequence, start: int, stop: int) -> list[SampleRow]:
        """Return rows that draw the answer's tokens among ``start:stop``, indices in prompt and answer together."""
        sample, num_prompt = sequence.sample_index, len(self.prompt)
        given, rows = self.request.sequences[sample], []
        before: SequenceOf[int] = ()
        for target in range(max(start, num_prompt), stop):
            mask = next(self._masks[sample])
            if not self.wants(sample, target - num_prompt):
                continue
            if any(given.bad_words):
                before = self.answers[sample][: target - num_prompt]
            rows.append(
                SampleRow(
                    given.sampling,
                    target,
                    target - num_prompt,
                    sample,
                    (self, sample, target),  # a unique key, so that counts start from the tokens before
                    self._tokens[sample],
                    given.forbidden_after(before),
                    mask,
                )
            )
        return rows


class TeacherForcing:
    """Runs steps over answers, in the order in which they were added.

    A step has tokens of several answers by the same weights and the same adapter. Samples of a prompt share its whole
    blocks of keys and values, and so do equal prompts of different answers.

    Args:
        chunk: maximum tokens per step.
        use: gives the model the weights of this name.
    """

    def __init__(self, model: CompiledModel, chunk: int, use: Callable[[str], None]) -> None:
        self.chunk = chunk
        self._model = model
        self._use = use
        self._sampler = self._new_sampler()
        self._rows_at_once = max(1, ELEMENTS_AT_ONCE // model.facts.num_logits)  # penalties need a row of counts each
        self._answers: dict[ForcedAnswers, None] = {}  # with tokens to compute, in order
        self._launched: deque[_Launched] = deque()
        self._most_in_flight = 1 if model.device.type == "cuda" else 0  # steps
        self._cache: tuple[StepRunner, KVBlocks] | None = None

    @property
    def has_room(self) -> bool:
        """True if the added answers do not fill the next step."""
        room = self.chunk
        for answers in self._answers:
            room -= answers.num_uncomputed
            if room <= 0:
                return False
        return True

    def add(self, answers: ForcedAnswers) -> None:
        """Add answers to the steps."""
        self._answers[answers] = None

    def drop(self, answers: ForcedAnswers) -> None:
        """Compute no more of these answers; unknown and finished ones are ignored."""
        if answers in self._answers:
            del self._answers[answers]
            for sequence in answers.open:
                if sequence.block_tables:
                    self._blocks.release(sequence)

    def free(self) -> None:
        """Free the KV cache and the memory of penalties. No answers may have tokens to compute."""
        assert not self._answers
        self._launched.clear()  # of answers that were dropped
        self._cache = None
        self._sampler = self._new_sampler()

    def step(self) -> None:
        """Launch a step, if there are tokens to compute, and read the draws of an earlier one.

        On a GPU the draws come a step late, so that the host works while the device does. If a step fails, its answers
        are computed one by one, and ``error`` of each that fails again is set.

        Raises:
            torch.AcceleratorError: the device is unusable in this process.
        """
        parts = self._plan()
        if parts:
            self._launch_parts(parts)
        while len(self._launched) > (self._most_in_flight if parts else 0):
            self._launched.popleft().read()

    def _new_sampler(self) -> Sampler:
        return Sampler(self._model.facts.num_logits, self._model.device, is_exact=self._model.facts.is_exact)

    @property
    def _keeps_prefixes(self) -> bool:
        return not self._model.facts.state_shapes

    @property
    def _blocks(self) -> KVBlocks:
        assert self._cache is not None
        return self._cache[1]

    def _plan(self) -> "list[_Part]":
        """Return the next step's parts; their sequences have blocks."""
        parts: list[_Part] = []
        begun = (answers for answers in self._answers if answers.open[0].block_tables)
        first = next(begun, None) or next(iter(self._answers), None)
        for answers in list(self._answers):
            assert first is not None
            same = (answers.weights, answers.adapter) == (first.weights, first.adapter)
            if same and not self._add_parts(answers, parts):
                break
        return parts

    def _add_parts(self, answers: ForcedAnswers, parts: "list[_Part]") -> bool:
        """Add the samples' next tokens to a step; return whether other answers may follow."""
        for sequence in list(answers.open):
            room = self.chunk - sum(part.num_tokens for part in parts)
            if room == 0:
                return False
            if answers.waits(sequence) and self._keeps_prefixes:
                return True
            try:
                if not sequence.block_tables and not self._admit(answers, sequence, is_first=not parts):
                    return False
                num_tokens = min(room, answers.length(sequence) - sequence.num_computed)
                if not self._blocks.grow(sequence, sequence.num_computed + num_tokens):
                    assert parts, "the cache has room for its longest sequence"
                    return False
                parts.append(answers.part(sequence, num_tokens))
            except torch.AcceleratorError:
                raise
            except Exception as error:  # out of memory, or a grammar that is too large
                parts[:] = [part for part in parts if part.answers is not answers]
                self._fail(answers, error)
                return True
        return True

    def _admit(self, answers: ForcedAnswers, sequence: Sequence, *, is_first: bool) -> bool:
        """Give a sequence the cached blocks of its prompt; return False if other sequences must end before."""
        needed = -(-answers.length(sequence) // BLOCK_SIZE) * len(self._model.facts.kv_groups)
        if self._cache is None or self._blocks.pool.num_blocks <= needed:
            if not is_first:
                return False
            self._cache = None  # frees the memory of the earlier one
            room = 2 * self.chunk + -(-answers.length(sequence) // BLOCK_SIZE) * BLOCK_SIZE
            most = min(MOST_STATES, self.chunk)
            self._cache = self._model.new_runner(room, num_sequences=most, prefix_caching=self._keeps_prefixes)
        reuse = not answers.prompt_targets(sequence, 0, len(answers.prompt))  # only computed tokens have logits
        if self._blocks.admit(sequence, 0, reuse=reuse) is None:
            assert not is_first, "the cache has room for its longest sequence"
            return False
        sequence.token_ids += answers.answers[sequence.sample_index][:-1]  # every answer's tokens are computed
        return True

    def _launch_parts(self, parts: "list[_Part]") -> None:
        """Launch a step; if it fails, one for each of the answers."""
        every = list(dict.fromkeys(part.answers for part in parts))
        try:
            self._launch(parts)
        except torch.AcceleratorError:
            raise
        except Exception as error:
            if len(every) == 1:
                self._fail(every[0], error)
                return
            for answers in every:
                self._launch_parts([part for part in parts if part.answers is answers])

    def _fail(self, answers: ForcedAnswers, error: Exception) -> None:
        self.drop(answers)
        answers.error = error

    @torch.no_grad()
    def _launch(self, parts: "list[_Part]") -> None:
        """Run a step and draw from its logits, without waiting for a GPU."""
        assert self._cache is not None
        runner, blocks = self._cache
        self._use(parts[0].answers.weights)
        runner.adapter = parts[0].answers.adapter
        first = list(itertools.accumulate((part.num_tokens for part in parts), initial=0))
        shifts = [at - part.start - 1 for at, part in zip(first, parts)]  # from a drawn token to the row of its logits
        rows = [row for part in parts for row in part.rows]
        kept = [shift + row.position for shift, part in zip(shifts, parts) for row in part.rows]
        kept += [shift + target for shift, part in zip(shifts, parts) for target in part.targets]
        with float_mode(self._model.device):
            arrays = build_step([(part.sequence, part.num_tokens) for part in parts], blocks)
            logits = runner.run(arrays._replace(logits_to_keep=np.array(kept or [0], np.int64)))  # at least one row
            drawn = self._draw(logits, rows)
            of_prompts = self._prompt_logprobs(logits[len(rows) :], parts)
        (drawn, of_prompts), done = to_host((drawn, of_prompts), self._model.device)
        self._launched.append(_Launched(parts, drawn, of_prompts, done))
        for part in parts:
            self._advance(part)

    def _advance(self, part: "_Part") -> None:
        """Count a launched part's tokens."""
        answers, sequence = part.answers, part.sequence
        answers.num_in_flight += 1
        sequence.num_computed += part.num_tokens
        self._blocks.commit(sequence)
        answers.is_prompt_cached |= sequence.num_computed >= len(answers.prompt)
        if sequence.num_computed == answers.length(sequence):
            self._blocks.release(sequence)
            answers.open.remove(sequence)
        if not answers.open:
            del self._answers[answers]

    def _draw(self, logits: Tensor, rows: list[SampleRow]) -> list[Sampled]:
        """Draw from the first rows of the logits, all at once unless memory limits them."""
        most = self._rows_at_once if any(row.params.penalized for row in rows) else max(1, len(rows))
        pieces = []
        for start in range(0, len(rows), most):
            piece = rows[start : start + most]
            try:
                pieces.append(self._sampler(logits[start : start + most], self._sampler.prepare(piece)))
            finally:
                for row in piece:
                    self._sampler.forget(row.key)
        return pieces

    def _prompt_logprobs(self, logits: Tensor, parts: "list[_Part]") -> list[TokenLogprobs | None]:
        """Return the wanted log-probabilities of each part's prompt."""
        computed: list[TokenLogprobs | None] = []
        start = 0
        for part in parts:
            stop = start + len(part.targets)
            ids = torch.tensor(part.prompt_tokens, dtype=torch.int64, device="cpu")
            if logits.is_cuda:
                ids = ids.pin_memory().to(logits.device, non_blocking=True)
            most = part.answers.request.params.prompt_logprobs or 0
            computed.append(self._sampler.logprobs(logits[start:stop], ids, most) if part.targets else None)
            start = stop
        return computed


class _Part(NamedTuple):
    """One sample's part of a step."""

    answers: ForcedAnswers
    sequence: Sequence
    start: int  # index of its first token
    num_tokens: int
    rows: list[SampleRow]  # draws of the answer's tokens
    targets: list[int]  # indices of the prompt's tokens whose log-probabilities are wanted

    @property
    def prompt_tokens(self) -> list[int]:
        return [self.answers.prompt[target] for target in self.targets]

    def prompt_draws(self, known: TokenLogprobs) -> Iterator[Drawn]:
        tokens = self.prompt_tokens
        for target, token, entry in zip(self.targets, tokens, logprob_entries(tokens, known)):
            yield Drawn(None, target, token, plain_logprobs(entry))

    def draws(self, drawn: "Iterator[tuple[int | None, Logprobs | None]]") -> Iterator[Drawn]:
        for row, (token, entry) in zip(self.rows, drawn):
            known = None if entry is None else plain_logprobs(entry)
            yield Drawn(row.sample_index, row.num_generated, token, known)


class _Launched(NamedTuple):
    """A step whose draws were not read."""

    parts: list[_Part]
    drawn: list[Sampled]  # pieces, on the host after ``done``
    of_prompts: list[TokenLogprobs | None]  # of each part, on the host after ``done``
    done: torch.cuda.Event | None

    def read(self) -> None:
        """Wait for the step, and hand out its draws."""
        if self.done is not None:
            self.done.synchronize()
        drawn = self._tokens()
        for part, of_prompt in zip(self.parts, self.of_prompts):
            answers = part.answers
            if of_prompt is not None:
                answers.draws += part.prompt_draws(of_prompt)
            answers.draws += part.draws(drawn)
            answers.num_in_flight -= 1

    def _tokens(self) -> "Iterator[tuple[int | None, Logprobs | None]]":
        """Yield each row's token, None if nothing can be drawn, and its log-probabilities if requested."""
        rows = [row for part in self.parts for row in part.rows]
        start = 0
        for piece in self.drawn:
            drawn = piece.drawn.tolist()
            stop = start + len(drawn)
            known, _ = row_logprobs(tuple(rows[start:stop]), [token for _, token in drawn], piece, {})
            yield from zip([None if bad else token for bad, token in drawn], known)
            start = stop


def _masks(sequence: Sequence, answer: SequenceOf[int]) -> Iterator[Mask | None]:
    """Yield the grammar's mask for each token of an answer; None without a grammar, and after a forbidden token."""
    return itertools.repeat(None) if sequence.matcher is None else sequence.matcher.copy().along(answer)
