"""Request bodies of OpenAI's API.

Fields that OpenAI does not have are other servers', with their names and meanings. fields.py lists the rejected ones.
"""

import asyncio
import re
from itertools import accumulate
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from detcompile.serving.http_errors import HTTPError
from detcompile.serving.openai.fields import DetokenizeFields, TextFields, TokenizeFields

SHORT_BODY = 1 << 16  # bytes; longer bodies are decoded in a thread, so that the event loop stays free
MAX_NESTING = 64
MAX_ELEMENTS = 1_000_000  # values in all lists and objects
STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)  # possessive, also unterminated: one pass over a body
NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
FunctionName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
NumLogprobs = Annotated[int, Meta(ge=0, le=20)]
Priority = Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)]
RequestId = Annotated[str, Meta(max_length=255)]
CacheSalt = Annotated[str, Meta(min_length=1)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class StreamOptions(msgspec.Struct, kw_only=True):
    """Options of a stream."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class JSONSchema(msgspec.Struct, kw_only=True):
    """A schema in OpenAI's response_format; it is enforced whatever ``strict`` says."""

    schema: dict[str, Any]
    name: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """A constraint on the text."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None
    schema: dict[str, Any] | None = None  # llama.cpp's form, for both JSON types


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """vLLM's constraints; at most one may be given."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    whitespace_pattern: Any = None
    disable_any_whitespace: Any = None
    disable_additional_properties: Any = None


class _CompletionFields(TextFields, kw_only=True):
    """Fields of both kinds of completion."""

    model: str | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: list[TokenId] | None = None
    priority: Priority | None = None
    prompt_logprobs: NumLogprobs | None = None
    return_sampling_logprobs: bool | None = None
    return_sampling_mask: bool | None = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    grammar: str | None = None
    ebnf: str | None = None
    add_special_tokens: bool | None = None
    cache_salt: CacheSalt | None = None
    request_id: RequestId | None = None
    receipt: bool | None = None


class CompletionRequest(_CompletionFields, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: str | list[str | TokenId | list[TokenId]]
    max_tokens: int | None = 16
    logprobs: NumLogprobs | None = None
    echo: bool | None = None
    best_of: int | None = None


class Part(msgspec.Struct, kw_only=True):
    """A part of a message's content."""

    type: str
    text: str | None = None


class CalledFunction(msgspec.Struct, kw_only=True):
    """A function that the model called, with its arguments as JSON."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    """A call in an assistant message."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class FunctionSpec(msgspec.Struct, kw_only=True):
    """A function that the model may call; ``parameters`` is the JSON schema of its arguments."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    """A tool; only functions are supported."""

    function: FunctionSpec
    type: Literal["function"] = "function"


class NamedFunction(msgspec.Struct, kw_only=True):
    """A function by its name."""

    name: str


class NamedTool(msgspec.Struct, kw_only=True):
    """The tool that must be called."""

    function: NamedFunction
    type: Literal["function"] = "function"


class Message(msgspec.Struct, kw_only=True):
    """One message of a conversation. ``reasoning`` is for templates that show it; the last four are rejected."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    audio: Any = None
    function_call: Any = None
    partial: bool | None = None
    prefix: bool | None = None


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class ChatRequest(_CompletionFields, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    echo: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: Annotated[int, Meta(ge=0)] | None = None


class ChatTokensRequest(ChatRequest, kw_only=True):
    """Body of POST /v1/chat/completions/tokens: the prompt's token ids replace the rendered messages."""

    tokens: Annotated[list[TokenId], Meta(min_length=1)]


class TokenizeRequest(TokenizeFields, kw_only=True):
    """Body of POST /tokenize: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None  # None: yes for a text, no for a conversation
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: Effort | None = None


class DetokenizeRequest(DetokenizeFields, kw_only=True):
    """Body of POST /detokenize."""

    tokens: list[TokenId]
    model: str | None = None


Body = TypeVar("Body")


async def decoded_body(body: bytes, kind: type[Body]) -> Body:
    """Decode a request's body in a thread if it is long.

    Raises:
        HTTPError: see ``decode_body``.
    """
    return await asyncio.to_thread(decode_body, body, kind) if len(body) > SHORT_BODY else decode_body(body, kind)


def decode_body(body: bytes, kind: type[Body]) -> Body:
    """Decode a request's body.

    Raises:
        HTTPError: invalid JSON, too much nesting, too many values, or a field of the wrong type, which is named.
    """
    outside = STRING.sub(b"", body)
    brackets = outside.translate(None, NOT_BRACKETS)
    is_large = max(len(brackets), outside.count(b",")) > MAX_ELEMENTS
    if is_large or max(accumulate(STEPS[bracket] for bracket in brackets), default=0) > MAX_NESTING:
        raise HTTPError(400, f"the body has more than {MAX_NESTING} levels or {MAX_ELEMENTS} values")
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        missing = re.search(r"field `(\w+)`", message)
        param = path.rstrip("`").lstrip(".") or (missing[1] if missing else None)
        raise HTTPError(400, f"{param or 'the body'}: {message}", param=param) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HTTPError(400, f"the body is not valid JSON: {error}") from error
