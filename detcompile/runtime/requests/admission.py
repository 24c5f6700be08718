"""Admission: checks prompts and parameters against the limits of a model, and makes requests of them.

The next token of a sample depends only on the prompt, the parameters, the seed and the tokens drawn so far. A request
that resumes from tokens drawn earlier, by this engine or another, therefore ends in the bits of an uninterrupted one.
"""

import functools
import logging
import math
import threading
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import fields
from typing import Any, Protocol

from detcompile.errors import InvalidInput
from detcompile.runtime.adapters import Adapter
from detcompile.runtime.grammars.compiler import GrammarCompiler
from detcompile.runtime.requests.bad_words import NO_WORDS, BadWords, word_tokens
from detcompile.runtime.requests.outputs import CompletionOutput, RequestOutput
from detcompile.runtime.requests.plain_values import flag, kind, shown, string, token_list, whole_number
from detcompile.runtime.requests.prompts import Prompt, private_copy, prompts_of, read_prompt, tokenized
from detcompile.runtime.requests.request import Request
from detcompile.runtime.requests.sampling_params import LOGPROBS, SamplingParams

logger = logging.getLogger(__name__)


class Admission:
    """Turns prompts into requests of one model.

    Args:
        tokenizer: a tokenizer of transformers, which is copied; None accepts only token ids. If its end token is not an
            end token of the model, a warning says so once per process.
        max_context: most tokens that a sequence may hold.
        vocab_size: number of ids that the model can read, 0 … vocab_size - 1.
        num_logits: number of ids that the model can draw, 0 … num_logits - 1; None for vocab_size.
        end_tokens: returns the tokens that end a request (unless it ignores them). Called for every request, since a
            model's end tokens may change. Tokens that the model cannot draw are dropped with a warning.

    Raises:
        InvalidInput: the tokenizer draws at random or cannot be copied.
    """

    def __init__(
        self,
        tokenizer: Any | None,
        *,
        max_context: int,
        vocab_size: int,
        end_tokens: Callable[[], SequenceOf[int]],
        num_logits: int | None = None,
    ) -> None:
        self.tokenizer = private_copy(tokenizer)
        self.max_context = max_context
        self.vocab_size = vocab_size
        self.num_logits = vocab_size if num_logits is None else num_logits
        self._end_tokens = end_tokens
        self._listed: tuple[int, ...] | None = None  # the end tokens that `_grammars` was built for
        self._follow_end_tokens()
        warn_of_end_tokens(self.tokenizer, self.num_logits, self._grammars.eos_token_ids)
        self._tokenizing = threading.Lock()  # fast tokenizers are not thread-safe ("already borrowed")

    def request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None,
        *,
        arrival: int,
        priority: int,
        stream_text: bool,
        resume: Mapping[int, SequenceOf[int]] | None = None,
        with_text: bool = True,
        adapter: Adapter | None = None,
    ) -> Request:
        """Return a request that the model can serve.

        Args:
            resume: samples to continue, with the tokens that each has drawn.
            with_text: decode text for the output; stop strings are detected either way.
            adapter: the adapter that draws the tokens; None for the plain model.

        Raises:
            InvalidInput: the prompt is malformed, empty, too long, outside the vocabulary, or text that cannot be
                tokenized; or parameters do not fit the model or have the wrong type.
        """
        string(request_id, "request_id")
        urgency, streams = whole_number(priority, "priority"), flag(stream_text, "stream_text")
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise InvalidInput(f"params {shown(params)} is {kind(params)}: give SamplingParams")
        params.check_vocabulary(self.num_logits)
        text, token_ids, cache_salt = self._read(prompt)
        token_ids = self._truncated(token_ids, params)
        self._check_length(token_ids, params)
        self._check_drawable(token_ids, params)
        if params.stop and self.tokenizer is None:
            raise InvalidInput("stop strings need the text, and this engine has no tokenizer: use stop_token_ids")
        grammars = self._follow_end_tokens()
        bad_words, checked = self._checked(params, grammars.eos_token_ids)
        return Request(
            request_id,
            text,
            token_ids,
            checked,
            self.tokenizer if with_text or checked.stop else None,
            arrival=arrival,
            priority=urgency,
            max_length=self.max_context,
            cache_salt=_adapted_salt(cache_salt, adapter),
            stream_text=streams,
            bad_words=bad_words,
            matcher=None if checked.grammar is None else grammars.matcher(checked.grammar, checked.stop_token_ids),
            resume=None if resume is None else _resumed_samples(resume, checked, len(token_ids), self),
            adapter=adapter,
        )

    def per_prompt(
        self,
        prompts: Any,
        params: SamplingParams | SequenceOf[SamplingParams] | None,
        priority: SequenceOf[int] | None = None,
    ) -> list[tuple[Any, SamplingParams | None, int]]:
        """Pair each prompt with its parameters and its priority (default 0).

        Raises:
            InvalidInput: ``prompts`` is neither a prompt nor a list, or the lengths of the lists differ.
        """
        every = prompts_of(prompts)
        urgency = [0] * len(every) if priority is None else token_list(priority, "priority")
        if len(urgency) != len(every):
            raise InvalidInput(f"{len(every)} prompts and {len(urgency)} priorities: give one each")
        if params is None or isinstance(params, SamplingParams):
            return [(prompt, params, level) for prompt, level in zip(every, urgency)]
        if not isinstance(params, SequenceOf) or isinstance(params, (str, bytes)):
            raise InvalidInput(f"params {shown(params)} is {kind(params)}: give SamplingParams, or a list")
        if len(params) != len(every):
            raise InvalidInput(f"{len(every)} prompts and {len(params)} SamplingParams: give one for all, or one each")
        return list(zip(every, params, urgency))

    def refusal(self, prompt: Any, error: InvalidInput) -> RequestOutput:
        """Return the output of a prompt that was rejected."""
        try:
            text, token_ids, _ = read_prompt(prompt)
        except InvalidInput:
            text, token_ids = None, []
        refused = CompletionOutput(0, finish_reason="error")
        return RequestOutput("", text, token_ids or [], None, [refused], finished=True, error=error)

    def _read(self, prompt: Any) -> tuple[str | None, list[int], str]:
        """Return the prompt's text (if it has one), its tokens and its cache_salt."""
        text, token_ids, cache_salt = read_prompt(prompt)
        if token_ids is None:
            assert text is not None
            token_ids = self._tokenized(text)
        if not token_ids:
            raise InvalidInput("the prompt is empty: it needs at least one token, such as the model's BOS token")
        bad = next((token for token in token_ids if not 0 <= token < self.vocab_size), None)
        if bad is not None:
            raise InvalidInput(f"the prompt holds token {bad}; ids are 0 to {self.vocab_size - 1}")
        return text, token_ids, cache_salt

    def _truncated(self, token_ids: list[int], params: SamplingParams) -> list[int]:
        """Return the end of the prompt that truncate_prompt_tokens keeps."""
        most = params.truncate_prompt_tokens
        if most is None:
            return token_ids
        return token_ids[-(most if most > 0 else max(1, self.max_context - max(1, params.min_tokens))) :]

    def _bad_words(self, params: SamplingParams) -> tuple[BadWords, tuple[int, ...]]:
        """Return the bad words of two or more tokens, and the single tokens to forbid."""
        if params.bad_words and self.tokenizer is None:
            raise InvalidInput("bad_words are texts, and this engine has no tokenizer: use bad_words_ids")
        read = functools.partial(self._tokenized, add_special_tokens=False)
        words, single = BadWords.of(params.bad_words_ids, word_tokens(params.bad_words, read, self.num_logits))
        return words if any(words) else NO_WORDS, single

    def _tokenized(self, text: str, **options: bool) -> list[int]:
        if self.tokenizer is None:
            raise InvalidInput("this engine has no tokenizer: give token ids, or a tokenizer to engine()")
        with self._tokenizing:
            return tokenized(self.tokenizer, text, verbose=False, **options)

    def _check_length(self, token_ids: list[int], params: SamplingParams) -> None:
        if len(token_ids) >= self.max_context:
            raise InvalidInput(
                f"the prompt has {len(token_ids)} tokens, and the model was compiled for {self.max_context} including"
                " the answer: shorten the prompt, or compile with a larger max_context"
            )
        if len(token_ids) + params.min_tokens > self.max_context:
            raise InvalidInput(
                f"{len(token_ids)} prompt tokens and min_tokens={params.min_tokens} exceed the {self.max_context}"
                " tokens that the model was compiled for"
            )

    def _check_drawable(self, token_ids: list[int], params: SamplingParams) -> None:
        """Check that every prompt token has a logit, if prompt logprobs or penalties need it."""
        beyond = next((token for token in token_ids if token >= self.num_logits), None)
        if beyond is not None and (params.prompt_logprobs is not None or params.penalized):
            raise InvalidInput(
                f"prompt_logprobs or penalties of a prompt with token {beyond}: the model has logits for ids below"
                f" {self.num_logits} only"
            )

    def _follow_end_tokens(self) -> GrammarCompiler:
        """Return the grammar compiler for the model's current end tokens."""
        listed = tuple(self._end_tokens())
        if listed != self._listed:
            drawable = [token for token in listed if 0 <= token < self.num_logits]
            if len(drawable) < len(listed):
                logger.warning(
                    "the model's eos_token_id %s holds ids that it cannot draw (it draws 0 to %d): they are ignored",
                    list(listed),
                    self.num_logits - 1,
                )
            self._grammars, self._listed = GrammarCompiler(self.tokenizer, self.num_logits, drawable), listed
        return self._grammars

    def _checked(self, params: SamplingParams, eos_token_ids: SequenceOf[int]) -> tuple[BadWords, SamplingParams]:
        """Return the bad words of two or more tokens, and a private, revalidated copy of the parameters.

        The copy's stop tokens include the model's end tokens.
        """
        bad_words, forbidden = self._bad_words(params)
        given = {entry.name: getattr(params, entry.name) for entry in fields(SamplingParams)}
        ends = () if params.ignore_eos else eos_token_ids
        given["stop_token_ids"] = tuple(dict.fromkeys((*params.stop_token_ids, *ends)))
        if forbidden:
            given["logit_bias"] = (params.logit_bias or {}) | dict.fromkeys(forbidden, -math.inf)
        for name in LOGPROBS:
            given[name] = self.num_logits if given[name] == -1 else given[name]
        return bad_words, SamplingParams(**given)


def _adapted_salt(cache_salt: str, adapter: Adapter | None) -> str:
    """Return a cache salt per adapter, so that requests with different adapters share no cached prefix."""
    if adapter is None:
        return cache_salt and f":{cache_salt}"
    return f"{adapter.digest}:{cache_salt}"


def warn_of_end_tokens(tokenizer: Any, num_logits: int, ends: SequenceOf[int]) -> None:
    """Warn once of end tokens of the tokenizer that do not end the model's answers, as in transformers."""
    for name in ("eos_token", "eot_token"):
        token_id = getattr(tokenizer, f"{name}_id", None)
        if isinstance(token_id, int) and token_id < num_logits and token_id not in ends:
            _warn_of_end(f"{name} {getattr(tokenizer, name)!r}", token_id, tuple(ends))


@functools.cache
def _warn_of_end(token: str, token_id: int, ends: tuple[int, ...]) -> None:
    logger.warning(
        "the tokenizer's %s (token %d) is not among the model's end tokens %s: answers continue after it. Add it to"
        " generation_config.eos_token_id, or pass stop_token_ids=[%d]",
        token,
        token_id,
        list(ends),
        token_id,
    )


class _ModelLimits(Protocol):
    """Limits of a model."""

    max_context: int
    vocab_size: int
    num_logits: int


def _resumed_samples(
    resume: Any, params: SamplingParams, num_prompt_tokens: int, limits: _ModelLimits
) -> dict[int, list[int]]:
    """Return the samples to serve, by index, each with the tokens that it has drawn before.

    Args:
        resume: drawn tokens by sample index; an empty list for a sample that has not begun. Other samples are not
            served.

    Raises:
        InvalidInput: no sample is given, an index is out of range, a sample has already ended, a token cannot be drawn
            by the model, or random sampling lacks a seed.
    """
    if not isinstance(resume, Mapping) or not resume:
        raise InvalidInput(f"resume {shown(resume)} is {kind(resume)}: give a non-empty dict of sample: drawn tokens")
    if params.seed is None and not params.greedy:
        raise InvalidInput("resume: a sampled request needs its original seed: set params.seed to the output's seed")
    samples: dict[int, list[int]] = {}
    for key, value in resume.items():
        index = whole_number(key, "resume: sample")
        if not 0 <= index < params.n or index in samples:
            raise InvalidInput(f"resume names sample {index}: give each of 0 to {params.n - 1} at most once")
        samples[index] = _drawn(index, value, params, num_prompt_tokens, limits)
    return dict(sorted(samples.items()))


def _drawn(index: int, value: Any, params: SamplingParams, num_prompt_tokens: int, limits: _ModelLimits) -> list[int]:
    """Return the checked tokens of one sample."""
    tokens = token_list(value, f"resume: the tokens of sample {index}")
    most = min(limits.vocab_size, limits.num_logits)
    wrong = next((token for token in tokens if not 0 <= token < most), None)
    if wrong is not None:
        raise InvalidInput(f"resume: sample {index} holds token {wrong}; the model draws 0 to {most - 1}")
    ends = frozenset(params.stop_token_ids)
    end = next((token for token in tokens if token in ends), None)
    room = limits.max_context - num_prompt_tokens
    length = room if params.max_tokens is None else min(room, params.max_tokens)
    if end is not None or len(tokens) >= length:
        why = f"at token {end}" if end is not None else f"after {len(tokens)} tokens, of {length} at most"
        raise InvalidInput(f"resume: sample {index} has already ended {why}: resume only unfinished samples")
    return tokens
