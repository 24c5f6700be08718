"""Bodies of POST /v1/messages and /v1/messages/count_tokens, and what they come to: a chat request."""

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

__all__ = ["CountTokensRequest", "MessagesRequest", "chat_request"]


class Block(msgspec.Struct, kw_only=True):
    """A block of content: text, a call of a tool, or what a call gave."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list["Block"] | None = None


class InputMessage(msgspec.Struct, kw_only=True):
    """One turn of a conversation."""

    role: Literal["user", "assistant"]
    content: str | list[Block]


class InputTool(msgspec.Struct, kw_only=True):
    """A tool that the client runs; ``input_schema`` is the JSON schema of its input."""

    name: FunctionName
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class InputToolChoice(msgspec.Struct, kw_only=True):
    """Whether a tool may or must be called, or which one must."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(JSONSchema, kw_only=True):
    """What the text has to be."""

    type: Literal["json_schema"]


class OutputConfig(msgspec.Struct, kw_only=True):
    """Settings of the text."""

    format: OutputFormat | None = None
    effort: str | None = None


class CountTokensRequest(MessageFields, kw_only=True):
    """POST /v1/messages/count_tokens."""

    messages: Annotated[list[InputMessage], Meta(min_length=1)]
    model: str | None = None
    system: str | list[Block] | None = None
    tools: list[InputTool] | None = None
    tool_choice: InputToolChoice | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """POST /v1/messages. Fields beside Anthropic's are those of chats."""

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


SAME = ("temperature", "top_p", "top_k", "seed", "min_p", "priority", "cache_salt")


def chat_request(asked: CountTokensRequest) -> ChatRequest:
    """The same request as a chat's.

    Raises:
        HTTPError: a field or a block that is not served, by its name.
    """
    require_served(asked, None if isinstance(asked, MessagesRequest) else COUNTED)
    if asked.output_config is not None and asked.output_config.effort not in (None, "high"):
        said = "output_config.effort is not served: leave it out"
        raise HTTPError(400, said, param="output_config.effort", code="unsupported_parameter")
    if asked.messages[-1].role == "assistant":
        said = "the last one must be the user's: answers that go on with a beginning are not served"
        raise HTTPError(400, f"messages: {said}", param="messages")
    chat = ChatRequest(model=asked.model, messages=list(_messages(asked)), tool_choice=_choice(asked.tool_choice))
    chat.tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(asked.tools or ())]
    if asked.output_config is not None and asked.output_config.format is not None:
        chat.response_format = ResponseFormat(type="json_schema", json_schema=asked.output_config.format)
    if asked.tool_choice is not None and asked.tool_choice.disable_parallel_tool_use is not None:
        chat.parallel_tool_calls = not asked.tool_choice.disable_parallel_tool_use
    if isinstance(asked, MessagesRequest):
        chat.max_completion_tokens, chat.stop = asked.max_tokens, asked.stop_sequences
        for name in SAME:
            setattr(chat, name, getattr(asked, name))
    return chat


def _messages(asked: CountTokensRequest) -> Iterator[Message]:
    if asked.system is not None:
        yield Message(role="system", content=_text(asked.system, "system"))
    for index, message in enumerate(asked.messages):
        if isinstance(message.content, str):
            yield Message(role=message.role, content=message.content)
        else:
            yield from _turn(message.role, message.content, f"messages[{index}].content")


def _turn(role: str, blocks: list[Block], where: str) -> list[Message]:
    """A message of what a turn says and calls, and one of each thing that a call gave, in their order."""
    found: list[Message] = []
    for index, block in enumerate(blocks):
        own = f"{where}[{index}]"
        if block.type == "tool_result" and role == "user":
            call = _needed(block.tool_use_id, f"{own}.tool_use_id")
            found.append(Message(role="tool", tool_call_id=call, content=_text(block.content or "", f"{own}.content")))
            continue
        if not found or found[-1].role != role:
            found.append(Message(role=role, content=[]))
        if block.type == "tool_use" and role == "assistant":
            arguments = json.dumps(block.input or {}, ensure_ascii=False)
            function = CalledFunction(name=_needed(block.name, f"{own}.name"), arguments=arguments)
            made = ToolCall(id=_needed(block.id, f"{own}.id"), function=function)
            found[-1].tool_calls = found[-1].tool_calls or []
            found[-1].tool_calls.append(made)
        else:
            assert isinstance(found[-1].content, list)
            found[-1].content.append(Part(type="text", text=_text([block], where, index)))
    if not found:
        raise HTTPError(400, f"{where} holds no block", param=where)
    return found


def _text(content: str | list[Block], where: str, first: int = 0) -> str:
    """The text of blocks of nothing else; ``first`` is the place of the first one in ``where``."""
    if isinstance(content, str):
        return content
    for index, block in enumerate(content, first):
        if block.type != "text":
            own = f"{where}[{index}]"
            raise HTTPError(400, f"{own}: blocks of type {block.type[:40]!r} are not served here", param=own)
    return "\n".join(_needed(block.text, f"{where}[{index}].text") for index, block in enumerate(content, first))


def _needed(value: str | None, where: str) -> str:
    if value is None:
        raise HTTPError(400, f"{where} is missing", param=where)
    return value


def _tool(tool: InputTool, where: str) -> Tool:
    if tool.type not in (None, "custom"):
        said = f"tools of type {tool.type[:40]!r} are not served, only those that the client runs"
        raise HTTPError(400, f"{where}: {said}", param=where, code="unsupported_parameter")
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
