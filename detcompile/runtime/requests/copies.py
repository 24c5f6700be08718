"""Copies of outputs that callers may keep and change: full copies and deltas."""

from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Literal

from detcompile.runtime.requests.outputs import CompletionOutput, RequestMetrics, RequestOutput

OutputKind = Literal["cumulative", "delta", "final_only"]  # vLLM's RequestOutputKind


class Cursor:
    """Part of a growing output that one reader has received.

    Args:
        num_drawn: tokens per sample that the reader already had before the first delta.
    """

    def __init__(self, num_drawn: SequenceOf[int]) -> None:
        self._num_tokens = list(num_drawn)
        self._num_logprobs = [0] * len(num_drawn)
        self._num_letters = [0] * len(num_drawn)
        self._ended = [False] * len(num_drawn)
        self._num_prompt_logprobs = 0

    def delta(self, output: RequestOutput) -> RequestOutput:
        """Return what is new since the last delta: the samples that grew or ended, with only their new parts."""
        known = output.prompt_logprobs
        new = None if known is None else known[self._num_prompt_logprobs :]
        self._num_prompt_logprobs = 0 if known is None else len(known)
        metrics = output.metrics if output.finished else None
        return RequestOutput(
            output.request_id,
            output.prompt,
            output.prompt_token_ids,
            output.seed,
            [part for place in range(len(output.outputs)) if (part := self._part(output, place)) is not None],
            output.finished,
            new,
            output.error,
            None if metrics is None else _copy_of_metrics(metrics),
        )

    def _part(self, output: RequestOutput, place: int) -> CompletionOutput | None:
        sample = output.outputs[place]
        num_tokens, num_letters, ended = len(sample.token_ids), len(sample.text), sample.finish_reason is not None
        before = self._num_tokens[place], self._num_letters[place], self._ended[place]
        if before == (num_tokens, num_letters, ended):
            return None
        logprobs = None if sample.logprobs is None else sample.logprobs[self._num_logprobs[place] :]
        self._num_tokens[place], self._num_letters[place], self._ended[place] = num_tokens, num_letters, ended
        self._num_logprobs[place] = 0 if sample.logprobs is None else len(sample.logprobs)
        text, token_ids = sample.text[before[1] :], sample.token_ids[before[0] :]
        return replace(sample, text=text, token_ids=token_ids, logprobs=logprobs)


def joined(first: RequestOutput, then: RequestOutput) -> RequestOutput:
    """Merge two consecutive deltas of one request, which the caller owns."""
    parts = {sample.index: sample for sample in first.outputs}
    for sample in then.outputs:
        before = parts.get(sample.index)
        if before is not None:
            logprobs = None if before.logprobs is None else [*before.logprobs, *(sample.logprobs or ())]
            sample = replace(
                sample,
                text=before.text + sample.text,
                token_ids=before.token_ids + sample.token_ids,
                logprobs=logprobs,
            )
        parts[sample.index] = sample
    known = None if first.prompt_logprobs is None else [*first.prompt_logprobs, *(then.prompt_logprobs or ())]
    return replace(then, outputs=[parts[index] for index in sorted(parts)], prompt_logprobs=known)


def copy_of(output: RequestOutput) -> RequestOutput:
    """Return a copy of an output. Written out field by field for speed: every step copies one per request."""
    metrics, known = output.metrics, output.prompt_logprobs
    return RequestOutput(
        output.request_id,
        output.prompt,
        output.prompt_token_ids[:],
        output.seed,
        [_copy_of_sample(sample) for sample in output.outputs],
        output.finished,
        None if known is None else known[:],
        output.error,
        None if metrics is None else _copy_of_metrics(metrics),
    )


def _copy_of_sample(sample: CompletionOutput) -> CompletionOutput:
    return CompletionOutput(
        sample.index,
        sample.text,
        sample.token_ids[:],
        None if sample.logprobs is None else sample.logprobs[:],
        sample.finish_reason,
        sample.stop_reason,
    )


def _copy_of_metrics(metrics: RequestMetrics) -> RequestMetrics:
    return RequestMetrics(
        metrics.arrival,
        metrics.first_scheduled,
        metrics.token_times[:],
        metrics.finished,
        metrics.num_cached_tokens,
        metrics.num_preemptions,
        metrics.num_drafted_tokens,
        metrics.num_accepted_tokens,
    )
