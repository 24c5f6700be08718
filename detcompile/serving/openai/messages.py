"""Conversations: from request messages to chat-template messages and token ids."""

import asyncio
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from detcompile.errors import InvalidInput
from detcompile.serving.chat_template import MANY, ChatTemplate
from detcompile.serving.http_errors import HTTPError
from detcompile.serving.openai.schema import ChatRequest, Message, Part, TokenizeRequest, Tool
from detcompile.serving.service import Service
from detcompile.serving.tools.reader import read_json

NO_TEMPLATE = "has no chat template: use /v1/completions, or start the server with --chat-template"
ROLES = ("system", "user", "assistant", "tool")
SHOWN = ("name", "tool_call_id", "reasoning", "reasoning_content")  # message fields for templates
REASONING = ("reasoning_content", "reasoning", "thinking")  # names of a message's reasoning in templates
UNSERVED = ("audio", "function_call", "partial", "prefix")  # message fields that are rejected
RESERVED = frozenset((  # names in chat_template_kwargs that mean something else to apply_chat_template of transformers
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "max_length",
    "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "sanitize_control_tokens",
    "self", "tokenize", "tokenizer_kwargs", "tools", "truncation",
))  # fmt: skip
NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})
SHORT_ID = 9  # length of call ids for templates that require it


async def prompt_of(
    service: Service,
    messages: Sequence[Message],
    tools: Sequence[Tool] = (),
    *,
    variables: Mapping[str, Any] = NO_VARIABLES,
    counts: bool = False,
    param: str = "messages",
    add_generation_prompt: bool = True,
    add_special_tokens: bool = False,
    owner: str = "",
) -> list[int]:
    """Return the token ids of a conversation.

    Args:
        tools: functions for the template.
        variables: the request's variables of the template; they replace the tokenizer's special tokens.
        counts: the prompt is only counted and may exceed the context.
        param: request field of the messages.
        add_generation_prompt: append the beginning of the assistant's answer.
        add_special_tokens: let the tokenizer add special tokens to the template's.
        owner: sha256 of the request's API key.

    Raises:
        HTTPError: there is no chat template, a role or content part is not supported, or the prompt does not fit.
        InvalidInput: the template rejects the messages.
        OverdueError: the conversation waited too long for the template's threads.
    """
    template = template_of(service, tools)
    plain = []
    for place, message in enumerate(messages):
        if place and place % MANY == 0:
            await asyncio.sleep(0)  # let other requests run
        plain.append(_plain(message, f"messages[{place}]", template))
    if service.tool_family is not None and service.tool_family.short_ids:
        plain = [_with_short_ids(message) for message in plain]
    context: dict[str, Any] = {
        **service.hello.special_tokens,
        **variables,
        "tools": [_template_tool(tool) for tool in tools] or None,
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        text = await template.render(plain, **context)
    except InvalidInput:
        repaired = [_without_cut_arguments(message) for message in plain]
        if repaired == plain:
            raise
        text = await template.render(repaired, **context)
    if not counts:
        service.texts.require_fit(text, param=param)
    ids = await service.texts.encode(text, add_special_tokens=add_special_tokens, owner=owner)
    if not counts:
        service.texts.require_answer(ids, param)
    return ids


def template_variables(request: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    """Return a request's variables of the chat template, as apply_chat_template would get them.

    As in vLLM, reasoning_effort also sets enable_thinking: false for "none", else true.

    Raises:
        HTTPError: chat_template_kwargs has a name with another meaning.
    """
    given = request.chat_template_kwargs or {}
    reserved = sorted(given.keys() & RESERVED)
    if reserved:
        param = f"chat_template_kwargs.{reserved[0]}"
        raise HTTPError(400, f"{param} is not supported: omit it", param=param, code="unsupported_parameter")
    effort, thinks = request.reasoning_effort, request.enable_thinking
    if effort is not None and thinks is None:
        thinks = effort != "none"
    variables = {"reasoning_effort": effort, "enable_thinking": thinks}
    return {name: value for name, value in variables.items() if value is not None} | given


def template_of(service: Service, tools: Sequence[Tool]) -> ChatTemplate:
    """Return the chat template for a conversation with these tools.

    Raises:
        HTTPError: the model has none.
    """
    template = service.tool_template if tools else service.template
    if template is None:
        raise HTTPError(400, f"{service.name} {NO_TEMPLATE}", param="messages", code="no_chat_template")
    return template


def _plain(message: Message, where: str, template: ChatTemplate) -> dict[str, Any]:
    """Return a message in the templates' form: text parts joined by newlines, call arguments as objects if possible.

    Raises:
        HTTPError: a field, role or part is not supported.
    """
    for field in UNSERVED:
        if getattr(message, field) not in (None, False):
            param = f"{where}.{field}"
            raise HTTPError(400, f"{param} is not supported: omit it", param=param, code="unsupported_parameter")
    content = message.content
    if isinstance(content, list):
        content = "\n".join(_text(part, f"{where}.content[{index}]") for index, part in enumerate(content))
    role = _role(message.role, where, template)
    plain: dict[str, Any] = {"role": role, "content": content or message.refusal or ""}
    plain |= {name: value for name in SHOWN if (value := getattr(message, name)) is not None}
    reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
    if reasoning is not None and not any(template.reads(name) for name in REASONING if name in plain):
        plain |= {name: reasoning for name in REASONING if template.reads(name)}
    if message.tool_calls:
        plain["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {
                "name": call.function.name, "arguments": _arguments(call.function.arguments),
            }}
            for call in message.tool_calls
        ]  # fmt: skip
    return plain


def _role(role: str, where: str, template: ChatTemplate) -> str:
    """Return a role that the template knows; "developer" is OpenAI's newer name for "system"."""
    if template.names(role) or role in ROLES:
        return role
    if role == "developer":
        return "system"
    message = f"the chat template has no role {role[:40]!r}: use {', '.join(ROLES)} or developer"
    raise HTTPError(400, f"{where}.role: {message}", param=f"{where}.role")


def _text(part: Part, where: str) -> str:
    if part.type not in ("text", "refusal") or part.text is None:
        raise HTTPError(400, f"{where}: parts of type {part.type[:40]!r} are not supported, only text", param=where)
    return part.text


def _arguments(text: str) -> dict[str, Any] | str:
    """Return call arguments as a JSON object; as text if they are not one, for example if max_tokens cut them."""
    try:
        value = read_json(text or "null")
    except ValueError:
        return text
    return {} if value is None else value if isinstance(value, dict) else text


def _without_cut_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Replace arguments that are not objects by empty ones, for templates that need objects."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = function["arguments"] if isinstance(function["arguments"], dict) else {}
        calls.append(call | {"function": function | {"arguments": arguments}})
    return message | {"tool_calls": calls}


def _template_tool(tool: Tool) -> dict[str, Any]:
    """Return a tool in the templates' form. One without parameters gets an empty object: templates list properties."""
    spec = tool.function
    function: dict[str, Any] = {"name": spec.name}
    if spec.description is not None:
        function["description"] = spec.description
    function["parameters"] = {"type": "object", "properties": {}} if spec.parameters is None else spec.parameters
    if spec.strict is not None:
        function["strict"] = spec.strict
    return {"type": "function", "function": function}


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    """Shorten call ids to their last characters, in calls and results alike."""
    if "tool_calls" in message:
        calls = [call | {"id": call["id"][-SHORT_ID:]} for call in message["tool_calls"]]
        return message | {"tool_calls": calls}
    return message | {"tool_call_id": message["tool_call_id"][-SHORT_ID:]} if "tool_call_id" in message else message
