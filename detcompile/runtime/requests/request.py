"""A request inside the engine: its samples' sequences, and the output that they add up to."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from detcompile.errors import DetcompileError, EngineError, GenerationError, InvalidInput
from detcompile.runtime.grammars.matcher import Matcher
from detcompile.runtime.requests.bad_words import NO_WORDS, BadWords
from detcompile.runtime.requests.detokenizer import Detokenizer
from detcompile.runtime.requests.outputs import CompletionOutput, Logprobs, RequestMetrics, RequestOutput
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.runtime.requests.sequence import FinishReason, Sequence

__all__ = ["Request", "undrawable"]


@dataclass(eq=False, slots=True)
class _Sample:
    """One sample of a request, and its text as far as it was read."""

    sequence: Sequence
    output: CompletionOutput
    detokenizer: Detokenizer | None  # None where nobody wants text
    num_read: int = 0  # tokens whose text is in the output


class Request:
    """One prompt and its n samples, or those of them that are resumed.

    ``output`` is one object from the first token to the last, updated in place. ``deaths`` and ``deaths_alone`` are
    a PoisonRequestGuard's.

    Args:
        prompt: the prompt as text, if it was given as text.
        token_ids: tokens of the prompt.
        params: what the caller asked for; a seed is drawn if it has none.
        tokenizer: makes the text; None where there is none, or nobody wants text.
        arrival: number of requests that came before.
        priority: urgency; lower is more urgent.
        max_length: tokens that a sequence may hold.
        cache_salt: requests of another salt share no cached prefix with it.
        stream_text: keep the text up to date after every token.
        bad_words: sequences of tokens that no sample may complete.
        matcher: stands before the first token of the grammar; each sample gets one of its own.
        resume: the samples to serve, each with the tokens that it has drawn before; None for all n from their start.

    Raises:
        InvalidInput: a sample to resume has ended with a stop string or its grammar, or its tokens break that.
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
    ) -> None:
        self.params = params.seeded()
        self._stream_text = stream_text
        self._samples: dict[int, _Sample] = {}
        for index, drawn in ({key: [] for key in range(params.n)} if resume is None else resume).items():
            own = (self.params, bad_words, index, priority, arrival, max_length)
            behind = None if matcher is None else _matcher_behind(matcher, index, drawn)
            self._samples[index] = _Sample(
                Sequence(
                    [*token_ids, *drawn],
                    *own,
                    num_prompt_tokens=len(token_ids),
                    matcher=behind,
                    cache_salt=cache_salt,
                ),
                CompletionOutput(index, token_ids=[*drawn], logprobs=None if params.logprobs is None else []),
                None if tokenizer is None else Detokenizer(tokenizer, self.params),
            )
        self.sequences = [sample.sequence for sample in self._samples.values()]
        self.held = self.sequences[1:]  # wait for the first, whose prompt they will find in the cache
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
        """Look for stop strings in the tokens that samples were resumed with: where there is one, it has ended."""
        for sample in self._samples.values() if self.params.stop else ():
            self._detokenize(sample)
            if sample.sequence.finish_reason is not None:
                index, reason = sample.output.index, sample.sequence.stop_reason
                raise InvalidInput(f"sample {index} has ended at {reason!r}: resume those that run")

    def add_token(self, index: int, token_id: int, logprobs: Logprobs | None) -> None:
        """Sample ``index`` has drawn a token; may finish it."""
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
        """Bring text that streams up to date, which needs to hold up no step; the samples that this ended."""
        ended: list[Sequence] = []
        for sample in self._samples.values() if self._stream_text else ():
            if sample.sequence.finish_reason is None:
                self._detokenize(sample)
                if sample.sequence.finish_reason is not None:
                    self._close(sample)
                    ended.append(sample.sequence)
        return ended

    def add_prompt_logprobs(self, start: int, entries: list[Logprobs]) -> None:
        """Logprobs of the prompt tokens from ``start`` on; those known already are left as they are."""
        known = self.output.prompt_logprobs
        assert known is not None and start <= len(known), "prompt logprobs come in the order of the prompt"
        known += entries[len(known) - start :]

    def end(self, index: int, reason: FinishReason, error: DetcompileError | None = None) -> None:
        """End a sample early."""
        sample = self._samples[index]
        sample.sequence.finish_reason = reason
        self.output.error = self.output.error or error
        self._close(sample)

    def fail(self, error: DetcompileError) -> None:
        """End every sample that still runs, as it stands: nothing of it is asked that might raise once more."""
        output = self.output
        output.error = output.error or error
        for sample in self._samples.values():
            sample.detokenizer = None
            sequence, own = sample.sequence, sample.output
            if sequence.finish_reason is None:
                sequence.finish_reason = "error"
            if own.finish_reason is None:
                own.finish_reason, own.stop_reason = sequence.finish_reason, sequence.stop_reason
        output.finished = True
        if output.metrics is not None:
            output.metrics.finished = time.monotonic()

    @property
    def finished(self) -> bool:
        """Whether no token comes any more."""
        return self.output.finished

    @property
    def num_tokens(self) -> int:
        """Tokens drawn so far, over all samples."""
        return sum(len(sample.output.token_ids) for sample in self._samples.values())

    @property
    def _metrics(self) -> RequestMetrics:
        assert self.output.metrics is not None
        return self.output.metrics

    def _detokenize(self, sample: _Sample, *, last: bool = False) -> None:
        """Text of the tokens that are new, with ``last`` all of it; a token that ended the sample is not read."""
        sequence, output, detokenizer = sample.sequence, sample.output, sample.detokenizer
        if detokenizer is None:
            return
        ended = isinstance(sequence.stop_reason, int)
        new = output.token_ids[sample.num_read : len(output.token_ids) - ended]
        try:
            output.text += detokenizer.finish(new) if last else detokenizer.append(new)
        except Exception as error:  # some tokenizers raise at ids that they do not know: the others' requests go on
            for every in self._samples.values():
                every.detokenizer = None
            sequence.finish_reason = "error"
            self.output.error = self.output.error or EngineError(
                f"request {self.output.request_id}: the tokenizer cannot read what was generated: {error!r}. Forbid"
                " the ids that it does not know with logit_bias, or serve without a tokenizer"
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
    """What is wrong with a token that was drawn: an id without an embedding, or None for no id at all."""
    if token is None and (params.limited or params.extreme):
        return GenerationError(
            f"{where}: nothing is left to draw: logit_bias, penalties, min_tokens, bad words, allowed_token_ids and the"
            " grammar leave no token whose logit is a number: allow more, or ask for smaller biases and penalties"
        )
    if token is None:
        return EngineError(f"{where}: the model's logits are not numbers: check the weights and the dtype")
    return EngineError(
        f"{where}: the model drew id {token}, which has a logit and no embedding: forbid it with logit_bias, or in"
        " generate() with suppress_tokens"
    )


def _matcher_behind(matcher: Matcher, index: int, drawn: list[int]) -> Matcher:
    """A sample's own matcher, behind the tokens that it has drawn."""
    own = matcher.copy()
    for token in drawn:
        if own.complete:
            raise InvalidInput(f"sample {index} has ended with its grammar: resume those that run")
        try:
            own.append(token)
        except EngineError as error:
            raise InvalidInput(f"resume: sample {index}: {error}") from error
    if drawn and own.complete:
        raise InvalidInput(f"sample {index} has ended with its grammar: resume those that run")
    return own
