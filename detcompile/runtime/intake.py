"""What comes into an engine, checked: prompts, parameters, and the limits of the model that serves them."""

import operator
import threading
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Any

from detcompile.errors import InvalidInput
from detcompile.runtime.outputs import RequestOutput
from detcompile.runtime.request import Request
from detcompile.runtime.sampling_params import SamplingParams

__all__ = ["Intake", "Prompt"]

Prompt = str | SequenceOf[int]


class Intake:
    """Turns prompts into requests of one model.

    Args:
        tokenizer: of transformers; None for a model that takes token ids only.
        max_context: tokens a sequence may hold. vocab_size: ids are 0 … vocab_size - 1.
        eos_token_ids: end a request, unless it ignores them.
    """

    def __init__(
        self, tokenizer: Any | None, *, max_context: int, vocab_size: int, eos_token_ids: SequenceOf[int]
    ) -> None:
        self.tokenizer = tokenizer
        self.max_context = max_context
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
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
    ) -> Request:
        """A request that the model can serve.

        Raises:
            InvalidInput: an empty or too long prompt, ids out of the vocabulary, text without a tokenizer, parameters
                that this model cannot satisfy.
        """
        params = params or SamplingParams()
        params.check_vocabulary(self.vocab_size)
        token_ids = self._token_ids(prompt)
        self._check_length(token_ids, params)
        if params.stop and self.tokenizer is None:
            raise InvalidInput("stop strings need the text, and this engine has no tokenizer: use stop_token_ids")
        return Request(
            request_id,
            prompt if isinstance(prompt, str) else None,
            token_ids,
            params if params.ignore_eos else replace(params, stop_token_ids=self._ends(params)),
            self.tokenizer,
            arrival=arrival,
            priority=priority,
            max_length=self.max_context,
            stream_text=stream_text,
        )

    def pairs(
        self, prompts: Prompt | SequenceOf[Prompt], params: SamplingParams | SequenceOf[SamplingParams] | None
    ) -> list[tuple[Prompt, SamplingParams | None]]:
        """Each prompt with its parameters.

        Raises:
            InvalidInput: not one params a prompt.
        """
        one = isinstance(prompts, str) or (len(prompts) > 0 and _is_number(prompts[0]))
        every: list[Any] = [prompts] if one else list(prompts)
        if params is None or isinstance(params, SamplingParams):
            return [(prompt, params) for prompt in every]
        if len(params) != len(every):
            raise InvalidInput(f"{len(every)} prompts and {len(params)} SamplingParams: give one for all, or one each")
        return list(zip(every, params))

    def refusal(self, prompt: Prompt, error: InvalidInput) -> RequestOutput:
        """The output of a prompt that could not be queued."""
        text = prompt if isinstance(prompt, str) else None
        known = () if text is not None or not isinstance(prompt, SequenceOf) else prompt
        ids = [token for token in known if isinstance(token, int)]
        return RequestOutput("", text, ids, None, [], finished=True, error=error)

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidInput("this engine has no tokenizer: give token ids, or a tokenizer to engine()")
            with self._tokenizing:
                token_ids = list(self.tokenizer(prompt, verbose=False)["input_ids"])
        else:
            values = getattr(prompt, "tolist", lambda: prompt)()
            try:
                token_ids = list(map(operator.index, values))
            except TypeError as error:
                raise InvalidInput(
                    f"the prompt is neither text nor token ids, but {type(prompt).__name__}: give a string, or integers"
                ) from error
        if not token_ids:
            raise InvalidInput("the prompt is empty: it needs at least one token, such as the model's BOS token")
        bad = next((token for token in token_ids if not 0 <= token < self.vocab_size), None)
        if bad is not None:
            raise InvalidInput(f"the prompt holds token {bad}; ids are 0 to {self.vocab_size - 1}")
        return token_ids

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

    def _ends(self, params: SamplingParams) -> tuple[int, ...]:
        return tuple(dict.fromkeys((*params.stop_token_ids, *self.eos_token_ids)))


def _is_number(value: Any) -> bool:
    """Also one of numpy or torch; the rows of their matrices are none."""
    return isinstance(value, (int, float)) or getattr(value, "ndim", None) == 0
