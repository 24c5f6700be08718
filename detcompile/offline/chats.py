"""Conversations as prompts, with the parameters of their answers and how to read these."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from detcompile.errors import InvalidInput
from detcompile.reasoning.formats import (
    PARSERS,
    ReasoningParser,
    Thinking,
    Vocabulary,
    reasoning_parser_of,
    split_reasoning,
    thinking_of,
)
from detcompile.reasoning.grammars import params_of_answers
from detcompile.runtime.requests.plain_values import kind, shown
from detcompile.runtime.requests.prompts import Prompt, tokenized
from detcompile.runtime.requests.sampling_params import SamplingParams


class Chat(NamedTuple):
    """A conversation, ready for an engine.

    Attributes:
        prompt: its text and token ids.
        thinking: how the answer's reasoning is read; None for none.
    """

    prompt: Prompt
    params: SamplingParams
    thinking: Thinking | None

    def split(self, text: str) -> tuple[str | None, str]:
        """Return the reasoning, if any, and the content of an answer."""
        reasoning, content = ("", text) if self.thinking is None else split_reasoning(text, self.thinking)
        return reasoning or None, content


def read_chats(
    tokenizer: Any,
    reader: Any,
    conversations: Sequence[Any],
    params: Sequence[SamplingParams],
    options: Mapping[str, Any],
    *,
    parser_name: str | None = None,
    budget: int | None = None,
) -> list[Chat]:
    """Return conversations as an engine takes them. Grammars and stop strings begin after the reasoning.

    Args:
        tokenizer: renders the conversations.
        reader: tokenizes them; the same one, or a private copy.
        params: parameters of the answers, one for each conversation.
        options: arguments of the tokenizer's apply_chat_template.
        parser_name: format of the reasoning, or "none"; None: as the chat template says.
        budget: most tokens of the reasoning; None for any number.

    Raises:
        InvalidInput: there is no template, it cannot render a conversation, or the grammar or the budget cannot be
            combined with the model's reasoning.
    """
    texts = [_rendered(tokenizer, conversation, options) for conversation in conversations]
    parser = _parser(tokenizer, options.get("chat_template"), parser_name)
    if not options.get("add_generation_prompt"):
        parser = None  # the answer continues a message
    if budget is not None and (budget < 0 or parser is None):
        reason = "must be at least 0" if budget < 0 else "needs a reasoning format: give reasoning_parser"
        raise InvalidInput(f"thinking_token_budget {budget} {reason}")
    vocabulary, chats = Vocabulary(getattr(reader, "backend_tokenizer", None)), []
    for text, given in zip(texts, params, strict=True):
        ids = tokenized(reader, text, add_special_tokens=False)  # the text has the template's special tokens
        thinking = thinking_of(parser, reader.decode, ids)
        if thinking is not None:
            given = params_of_answers(given, thinking, vocabulary, composed=False, budget=budget)
        chats.append(Chat({"prompt": text, "prompt_token_ids": ids}, given, thinking))
    return chats


def _parser(tokenizer: Any, chat_template: str | None, name: str | None) -> ReasoningParser | None:
    if name is not None:
        return PARSERS.get(name)
    source = getattr(tokenizer, "chat_template", None) if chat_template is None else chat_template
    return reasoning_parser_of(str(source))  # a dict has several templates of one model


def _rendered(tokenizer: Any, conversation: Any, options: Mapping[str, Any]) -> str:
    """Return a conversation as the text of a prompt."""
    if isinstance(conversation, (str, Mapping)) or not isinstance(conversation, Sequence):
        what = f"{shown(conversation)}, which is {kind(conversation)}"
        raise InvalidInput(f"messages hold {what}: pass a list of messages, or a list of conversations")
    try:
        text: str = tokenizer.apply_chat_template(list(conversation), tokenize=False, **options)
    except Exception as error:  # templates are programs and raise anything
        raise InvalidInput(
            f"the chat template cannot render {shown(conversation)}: {error}. Pass messages with a role and a content,"
            " and a chat_template if the tokenizer has none"
        ) from error
    return text
