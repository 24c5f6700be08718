"""A request inside the engine: the sequences of its samples and their combined output."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from detcompile.errors import DetcompileError, EngineError, GenerationError, InvalidInput
from detcompile.runtime.adapters import Adapter
from detcompile.runtime.grammars.matcher import Matcher
from detcompile.runtime.requests.bad_words import NO_WORDS, BadWords
from detcompile.runtime.requests.detokenizer import Detokenizer
from detcompile.runtime.requests.outputs import (
    CompletionOutput,
    FinishReason,
    Logprobs,
    RequestMetrics,
    RequestOutput,
)
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.runtime.requests.sequence import Sequence


@dataclass(eq=False, slots=True)
class _Sample:
    """One sample of a request and its decoded text."""

    sequence: Sequence
    output: CompletionOutput
    detokenizer: Detokenizer | None  # None if no text is wanted
    num_read: int = 0  # tokens already decoded into the output's text


class Request:
    """One prompt and its n samples, or only the resumed ones.

    ``output`` is one object that is updated in place from the first token to the last. ``deaths`` and
    ``deaths_alone`` belong to PoisonRequestGuard.

    Args:
        prompt: the prompt as text, if it was given as text.
        token_ids: tokens of the prompt.
        params: the caller's parameters; a seed is drawn if they have none.
        tokenizer: decodes text; None if there is no tokenizer or no text is wanted.
        arrival: arrival number.
        priority: lower is more urgent.
        max_length: most tokens that a sequence may hold.
        cache_salt: prefixes are shared only among requests with the same salt.
        stream_text: update the text after every token.
        bad_words: token sequences that no sample may complete.
        matcher: grammar state before the first token; each sample gets a copy.
        resume: samples to serve and the tokens each has drawn before; None serves all n from the start.
        adapter: the adapter that draws them; None for the plain model.

    Raises:
        InvalidInput: a sample to resume has already ended, or its tokens break the grammar.
    """

    deaths = deaths_alone = 0

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        token_ids: list[int],
        params: SamplingParams,
        tokenizer: Any | None,
        *,
        arrival: int,
        priority: int,
        max_length: int,
        stream_text: bool,
        cache_salt: str = "",
        bad_words: BadWords = NO_WORDS,
        matcher: Matcher | None = None,
        resume: Mapping[int, list[int]] | None = None,
        adapter: Adapter | None = None,
    ) -> None:
        self.params = params.seeded()
        self._stream_text = stream_text
        self._samples: dict[int, _Sample] = {}
        for index, drawn in ({key: [] for key in range(params.n)} if resume is None else resume).items():
            common = (self.params, bad_words, index, priority, arrival, max_length)
            advanced = None if matcher is None else _advanced_matcher(matcher, index, drawn)
            self._samples[index] = _Sample(
                Sequence(
                    [*token_ids, *drawn],
                    *common,
                    num_prompt_tokens=len(token_ids),
                    matcher=advanced,
                    cache_salt=cache_salt,
                    adapter=adapter,
                ),
                CompletionOutput(index, token_ids=[*drawn], logprobs=None if params.logprobs is None else []),
                None if tokenizer is None else Detokenizer(tokenizer, self.params),
            )
        self.sequences = [sample.sequence for sample in self._samples.values()]
        self.held = self.sequences[1:]  # wait until the first sample has put the prompt into the prefix cache
        self.output = RequestOutput(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=list(token_ids),
            seed=self.params.seed,
            outputs=[sample.output for sample in self._samples.values()],
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
            metrics=RequestMetrics(time.monotonic()),
        )
        if resume is not None:
            self._read_resumed()

    def _read_resumed(self) -> None:
        """Decode the resumed tokens and reject a sample that already contains a stop string."""
        for sample in self._samples.values() if self.params.stop else ():
            self._detokenize(sample)
            if sample.sequence.finish_reason is not None:
                index, reason = sample.output.index, sample.sequence.stop_reason
                raise InvalidInput(f"sample {index} has already ended at {reason!r}: resume only unfinished samples")

    def add_token(self, index: int, token_id: int, logprobs: Logprobs | None) -> None:
        """Append a token to sample ``index``. May finish the sample."""
        sample = self._samples[index]
        sequence, output = sample.sequence, sample.output
        sequence.append(token_id)
        output.token_ids.append(token_id)
        if output.logprobs is not None and logprobs is not None:
            output.logprobs.append(logprobs)
        if output is self.output.outputs[0]:
            self._metrics.token_times.append(time.monotonic())
        if self.params.stop:
            self._detokenize(sample)
        if sequence.finish_reason is not None:
            self._close(sample)

    def stream(self) -> list[Sequence]:
        """Update streamed text, outside the critical path of a step. Return the samples that this ended."""
        ended: list[Sequence] = []
        for sample in self._samples.values() if self._stream_text else ():
            if sample.sequence.finish_reason is None:
                self._detokenize(sample)
                if sample.sequence.finish_reason is not None:
                    self._close(sample)
                    ended.append(sample.sequence)
        return ended

    def add_prompt_logprobs(self, start: int, entries: list[Logprobs]) -> None:
        """Add logprobs of the prompt tokens from ``start`` on; entries that are already known are kept."""
        known = self.output.prompt_logprobs
        assert known is not None and start <= len(known), "prompt logprobs must arrive in prompt order"
        known += entries[len(known) - start :]

    def end(self, index: int, reason: FinishReason, error: DetcompileError | None = None) -> None:
        """End a sample early."""
        sample = self._samples[index]
        sample.sequence.finish_reason = reason
        self.output.error = self.output.error or error
        self._close(sample)

    def fail(self, error: DetcompileError) -> None:
        """End every unfinished sample as it is, without calling anything that might raise again."""
        output = self.output
        output.error = output.error or error
        for sample in self._samples.values():
            sample.detokenizer = None
            sequence, completion = sample.sequence, sample.output
            if sequence.finish_reason is None:
                sequence.finish_reason = "error"
            if completion.finish_reason is None:
                completion.finish_reason, completion.stop_reason = sequence.finish_reason, sequence.stop_reason
        output.finished = True
        if output.metrics is not None:
            output.metrics.finished = time.monotonic()

    @property
    def finished(self) -> bool:
        """True once every sample has ended."""
        return self.output.finished

    @property
    def num_tokens(self) -> int:
        """Number of tokens drawn so far, over all samples."""
        return sum(len(sample.output.token_ids) for sample in self._samples.values())

    @property
    def _metrics(self) -> RequestMetrics:
        assert self.output.metrics is not None
        return self.output.metrics

    def _detokenize(self, sample: _Sample, *, last: bool = False) -> None:
        """Decode the new tokens (``last``: flush all held text); a stop token is not decoded."""
        sequence, output, detokenizer = sample.sequence, sample.output, sample.detokenizer
        if detokenizer is None:
            return
        ended = isinstance(sequence.stop_reason, int)
        new = output.token_ids[sample.num_read : len(output.token_ids) - ended]
        try:
            output.text += detokenizer.finish(new) if last else detokenizer.append(new)
        except Exception as error:  # some tokenizers raise on unknown ids: only this request fails
            for every in self._samples.values():
                every.detokenizer = None
            sequence.finish_reason = "error"
            self.output.error = self.output.error or EngineError(
                f"request {self.output.request_id}: the tokenizer cannot decode the generated tokens: {error!r}. Forbid"
                " unknown ids with logit_bias, or serve without a tokenizer"
            )
            return
        sample.num_read = len(output.token_ids)
        if detokenizer.stopped_by is not None and sequence.finish_reason in (None, "length"):
            sequence.finish_reason, sequence.stop_reason = "stop", detokenizer.stopped_by

    def _close(self, sample: _Sample) -> None:
        sequence, output = sample.sequence, sample.output
        self._detokenize(sample, last=True)
        output.finish_reason, output.stop_reason = sequence.finish_reason, sequence.stop_reason
        if all(s.finish_reason is not None for s in self.sequences):
            self.output.finished = True
            self._metrics.finished = time.monotonic()


def undrawable(where: str, params: SamplingParams, token: int | None) -> EngineError:
    """Return the error for a bad draw: an id without an embedding, or None if no logit was a number."""
    if token is None and (params.limited or params.extreme):
        return GenerationError(
            f"{where}: no token left to draw: logit_bias, penalties, min_tokens, bad words, allowed_token_ids and the"
            " grammar leave no token with a finite logit: allow more tokens, or use smaller biases and penalties"
        )
    if token is None:
        return EngineError(f"{where}: the model's logits are NaN or infinite: check the weights and the dtype")
    return EngineError(
        f"{where}: the model drew id {token}, which has a logit but no embedding: forbid it with logit_bias, or in"
        " generate() with suppress_tokens"
    )


def _advanced_matcher(matcher: Matcher, index: int, drawn: list[int]) -> Matcher:
    """Return a copy of the matcher, advanced over the tokens that a sample has drawn."""
    advanced = matcher.copy()
    for token in drawn:
        if advanced.complete:
            raise InvalidInput(f"sample {index} has already ended with its grammar: resume only unfinished samples")
        try:
            advanced.append(token)
        except EngineError as error:
            raise InvalidInput(f"resume: sample {index}: {error}") from error
    if drawn and advanced.complete:
        raise InvalidInput(f"sample {index} has already ended with its grammar: resume only unfinished samples")
    return advanced
