"""Reply: OpenAI's answer to a request, in one piece or as a stream, of the answers that the engine makes."""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from detcompile.serving.engines.answers import Answer, AnswerSample, progress
from detcompile.serving.engines.protocol import Token
from detcompile.serving.openai.schema import StreamOptions
from detcompile.serving.responses import event
from detcompile.serving.service import Service
from detcompile.serving.texts import SampleText

__all__ = ["Reply", "as_int64"]

NOTHING: Mapping[str, Any] = MappingProxyType({})


class Reply(ABC):
    """The choices of a request: n for each of its prompts, in the order of the prompts. Subclasses shape them.

    Args:
        answers: one for each prompt.
        stream_options: what a stream has beside its tokens.
        with_ids: also tell the token ids of the prompt and of each choice.
        with_receipt: also give the receipt, in a stream as its last choice-less chunk but the one of usage.
        template: sha256 of the chat template that made the prompt.
        hidden: the tokens drawn are shown to nobody.
    """

    kind = ""  # of the whole
    chunk_kind = ""
    prefix = ""

    def __init__(
        self,
        service: Service,
        answers: Sequence[Answer],
        *,
        stream_options: StreamOptions | None = None,
        with_ids: bool = False,
        with_receipt: bool = False,
        template: str | None = None,
        hidden: bool = False,
    ) -> None:
        self.texts = service.texts
        self._service = service
        self._with_receipt = with_receipt
        self._template = template
        self._answers = answers
        self._include_usage = stream_options is not None and stream_options.include_usage
        self._with_ids = with_ids
        self._hidden = hidden
        self._whole = True
        self.seed = as_int64(answers[0].params.seed or 0)
        self._head: dict[str, Any] = {
            "id": self.prefix + secrets.token_hex(12),
            "created": int(time.time()),
            "model": service.name,
            "system_fingerprint": service.hello.fingerprint,
            "seed": self.seed,
        }
        for answer in answers:
            answer.name = str(self._head["id"])
        self._salt = service.receipts.salt()
        self.headers = {"X-Request-Id": self._head["id"], "X-Detcompile-Seed": str(self.seed)}
        if self._salt is not None:
            self.headers["X-Detcompile-Receipt-Salt"] = self._salt.hex()

    def whole(self) -> dict[str, Any]:
        """The answer in one piece; every answer has ended."""
        choices: list[dict[str, Any]] = []
        for answer in self._answers:
            for sample in answer.samples:
                text, read = SampleText(self.texts, answer.params, sample).take()
                choices.append(self._choice(len(choices), answer, sample, text, read))
        found = {"object": self.kind, **self._head, "choices": choices, "usage": self._usage()}
        return found | self._receipt()

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as it comes: what is new of all choices at a time, as events.

        Raises:
            DetcompileError: an answer's error.
        """
        self._whole = False
        places = [(answer, sample) for answer in self._answers for sample in answer.samples]
        texts = [SampleText(self.texts, answer.params, sample) for answer, sample in places]
        over = [False] * len(places)
        async for _ in progress(self._answers):
            parts: list[bytes] = []
            for index, (answer, sample) in enumerate(places):
                if over[index] or (not sample.token_ids and sample.finish_reason is None):
                    continue
                if texts[index].num_read == 0:
                    parts += [self._chunk([opening]) for opening in self._opening(index)]
                before = texts[index].num_read
                text, read = texts[index].take()
                over[index] = sample.finish_reason is not None
                tokens_show = self._with_ids or sample.logprobs is not None
                if over[index] or text or before == 0 or (tokens_show and read.start < read.stop):
                    parts.append(self._chunk([self._choice(index, answer, sample, text, read)]))
            if parts:
                yield b"".join(parts)
        receipt = self._receipt()
        if receipt:
            yield self._chunk([], None, receipt)
        if self._include_usage:
            yield self._chunk([], self._usage())

    def _choice(self, index: int, answer: Answer, sample: AnswerSample, text: str, read: slice) -> dict[str, Any]:
        """A choice, or what is new of it: the tokens ``read``, and the text that they complete."""
        reason, stop = sample.finish_reason, sample.stop_reason
        if self._hidden:
            text, read, reason, stop = "", slice(read.start, read.start), reason and "length", None
        logprobs = None if sample.logprobs is None else sample.logprobs[read]
        choice = {
            "index": index,
            **self._content(index, answer, text, logprobs, first=read.start == 0, last=reason is not None),
            "finish_reason": self._reason(index, reason),
        }
        if reason is not None:
            choice["stop_reason"] = stop
        if self._with_ids:
            choice["token_ids"] = sample.token_ids[read]
            if read.start == 0:
                choice["prompt_token_ids"] = answer.prompt_ids
        return choice

    def _opening(self, index: int) -> list[dict[str, Any]]:
        """What a stream says of a choice before its first token."""
        return []

    @abstractmethod
    def _content(
        self, index: int, answer: Answer, text: str, logprobs: list[Token] | None, *, first: bool, last: bool
    ) -> dict[str, Any]:
        """The fields of a choice that hold its text and logprobs."""

    def _reason(self, index: int, reason: str | None) -> str | None:
        """Why a choice has ended, as clients are told it."""
        return reason

    def _receipt(self) -> dict[str, Any]:
        """Make the receipt, and name it in the headers; with its envelope for the body, where it was asked for.

        Raises:
            StorageError: the log cannot be written.
        """
        service, head = self._service, self._head
        name = (str(head["id"]), int(head["created"]), service.name)
        issued = service.receipts.issue(
            name, self._answers, service.hello, self.texts, template=self._template, salt=self._salt
        )
        if issued is None:
            return {}
        self.headers["X-Detcompile-Receipt"] = issued.digest
        return {"receipt": issued.envelope} if self._with_receipt else {}

    def _chunk(
        self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None, more: Mapping[str, Any] = NOTHING
    ) -> bytes:
        chunk = {"object": self.chunk_kind, **self._head, "choices": choices, **more}
        return event(chunk | {"usage": usage} if self._include_usage else chunk)

    def _usage(self) -> dict[str, Any]:
        num_prompt = sum(len(answer.prompt_ids) for answer in self._answers)
        num_drawn = 0 if self._hidden else sum(answer.num_tokens for answer in self._answers)
        cached = sum(answer.num_cached_tokens for answer in self._answers)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_drawn,
            "total_tokens": num_prompt + num_drawn,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def as_int64(seed: int) -> int:
    """A seed as OpenAI's schema has it, signed; sent again, it is the same seed."""
    return seed - (1 << 64) if seed >= 1 << 63 else seed
