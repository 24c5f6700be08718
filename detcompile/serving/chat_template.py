"""ChatTemplate: messages to the text that a model was trained on, by a Jinja template as Hugging Face writes them."""

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from detcompile.errors import InvalidInput

__all__ = ["ChatTemplate"]

RENDER_SECONDS = 2.0
THREADS = 4


class _Generation(Extension):
    """``{% generation %}``, which marks an assistant's words for training: a block whose names end with it."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_text_of"), [], [], body).set_lineno(line)

    def _text_of(self, caller: Callable[[], str]) -> str:
        return caller()


class ChatTemplate:
    """A template in a sandbox, with the filters, functions and variables of transformers' renderer.

    Args:
        source: the template.

    Attributes:
        digest: sha256 of the source, in hex.
        source: the template.
        takes_tools: whether it names functions that may be called.

    Raises:
        InvalidInput: the source is no template.
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
            self.takes_tools = "tools" in meta.find_undeclared_variables(sandbox.parse(source))
        except TemplateError as error:
            raise InvalidInput(f"the chat template cannot be read: {error}") from error
        self._threads = ThreadPoolExecutor(THREADS, "chat-template")  # long prompts wait to be tokenized in others

    def names(self, role: str) -> bool:
        """Return whether the template has a word as a text of its own, as where it asks for a role."""
        return f"'{role}'" in self.source or f'"{role}"' in self.source

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Return the prompt of a conversation, up to where the assistant's answer begins.

        Args:
            tools: functions that may be called.
            add_generation_prompt: whether the prompt has the beginning of the answer.
            variables: what else the template may name, such as bos_token.

        Raises:
            InvalidInput: the template refuses the messages, or takes too long over them.
        """
        given = {
            **variables,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            async with asyncio.timeout(RENDER_SECONDS):
                return await asyncio.get_running_loop().run_in_executor(self._threads, self._template.render, given)
        except TimeoutError as error:
            raise InvalidInput(f"the chat template took over {RENDER_SECONDS:g} s for these messages") from error
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise InvalidInput(f"the chat template cannot take these messages: {error}") from error


def _as_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter ``tojson``, with the arguments of transformers' in their order."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)
