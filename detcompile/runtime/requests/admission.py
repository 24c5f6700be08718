"""What comes into an engine, checked: prompts, parameters, and the limits of the model that serves them."""

import functools
import logging
import math
import threading
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import fields
from typing import Any

from detcompile.errors import InvalidInput
from detcompile.runtime.grammars.compiler import GrammarCompiler
from detcompile.runtime.requests.bad_words import NO_WORDS, BadWords, word_tokens
from detcompile.runtime.requests.outputs import CompletionOutput, RequestOutput
from detcompile.runtime.requests.plain_values import flag, kind, shown, string, token_list, whole_number
from detcompile.runtime.requests.prompts import Prompt, private_copy, prompts_of, read_prompt, tokenized
from detcompile.runtime.requests.request import Request
from detcompile.runtime.requests.resumption import resumed_samples
from detcompile.runtime.requests.sampling_params import SamplingParams

__all__ = ["Admission", "Prompt"]

logger = logging.getLogger(__name__)


class Admission:
    """Turns prompts into requests of one model.

    Args:
        tokenizer: a tokenizer of transformers, which is copied; None for a model that takes token ids only. If its end
            token is none of the model's, a warning says so, once in a process.
        max_context: tokens a sequence may hold.
        vocab_size: number of ids that the model can read, 0 … vocab_size - 1.
        num_logits: number of ids that it can draw, 0 … num_logits - 1; None for as many as it can read.
        end_tokens: gives the tokens that end a request, unless it ignores them. It is called for each request, as a
            model's may change. Those that the model cannot draw are left out, with a warning: no request can end with
            them.

    Raises:
        InvalidInput: a tokenizer that draws at random, or that cannot be copied.
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
        self._listed: tuple[int, ...] | None = None  # the end tokens that `_grammars` was made for
        self._follow_end_tokens()
        self._compare_end_tokens()
        self._tokenizing = threading.Lock()  # fast tokenizers refuse two borrowers

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
    ) -> Request:
        """A request that the model can serve.

        Args:
            resume: samples to go on with, and the tokens that they have drawn.
            with_text: whether anybody wants the text; stop strings are found either way.

        Raises:
            InvalidInput: what is no prompt, an empty or too long one, ids out of the vocabulary, text without a
                tokenizer or that it cannot read, parameters that this model cannot satisfy, arguments of another type.
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
        bad_words, own = self._own(params, grammars.eos_token_ids)
        return Request(
            request_id,
            text,
            token_ids,
            own,
            self.tokenizer if with_text or own.stop else None,
            arrival=arrival,
            priority=urgency,
            max_length=self.max_context,
            cache_salt=cache_salt,
            stream_text=streams,
            bad_words=bad_words,
            matcher=None if own.grammar is None else grammars.matcher(own.grammar, own.stop_token_ids),
            resume=None if resume is None else resumed_samples(resume, own, len(token_ids), self),
        )

    def asked(
        self,
        prompts: Any,
        params: SamplingParams | SequenceOf[SamplingParams] | None,
        priority: SequenceOf[int] | None = None,
    ) -> list[tuple[Any, SamplingParams | None, int]]:
        """Each prompt with its parameters and its priority, 0 where none are given.

        Raises:
            InvalidInput: neither a prompt nor a list of them, or not one params or priority a prompt.
        """
        every = prompts_of(prompts)
        urgency = [0] * len(every) if priority is None else token_list(priority, "priority")
        if len(urgency) != len(every):
            raise InvalidInput(f"{len(every)} prompts and {len(urgency)} priorities: give one each")
        if params is None or isinstance(params, SamplingParams):
            return [(prompt, params, own) for prompt, own in zip(every, urgency)]
        if not isinstance(params, SequenceOf) or isinstance(params, (str, bytes)):
            raise InvalidInput(f"params {shown(params)} is {kind(params)}: give SamplingParams, or a list")
        if len(params) != len(every):
            raise InvalidInput(f"{len(every)} prompts and {len(params)} SamplingParams: give one for all, or one each")
        return list(zip(every, params, urgency))

    def refusal(self, prompt: Any, error: InvalidInput) -> RequestOutput:
        """The output of a prompt that could not be queued."""
        try:
            text, token_ids, _ = read_prompt(prompt)
        except InvalidInput:
            text, token_ids = None, []
        refused = CompletionOutput(0, finish_reason="error")
        return RequestOutput("", text, token_ids or [], None, [refused], finished=True, error=error)

    def _read(self, prompt: Any) -> tuple[str | None, list[int], str]:
        """The prompt's text, if it has one, its tokens, and its cache_salt."""
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
        """The prompt's end, where the parameters ask for no more."""
        most = params.truncate_prompt_tokens
        if most is None:
            return token_ids
        return token_ids[-(most if most > 0 else max(1, self.max_context - max(1, params.min_tokens))) :]

    def _bad_words(self, params: SamplingParams) -> tuple[BadWords, tuple[int, ...]]:
        """Words of several tokens, and tokens that are forbidden as words of their own."""
        if params.bad_words and self.tokenizer is None:
            raise InvalidInput("bad_words are text, and this engine has no tokenizer: use bad_words_ids")
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
                f"the prompt has {len(token_ids)} tokens, and the model was compiled for {self.max_context} with the"
                " answer: shorten it, or compile with a larger max_context"
            )
        if len(token_ids) + params.min_tokens > self.max_context:
            raise InvalidInput(
                f"{len(token_ids)} prompt tokens and min_tokens={params.min_tokens} exceed the {self.max_context}"
                " tokens that the model was compiled for"
            )

    def _check_drawable(self, token_ids: list[int], params: SamplingParams) -> None:
        """Logprobs of a prompt, and penalties, need a logit for each of its tokens; a narrow head has fewer."""
        beyond = next((token for token in token_ids if token >= self.num_logits), None)
        if beyond is not None and (params.prompt_logprobs is not None or params.penalised):
            raise InvalidInput(
                f"prompt_logprobs or penalties of a prompt with token {beyond}: the model has logits for ids below"
                f" {self.num_logits} only"
            )

    def _follow_end_tokens(self) -> GrammarCompiler:
        """Return what compiles grammars, made for the model's end tokens as they are now."""
        listed = tuple(self._end_tokens())
        if listed != self._listed:
            drawable = [token for token in listed if 0 <= token < self.num_logits]
            if len(drawable) < len(listed):
                logger.warning(
                    "the model's eos_token_id %s holds ids that it cannot draw (it draws 0 to %d): they are left out",
                    list(listed),
                    self.num_logits - 1,
                )
            self._grammars, self._listed = GrammarCompiler(self.tokenizer, self.num_logits, drawable), listed
        return self._grammars

    def _compare_end_tokens(self) -> None:
        """Warn of end tokens that the tokenizer names and the model goes on behind, as transformers does."""
        for name in ("eos_token", "eot_token"):
            token_id = getattr(self.tokenizer, f"{name}_id", None)
            ends = self._grammars.eos_token_ids
            if isinstance(token_id, int) and token_id < self.num_logits and token_id not in ends:
                _warn_of_end(f"{name} {getattr(self.tokenizer, name)!r}", token_id, ends)

    def _own(self, params: SamplingParams, eos_token_ids: SequenceOf[int]) -> tuple[BadWords, SamplingParams]:
        """Words of several tokens, and a copy that nobody else changes while it is served, checked once more.

        The model's end tokens end it too.
        """
        bad_words, forbidden = self._bad_words(params)
        given = {own.name: getattr(params, own.name) for own in fields(SamplingParams)}
        ends = () if params.ignore_eos else eos_token_ids
        given["stop_token_ids"] = tuple(dict.fromkeys((*params.stop_token_ids, *ends)))
        if forbidden:
            given["logit_bias"] = (params.logit_bias or {}) | dict.fromkeys(forbidden, -math.inf)
        for name in ("logprobs", "prompt_logprobs"):
            given[name] = self.num_logits if given[name] == -1 else given[name]
        return bad_words, SamplingParams(**given)


@functools.cache
def _warn_of_end(token: str, token_id: int, ends: tuple[int, ...]) -> None:
    logger.warning(
        "the tokenizer's %s (token %d) is not among the model's end tokens %s: answers go on behind it. Add it to"
        " generation_config.eos_token_id, or pass stop_token_ids=[%d]",
        token,
        token_id,
        list(ends),
        token_id,
    )
