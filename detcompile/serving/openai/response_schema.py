"""Request bodies of POST /v1/responses, and their translation to chat requests."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from detcompile.serving.http_errors import HTTPError
from detcompile.serving.openai.fields import ResponseFields, require_served
from detcompile.serving.openai.schema import (
    CacheSalt,
    CalledFunction,
    ChatRequest,
    Effort,
    FunctionName,
    FunctionSpec,
    JSONSchema,
    Message,
    NamedFunction,
    NamedTool,
    Part,
    ResponseFormat,
    TokenId,
    Tool,
    ToolCall,
    ToolChoice,
)

LOGPROBS = "message.output_text.logprobs"

Metadata = Annotated[  # OpenAI's bounds; a response repeats it in its events
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]


class InputItem(msgspec.Struct, kw_only=True):
    """A message, reasoning, a function call, or a function's result."""

    type: str = "message"
    role: str | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None
    summary: list[Part] | None = None
    encrypted_content: str | None = None


class ResponseTool(msgspec.Struct, kw_only=True):
    """A function that the model may call; other tools are not supported."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenTool(msgspec.Struct, kw_only=True):
    """The function that must be called."""

    type: Literal["function"]
    name: str


class TextFormat(msgspec.Struct, kw_only=True):
    """A constraint on the text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    schema: dict[str, Any] | None = None
    name: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, kw_only=True):
    """Text settings."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningConfig(msgspec.Struct, kw_only=True):
    """Reasoning settings; models return their whole reasoning, whatever summary is asked for."""

    effort: Effort | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(ResponseFields, kw_only=True):
    """Body of POST /v1/responses. Fields that OpenAI does not have are vLLM's."""

    input: str | list[InputItem]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    store: bool | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    safety_identifier: Annotated[str, Meta(max_length=512)] | None = None
    prompt_cache_key: Annotated[str, Meta(max_length=512)] | None = None
    include: list[str] | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    max_output_tokens: int | None = None
    reasoning: ReasoningConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    thinking_token_budget: Annotated[int, Meta(ge=0)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    seed: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    logit_bias: dict[str, float] | None = None
    priority: Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)] | None = None
    cache_salt: CacheSalt | None = None
    receipt: bool | None = None


SAME_AS_CHAT = (
    "model", "parallel_tool_calls", "temperature", "top_p", "seed", "top_k", "min_p", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "min_tokens", "ignore_eos", "stop", "stop_token_ids", "logit_bias",
    "priority", "cache_salt", "chat_template_kwargs", "enable_thinking", "thinking_token_budget",
)  # fmt: skip


def chat_request(request: ResponsesRequest, before: list[Message]) -> ChatRequest:
    """Translate a request to a chat request.

    Args:
        before: earlier messages of the conversation.

    Raises:
        HTTPError: names a field or item that is not supported.
    """
    require_served(request)
    if request.text is not None and request.text.verbosity not in (None, "medium"):
        message = "text.verbosity is not supported: omit it"
        raise HTTPError(400, message, param="text.verbosity", code="unsupported_parameter")
    first = [] if request.instructions is None else [Message(role="system", content=request.instructions)]
    messages = [*first, *before, *messages_of(request.input)]
    if not messages:
        raise HTTPError(400, "input is empty: give at least one message", param="input")
    logprobs = LOGPROBS in (request.include or ()) or bool(request.top_logprobs)
    return ChatRequest(
        messages=messages,
        tools=None if request.tools is None else [_tool(tool) for tool in request.tools],
        tool_choice=_choice(request.tool_choice),
        response_format=_format(request.text),
        reasoning_effort=None if request.reasoning is None else request.reasoning.effort,
        max_completion_tokens=request.max_output_tokens,
        logprobs=logprobs,
        top_logprobs=request.top_logprobs if logprobs else None,
        **{name: getattr(request, name) for name in SAME_AS_CHAT},
    )


def messages_of(items: str | list[InputItem]) -> list[Message]:
    """Return items as chat messages; calls join the preceding assistant message, reasoning the following one.

    Raises:
        HTTPError: an item is not supported or incomplete.
    """
    if isinstance(items, str):
        return [Message(role="user", content=items)]
    messages: list[Message] = []
    reasoning: str | None = None  # of the next assistant message
    for place, item in enumerate(items):
        where = f"input[{place}]"
        if item.type == "message":
            role = _needed(item.role, f"{where}.role")
            messages.append(Message(role=role, content=_content(item.content, where)))
        elif item.type == "reasoning":
            reasoning = "\n".join([*([] if reasoning is None else [reasoning]), _reasoning(item, where)])
            continue
        elif item.type == "function_call":
            name, call = _needed(item.name, f"{where}.name"), _needed(item.call_id, f"{where}.call_id")
            if not messages or messages[-1].role != "assistant" or reasoning is not None:
                messages.append(Message(role="assistant", content=""))
            made = ToolCall(id=call, function=CalledFunction(name=name, arguments=item.arguments or "{}"))
            messages[-1].tool_calls = messages[-1].tool_calls or []
            messages[-1].tool_calls.append(made)
        elif item.type == "function_call_output":
            call = _needed(item.call_id, f"{where}.call_id")
            messages.append(Message(role="tool", tool_call_id=call, content=_content(item.output, where)))
        else:
            raise HTTPError(400, f"{where}: items of type {item.type[:40]!r} are not supported", param=where)
        if messages[-1].role == "assistant" and reasoning is not None:
            messages[-1].reasoning_content = reasoning
        reasoning = None
    return messages


def _content(content: str | list[Part] | None, where: str) -> str:
    if not isinstance(content, list):
        return content or ""
    for index, part in enumerate(content):
        if part.type not in ("input_text", "output_text", "text") or part.text is None:
            path = f"{where}.content[{index}]"
            raise HTTPError(400, f"{path}: parts of type {part.type[:40]!r} are not supported, only text", param=path)
    return "\n".join(part.text or "" for part in content)


def _reasoning(item: InputItem, where: str) -> str:
    """Return the text of reasoning: its content, or without one its summary."""
    if item.encrypted_content is not None:
        param = f"{where}.encrypted_content"
        raise HTTPError(400, f"{param} is not supported: omit it", param=param, code="unsupported_parameter")
    parts = item.content if isinstance(item.content, list) else []
    for index, part in enumerate(parts := parts or item.summary or []):
        if part.type not in ("reasoning_text", "summary_text") or part.text is None:
            path = f"{where}.content[{index}]"
            raise HTTPError(400, f"{path}: parts of type {part.type[:40]!r} are not supported here", param=path)
    return "\n".join(part.text or "" for part in parts)


def _needed(value: str | None, where: str) -> str:
    if value is None:
        raise HTTPError(400, f"{where} is missing", param=where)
    return value


def _tool(tool: ResponseTool) -> Tool:
    options = {"description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
    return Tool(function=FunctionSpec(name=tool.name, **options))  # type: ignore[arg-type]


def _choice(choice: str | ChosenTool | None) -> ToolChoice | None:
    if isinstance(choice, ChosenTool):
        return NamedTool(function=NamedFunction(name=choice.name))
    return choice  # type: ignore[return-value]


def _format(text: TextConfig | None) -> ResponseFormat | None:
    if text is None or text.format is None:
        return None
    form = text.format
    if form.type == "json_schema" and form.schema is None:
        raise HTTPError(400, "text.format.schema is missing", param="text.format.schema")
    if form.type != "json_schema" and form.schema is not None:
        message = f"text.format.schema requires type json_schema; type is {form.type}"
        raise HTTPError(400, message, param="text.format.schema")
    schema = None if form.schema is None else JSONSchema(schema=form.schema, name=form.name, strict=form.strict)
    return ResponseFormat(type=form.type, json_schema=schema)
