"""Request bodies of POST /v1/messages and /v1/messages/count_tokens, and their translation to chat requests."""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from detcompile.serving.http_errors import HTTPError
from detcompile.serving.openai.fields import COUNTED, MessageFields, require_served
from detcompile.serving.openai.schema import (
    CacheSalt,
    CalledFunction,
    ChatRequest,
    FunctionName,
    FunctionSpec,
    JSONSchema,
    Message,
    NamedFunction,
    NamedTool,
    Part,
    ResponseFormat,
    Tool,
    ToolCall,
    ToolChoice,
)


class Block(msgspec.Struct, kw_only=True):
    """A content block: text, thinking, a tool call, or a tool's result."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list["Block"] | None = None


class InputMessage(msgspec.Struct, kw_only=True):
    """One message of a conversation."""

    role: Literal["user", "assistant"]
    content: str | list[Block]


class InputTool(msgspec.Struct, kw_only=True):
    """A tool that the client runs; ``input_schema`` is the JSON schema of its arguments."""

    name: FunctionName
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class InputToolChoice(msgspec.Struct, kw_only=True):
    """Which tool may or must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(JSONSchema, kw_only=True):
    """A JSON schema that the text must match."""

    type: Literal["json_schema"]


class OutputConfig(msgspec.Struct, kw_only=True):
    """Output settings."""

    format: OutputFormat | None = None
    effort: str | None = None


class ThinkingConfig(msgspec.Struct, kw_only=True):
    """Whether the model thinks before it answers; "adaptive" leaves it to the chat template and the model."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=0)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class CountTokensRequest(MessageFields, kw_only=True):
    """Body of POST /v1/messages/count_tokens."""

    messages: Annotated[list[InputMessage], Meta(min_length=1)]
    model: str | None = None
    system: str | list[Block] | None = None
    tools: list[InputTool] | None = None
    tool_choice: InputToolChoice | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    thinking: ThinkingConfig | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """Body of POST /v1/messages. Fields that Anthropic does not have mean the same as in a chat request."""

    max_tokens: Annotated[int, Meta(ge=1)]
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    min_p: float | None = None
    priority: Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)] | None = None
    cache_salt: CacheSalt | None = None
    receipt: bool | None = None


SAME_AS_CHAT = ("temperature", "top_p", "top_k", "seed", "min_p", "priority", "cache_salt")


def chat_request(request: CountTokensRequest) -> ChatRequest:
    """Translate a request to a chat request.

    Raises:
        HTTPError: names a field or block that is not supported.
    """
    require_served(request, None if isinstance(request, MessagesRequest) else COUNTED)
    if request.output_config is not None and request.output_config.effort not in (None, "high"):
        message = "output_config.effort is not supported: omit it"
        raise HTTPError(400, message, param="output_config.effort", code="unsupported_parameter")
    if request.messages[-1].role == "assistant":
        message = "the last message must have the role user: continuing an assistant message is not supported"
        raise HTTPError(400, f"messages: {message}", param="messages")
    chat = ChatRequest(model=request.model, messages=list(_messages(request)), tool_choice=_choice(request.tool_choice))
    chat.chat_template_kwargs, chat.enable_thinking = request.chat_template_kwargs, request.enable_thinking
    if request.thinking is not None and request.thinking.type != "adaptive":
        on = request.thinking.type == "enabled"
        chat.chat_template_kwargs = {"enable_thinking": on, "thinking": on} | (request.chat_template_kwargs or {})
    if request.thinking is not None:
        _require_thinking(request.thinking)
        chat.thinking_token_budget = request.thinking.budget_tokens
    chat.tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(request.tools or ())]
    if request.output_config is not None and request.output_config.format is not None:
        chat.response_format = ResponseFormat(type="json_schema", json_schema=request.output_config.format)
    if request.tool_choice is not None and request.tool_choice.disable_parallel_tool_use is not None:
        chat.parallel_tool_calls = not request.tool_choice.disable_parallel_tool_use
    if isinstance(request, MessagesRequest):
        chat.max_completion_tokens, chat.stop = request.max_tokens, request.stop_sequences
        for name in SAME_AS_CHAT:
            setattr(chat, name, getattr(request, name))
    return chat


def _require_thinking(thinking: ThinkingConfig) -> None:
    if thinking.display not in (None, "summarized"):
        param = "thinking.display"
        raise HTTPError(400, f"{param} is not supported: omit it", param=param, code="unsupported_parameter")
    if thinking.budget_tokens is not None and thinking.type != "enabled":
        message = f'requires the type "enabled", not "{thinking.type}"'
        raise HTTPError(400, f"thinking.budget_tokens {message}", param="thinking.budget_tokens")


def _messages(request: CountTokensRequest) -> Iterator[Message]:
    if request.system is not None:
        yield Message(role="system", content=_text(request.system, "system"))
    for index, message in enumerate(request.messages):
        if isinstance(message.content, str):
            yield Message(role=message.role, content=message.content)
        else:
            yield from _turn(message.role, message.content, f"messages[{index}].content")


def _turn(role: str, blocks: list[Block], where: str) -> list[Message]:
    """Return a turn as chat messages: one for its text and calls, and one for each tool result, in order."""
    messages: list[Message] = []
    for index, block in enumerate(blocks):
        path = f"{where}[{index}]"
        if block.type == "tool_result" and role == "user":
            call = _needed(block.tool_use_id, f"{path}.tool_use_id")
            result = _text(block.content or "", f"{path}.content")
            messages.append(Message(role="tool", tool_call_id=call, content=result))
            continue
        if not messages or messages[-1].role != role:
            messages.append(Message(role=role, content=[]))
        if block.type == "thinking" and role == "assistant":
            thinking = _needed(block.thinking, f"{path}.thinking")
            before = messages[-1].reasoning_content
            messages[-1].reasoning_content = thinking if before is None else f"{before}\n{thinking}"
        elif block.type == "tool_use" and role == "assistant":
            arguments = json.dumps(block.input or {}, ensure_ascii=False)
            function = CalledFunction(name=_needed(block.name, f"{path}.name"), arguments=arguments)
            made = ToolCall(id=_needed(block.id, f"{path}.id"), function=function)
            messages[-1].tool_calls = messages[-1].tool_calls or []
            messages[-1].tool_calls.append(made)
        else:
            assert isinstance(messages[-1].content, list)
            messages[-1].content.append(Part(type="text", text=_text([block], where, index)))
    if not messages:
        raise HTTPError(400, f"{where} is empty: give at least one block", param=where)
    return messages


def _text(content: str | list[Block], where: str, first: int = 0) -> str:
    """Return the text of text blocks; ``first`` is the index of the first block in ``where``."""
    if isinstance(content, str):
        return content
    for index, block in enumerate(content, first):
        if block.type != "text":
            path = f"{where}[{index}]"
            raise HTTPError(400, f"{path}: blocks of type {block.type[:40]!r} are not supported here", param=path)
    return "\n".join(_needed(block.text, f"{where}[{index}].text") for index, block in enumerate(content, first))


def _needed(value: str | None, where: str) -> str:
    if value is None:
        raise HTTPError(400, f"{where} is missing", param=where)
    return value


def _tool(tool: InputTool, where: str) -> Tool:
    if tool.type not in (None, "custom"):
        message = f"tools of type {tool.type[:40]!r} are not supported, only tools that the client runs"
        raise HTTPError(400, f"{where}: {message}", param=where, code="unsupported_parameter")
    if tool.input_schema is None:
        raise HTTPError(400, f"{where}.input_schema is missing", param=f"{where}.input_schema")
    function = FunctionSpec(name=tool.name, description=tool.description, parameters=tool.input_schema)
    function.strict = tool.strict
    return Tool(function=function)


def _choice(choice: InputToolChoice | None) -> ToolChoice | None:
    if choice is None:
        return None
    if choice.type == "tool":
        return NamedTool(function=NamedFunction(name=_needed(choice.name, "tool_choice.name")))
    return "required" if choice.type == "any" else choice.type
