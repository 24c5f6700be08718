"""POST /v1/chat/completions: conversations, rendered by the model's chat template."""

import functools
from typing import Any

from starlette.responses import Response

from detcompile.reasoning.formats import thinking_of
from detcompile.serving.engines.answers import Answer
from detcompile.serving.engines.protocol import Token
from detcompile.serving.journal.job import Ask
from detcompile.serving.journal.jobs import Call
from detcompile.serving.openai.fields import require_served
from detcompile.serving.openai.messages import prompt_of, template_of, template_variables
from detcompile.serving.openai.parameters import chat_params, with_reasoning
from detcompile.serving.openai.reply import Reply, chat_entry
from detcompile.serving.openai.schema import ChatRequest, ChatTokensRequest
from detcompile.serving.openai.tools import AnswerParts, ToolUse, recorded_use, tool_use
from detcompile.serving.reasoning import num_reasoning_tokens
from detcompile.serving.responses import Events, Whole
from detcompile.serving.service import Service


async def chat(service: Service, request: ChatRequest, call: Call) -> Response:
    """Answer a request.

    Raises:
        HTTPError: the request cannot be served.
        InvalidInput: the chat template rejects the messages.
    """
    service.require_generation(request.receipt)
    require_served(request)
    job = await service.jobs.job(call, functools.partial(ask_chat, service, request, call.owner))
    reply = ChatReply(
        service,
        job,
        stream_options=request.stream_options,
        with_ids=bool(request.return_token_ids),
        with_prompt_logprobs=request.prompt_logprobs is not None,
        with_receipt=bool(request.receipt),
        last_event=call.last_event,
    )
    reply.use = recorded_use(job.ask.family, request.tool_choice)
    reply.shows_reasoning = request.include_reasoning is not False
    if request.stream:
        return Events(job.answers, call.reservation, reply.headers, reply.events())
    return Whole(job.answers, call.reservation, reply.headers, reply.whole)


async def ask_chat(
    service: Service, request: ChatRequest, owner: str, prefix: str = "chatcmpl-", param: str = "messages"
) -> Ask:
    """Return a request's work for the engines.

    Args:
        owner: sha256 of the request's API key.
        prefix: prefix of the answer's id.
        param: the field with the messages, for errors.

    Raises:
        HTTPError: the request cannot be served.
        InvalidInput: the chat template rejects the messages.
    """
    adapter = service.adapter_of(request.model)
    use = tool_use(service, request.tools, request.tool_choice, request.parallel_tool_calls)
    params = chat_params(request, service.hello.default_params, use)
    service.limiter.require(owner, params.n)
    tools = () if use is None else use.tools
    template = None
    if isinstance(request, ChatTokensRequest):
        prompt = request.tokens
        service.texts.require_answer(prompt, "tokens")
    else:
        template = template_of(service, tools).digest
        special = bool(request.add_special_tokens)
        variables = template_variables(request)
        prompt = await prompt_of(
            service, request.messages, tools, variables=variables, param=param, owner=owner, add_special_tokens=special
        )
    family = None if use is None else use.family.name
    salt = request.cache_salt or ""
    thinking = thinking_of(service.reasoning_parser, service.texts.decode, prompt)
    params = with_reasoning(params, service, thinking, use, request.thinking_token_budget)
    priority = request.priority or 0
    rest = {"family": family, "cache_salt": salt, "thinking": thinking, "adapter": adapter}
    return Ask([prompt], params, priority, prefix, template, **rest)  # type: ignore[arg-type]


async def count_chat(service: Service, request: ChatRequest, owner: str, param: str = "messages") -> int:
    """Return the number of tokens in a request's prompt; arguments and errors as ``ask_chat``'s."""
    use = tool_use(service, request.tools, request.tool_choice, request.parallel_tool_calls)
    tools, variables = () if use is None else use.tools, template_variables(request)
    return len(
        await prompt_of(service, request.messages, tools, variables=variables, counts=True, param=param, owner=owner)
    )


class ChatReply(Reply):
    """Choices with messages, or streamed deltas of them."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    one_prompt = True
    use: ToolUse | None = None
    shows_reasoning = True

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._thinking = self._job.ask.thinking
        self._parts: dict[int, AnswerParts] = {}  # by index of the choice

    def _opening(self, index: int) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]

    def _content(
        self, index: int, answer: Answer, text: str, logprobs: list[Token] | None, *, first: bool, last: bool
    ) -> dict[str, Any]:
        if index not in self._parts:
            self._parts[index] = AnswerParts(self._thinking, self.use, f"{self._job.name}/{index}")
        reasoning, text, calls = self._parts[index].read(text, last=last)
        shown: dict[str, Any] = {}
        if self._thinking is not None and self.shows_reasoning and (reasoning or self._whole):
            shown = {"reasoning": reasoning or None, "reasoning_content": reasoning or None}
        content = None if logprobs is None else [chat_entry(self.texts, entry) for entry in logprobs]
        logprobs_field = None if content is None else {"content": content, "refusal": None}
        if not self._whole:
            delta = shown | ({"content": text} if text else {}) | ({"tool_calls": calls} if calls else {})
            return {"delta": delta, "logprobs": logprobs_field}
        content_field = text if self._thinking is None else text or None
        message: dict[str, Any] = {"role": "assistant", "content": content_field, "refusal": None, **shown}
        if calls:
            for call in calls:
                del call["index"]  # only deltas have it
            message |= {"content": text or None, "tool_calls": calls}
        return {"message": message, "logprobs": logprobs_field}

    def _reason(self, index: int, reason: str | None) -> str | None:
        return self._parts[index].reason(reason)

    async def _completion_details(self) -> dict[str, int]:
        if self._thinking is None:
            return {}
        return {"reasoning_tokens": await num_reasoning_tokens(self.texts, self._answers, self._thinking)}
