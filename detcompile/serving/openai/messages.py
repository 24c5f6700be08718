"""Messages of a conversation: from a request's to what chat templates take, and to token ids."""

from collections.abc import Sequence
from typing import Any

from detcompile.errors import InvalidInput
from detcompile.serving.chat_template import ChatTemplate
from detcompile.serving.http_errors import HTTPError
from detcompile.serving.openai.schema import Message, Part, Tool
from detcompile.serving.service import Service
from detcompile.serving.tools.written_json import read_json

__all__ = ["NO_TEMPLATE", "prompt_of", "template_of"]

NO_TEMPLATE = "has no chat template: use /v1/completions, or start the server with --chat-template"
ROLES = ("system", "user", "assistant", "tool")
SHORT_ID = 9  # letters of a call's id in templates that refuse others


async def prompt_of(
    service: Service,
    messages: Sequence[Message],
    tools: Sequence[Tool] = (),
    *,
    counts: bool = False,
    param: str = "messages",
    add_generation_prompt: bool = True,
    add_special_tokens: bool = False,
    owner: str = "",
) -> list[int]:
    """Return the token ids of a conversation, up to where the assistant's answer begins.

    Args:
        tools: functions that the template shows.
        counts: it is only counted, and may be longer than the context.
        param: the field that the messages stand in.
        add_generation_prompt: whether the prompt has the beginning of the answer.
        add_special_tokens: whether the tokenizer adds its own to those of the template.
        owner: sha256 of the API key that asks.

    Raises:
        HTTPError: no chat template, a role or a part of a message that is not served, or no room. InvalidInput: the
            template refuses it, or it cannot fit.
    """
    template = template_of(service, tools)
    plain = [_plain(message, f"messages[{place}]", template) for place, message in enumerate(messages)]
    if service.tool_family is not None and service.tool_family.short_ids:
        plain = [_with_short_ids(message) for message in plain]
    variables: dict[str, Any] = {
        **service.hello.special_tokens,
        "tools": [_told(tool) for tool in tools] or None,
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        text = await template.render(plain, **variables)
    except InvalidInput:
        whole = [_without_cut_arguments(message) for message in plain]
        if whole == plain:
            raise
        text = await template.render(whole, **variables)
    if not counts:
        service.texts.require_fit(text, param=param)
    ids = await service.texts.encode(text, add_special_tokens=add_special_tokens, owner=owner)
    if not counts:
        service.texts.require_answer(ids, param)
    return ids


def template_of(service: Service, tools: Sequence[Tool]) -> ChatTemplate:
    """Return the chat template of a conversation with these tools.

    Raises:
        HTTPError: the model has none.
    """
    found = service.tool_template if tools else service.template
    if found is None:
        raise HTTPError(400, f"{service.name} {NO_TEMPLATE}", param="messages", code="no_chat_template")
    return found


def _plain(message: Message, where: str, template: ChatTemplate) -> dict[str, Any]:
    """A message as templates take it: parts of text are lines, and arguments of calls objects where they are any."""
    content = message.content
    if isinstance(content, list):
        content = "\n".join(_text(part, f"{where}.content[{index}]") for index, part in enumerate(content))
    role = _role(message.role, where, template)
    plain: dict[str, Any] = {"role": role, "content": content or message.refusal or ""}
    given = {"name": message.name, "tool_call_id": message.tool_call_id}
    plain |= {name: value for name, value in given.items() if value is not None}
    if message.tool_calls:
        plain["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {
                "name": call.function.name, "arguments": _arguments(call.function.arguments),
            }}
            for call in message.tool_calls
        ]  # fmt: skip
    return plain


def _role(role: str, where: str, template: ChatTemplate) -> str:
    """A role that the template knows; "developer" is OpenAI's newer name of "system"."""
    if template.names(role) or role in ROLES:
        return role
    if role == "developer":
        return "system"
    said = f"{role[:40]!r} is no role that the chat template names: give {', '.join(ROLES)} or developer"
    raise HTTPError(400, f"{where}.role: {said}", param=f"{where}.role")


def _text(part: Part, where: str) -> str:
    if part.type not in ("text", "refusal") or part.text is None:
        raise HTTPError(400, f"{where}: parts of type {part.type[:40]!r} are not served, only text", param=where)
    return part.text


def _arguments(text: str) -> dict[str, Any] | str:
    """Arguments as a JSON object; as they stand where they are none, as where max_tokens has cut them."""
    try:
        found = read_json(text or "null")
    except ValueError:
        return text
    return {} if found is None else found if isinstance(found, dict) else text


def _without_cut_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """No arguments in the place of those that are no object, for templates that take nothing else."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = function["arguments"] if isinstance(function["arguments"], dict) else {}
        calls.append(call | {"function": function | {"arguments": arguments}})
    return message | {"tool_calls": calls}


def _told(tool: Tool) -> dict[str, Any]:
    own = tool.function
    function: dict[str, Any] = {"name": own.name, "description": own.description or ""}
    parameters = {"type": "object", "properties": {}} if own.parameters is None else own.parameters
    return {"type": "function", "function": function | {"parameters": parameters}}


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    """Ids of calls cut to their last letters, in calls and in their answers alike."""
    if "tool_calls" in message:
        calls = [call | {"id": call["id"][-SHORT_ID:]} for call in message["tool_calls"]]
        return message | {"tool_calls": calls}
    return message | {"tool_call_id": message["tool_call_id"][-SHORT_ID:]} if "tool_call_id" in message else message
