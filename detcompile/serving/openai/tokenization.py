"""POST /tokenize and /detokenize, and GET /tokenizer_info: the server's tokenizer, for clients without one."""

from starlette.responses import Response

from detcompile.serving.http_errors import HTTPError
from detcompile.serving.journal.jobs import Call
from detcompile.serving.openai.fields import require_served
from detcompile.serving.openai.messages import prompt_of, template_variables
from detcompile.serving.openai.schema import DetokenizeRequest, TokenizeRequest
from detcompile.serving.openai.tools import tool_use
from detcompile.serving.responses import json_response
from detcompile.serving.service import Service


async def tokenize(service: Service, request: TokenizeRequest, call: Call) -> Response:
    """Return the token ids of a text or a conversation.

    Raises:
        HTTPError: neither or both were given, another model, or a field that is not supported.
    """
    service.require_ready()
    service.require_model(request.model)
    if (request.prompt is None) == (not request.messages):
        raise HTTPError(400, "give either prompt or messages", param="prompt")
    require_served(request)
    if request.messages:
        use = tool_use(service, request.tools, None, None)
        ids = await prompt_of(
            service,
            request.messages,
            () if use is None else use.tools,
            variables=template_variables(request),
            counts=True,
            owner=call.owner,
            add_generation_prompt=request.add_generation_prompt is not False,
            add_special_tokens=bool(request.add_special_tokens),
        )
    else:
        special = request.add_special_tokens is not False
        ids = await service.texts.encode(request.prompt or "", add_special_tokens=special, owner=call.owner)
    strings = await service.texts.tokens_of(ids, owner=call.owner) if request.return_token_strs else None
    content = {"tokens": ids, "count": len(ids), "max_model_len": service.hello.max_context}
    return json_response(content if strings is None else content | {"token_strs": strings})


async def detokenize(service: Service, request: DetokenizeRequest, call: Call) -> Response:
    """Return the text of tokens.

    Raises:
        HTTPError: another model, a field that is not supported, or an id outside of the vocabulary.
    """
    service.require_ready()
    service.require_model(request.model)
    require_served(request)
    service.texts.require_known(request.tokens, "tokens")
    return json_response({"prompt": await service.texts.text_of(request.tokens, owner=call.owner)})


def tokenizer_info(service: Service) -> Response:
    """Return the special tokens and the chat template, in the form of clients that tokenize through the server."""
    template = None if service.template is None else service.template.source
    named = {"eos_token": None, "bos_token": None, "pad_token": None} | service.hello.special_tokens
    named["tokenizer_class"] = service.hello.tokenizer_class
    return json_response(named | {"chat_template": template, "model_max_length": service.hello.max_context})
