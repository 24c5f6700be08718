"""POST /tokenize and /detokenize, and GET /tokenizer_info: the front's tokenizer, for clients that have none."""

from typing import Any

import msgspec
from starlette.responses import Response

from detcompile.serving.http_errors import HTTPError
from detcompile.serving.journal.jobs import Call
from detcompile.serving.openai.fields import require_served
from detcompile.serving.openai.messages import prompt_of
from detcompile.serving.openai.schema import DetokenizeRequest, TokenizeRequest
from detcompile.serving.openai.tools import tool_use
from detcompile.serving.responses import JSON
from detcompile.serving.service import Service

__all__ = ["detokenize", "tokenize", "tokenizer_info"]


async def tokenize(service: Service, asked: TokenizeRequest, call: Call) -> Response:
    """Token ids of a text, or of a conversation.

    Raises:
        HTTPError: neither or both, another model, or a field that is not served.
    """
    service.require_ready()
    service.require_model(asked.model)
    if (asked.prompt is None) == (not asked.messages):
        raise HTTPError(400, "give either prompt or messages", param="prompt")
    require_served(asked)
    if asked.messages:
        use = tool_use(service, asked.tools, None, None)
        ids = await prompt_of(
            service,
            asked.messages,
            () if use is None else use.tools,
            counts=True,
            owner=call.owner,
            add_generation_prompt=asked.add_generation_prompt is not False,
            add_special_tokens=bool(asked.add_special_tokens),
        )
    else:
        special = asked.add_special_tokens is not False
        ids = await service.texts.encode(asked.prompt or "", add_special_tokens=special, owner=call.owner)
    strings = [service.texts.convert_ids_to_tokens(token) for token in ids] if asked.return_token_strs else None
    found = {"tokens": ids, "count": len(ids), "max_model_len": service.hello.max_context}
    return _told(found if strings is None else found | {"token_strs": strings})


async def detokenize(service: Service, asked: DetokenizeRequest, call: Call) -> Response:
    """The text of tokens.

    Raises:
        HTTPError: another model, or a field that is not served.
    """
    service.require_ready()
    service.require_model(asked.model)
    require_served(asked)
    return _told({"prompt": await service.texts.text_of(asked.tokens, owner=call.owner)})


def tokenizer_info(service: Service) -> Response:
    """Special tokens by their names and the chat template, as clients read them that tokenize by this server."""
    template = None if service.template is None else service.template.source
    named = {"eos_token": None, "bos_token": None, "pad_token": None} | service.hello.special_tokens
    named["tokenizer_class"] = service.hello.tokenizer_class
    return _told(named | {"chat_template": template, "model_max_length": service.hello.max_context})


def _told(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type=JSON)
