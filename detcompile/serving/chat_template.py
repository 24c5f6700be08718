"""Chat templates: Jinja templates, as Hugging Face writes them, that turn messages into a prompt."""

import asyncio
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from detcompile.errors import InvalidInput
from detcompile.serving.http_errors import OverdueError

RENDER_SECONDS = 2.0
MANY = 1024  # messages; longer conversations are rendered one at a time, so that short ones do not wait
THREADS = 4
REJECTIONS = (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RuntimeError)


class _Generation(Extension):
    """``{% generation %}``, which marks the assistant's text for training; here its content is rendered as usual."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_text_of"), [], [], body).set_lineno(line)

    def _text_of(self, caller: Callable[[], str]) -> str:
        return caller()


class ChatTemplate:
    """A template in a sandbox with the filters, functions and variables of transformers' renderer.

    Args:
        source: the template.

    Attributes:
        digest: sha256 of the source in hex.
        source: the template.
        takes_tools: True if the template uses the variable ``tools``.

    Raises:
        InvalidInput: invalid Jinja.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.digest = hashlib.sha256(source.encode()).hexdigest()
        sandbox = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        sandbox.filters["tojson"] = _as_json
        sandbox.globals["raise_exception"] = _raise
        sandbox.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = sandbox.from_string(source)
            self._words = _compared_words(sandbox.parse(source))
            self.takes_tools = "tools" in meta.find_undeclared_variables(sandbox.parse(source))
        except TemplateError as error:
            raise InvalidInput(f"the chat template cannot be read: {error}") from error
        # Long prompts queue for the tokenizer's threads.
        self._threads = ThreadPoolExecutor(THREADS, "chat-template"), ThreadPoolExecutor(1, "long-chat-template")

    def names(self, role: str) -> bool:
        """Return True if the template compares something with this word, or has it as a key of a dict."""
        return role in self._words

    def reads(self, field: str) -> bool:
        """Return True if the template has an attribute or a key of this name."""
        return re.search(rf"""[.'"]{field}\b""", self.source) is not None

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Return the prompt of a conversation.

        Args:
            tools: functions that the model may call.
            add_generation_prompt: append the beginning of the assistant's answer.
            variables: other variables of the template, such as bos_token.

        Raises:
            InvalidInput: the template rejects the messages or takes too long.
            OverdueError: the conversation waited too long for others.
        """
        context = {
            **variables,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        rendering = self._threads[len(messages) > MANY].submit(self._template.render, context)
        try:
            async with asyncio.timeout(RENDER_SECONDS):
                return await asyncio.wrap_future(rendering)
        except TimeoutError as error:
            if rendering.cancelled():  # before it started
                raise OverdueError(f"other conversations took over {RENDER_SECONDS:g} s: try again", 503) from error
            raise InvalidInput(f"the chat template took over {RENDER_SECONDS:g} s for these messages") from error
        except REJECTIONS as error:
            raise InvalidInput(f"the chat template rejects these messages: {error}") from error


def _compared_words(tree: nodes.Template) -> frozenset[str]:
    """Return the strings that a template compares with anything, and the keys of its dicts, not of lookups."""
    constants = {id(pair.key): pair.key for pair in tree.find_all(nodes.Pair)}
    for compare in tree.find_all(nodes.Compare):
        constants |= {id(const): const for const in compare.find_all(nodes.Const)}
        for lookup in compare.find_all(nodes.Getitem):
            constants.pop(id(lookup.arg), None)
    values = [node.value for node in constants.values() if isinstance(node, nodes.Const)]
    return frozenset(value for value in values if isinstance(value, str))


def _as_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Implement the filter ``tojson`` with transformers' arguments, in the same order."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)
