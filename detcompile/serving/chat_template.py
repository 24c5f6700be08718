"""ChatTemplate: messages to the text that a model was trained on, by a Jinja template as Hugging Face writes them."""

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
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
    """``{% generation %}``, which marks an assistant's words for training: what is in it is text as any other."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


class ChatTemplate:
    """A template in a sandbox, with what templates of the Hub ask for.

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

    async def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The prompt of a conversation, up to where the assistant's answer begins.

        Args:
            variables: what else the template may name, such as bos_token.

        Raises:
            InvalidInput: the template refuses the messages, or takes too long over them.
        """
        given = {**variables, "messages": messages, "add_generation_prompt": True}
        try:
            async with asyncio.timeout(RENDER_SECONDS):
                return await asyncio.get_running_loop().run_in_executor(self._threads, self._template.render, given)
        except TimeoutError as error:
            raise InvalidInput(f"the chat template took over {RENDER_SECONDS:g} s for these messages") from error
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise InvalidInput(f"the chat template cannot take these messages: {error}") from error


def _as_json(value: Any, indent: int | None = None, **_options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> None:
    raise TemplateError(message)
