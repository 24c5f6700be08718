"""Tool-call formats of models, and which one a chat template uses."""

from typing import NamedTuple

__all__ = ["FAMILIES", "Family", "HERMES", "LLAMA3", "MISTRAL", "family_of"]


class Family(NamedTuple):
    """A tool-call format: calls are JSON objects with a name and arguments.

    Attributes:
        opens: text before calls.
        closes: text after each call; "" for none.
        key: key of the arguments in a call.
        array: calls are in a JSON list, or each is a name, "[ARGS]" and its arguments.
        short_ids: templates need call ids of nine characters.
        bare: an answer that starts with a JSON object is a call, even without ``opens``.
    """

    name: str
    opens: str
    closes: str = ""
    key: str = "arguments"
    array: bool = False
    bare: bool = False
    short_ids: bool = False


HERMES = Family("hermes", "<tool_call>", "</tool_call>")
LLAMA3 = Family("llama3", "<|python_tag|>", key="parameters", bare=True)
MISTRAL = Family("mistral", "[TOOL_CALLS]", array=True, short_ids=True)
FAMILIES = {family.name: family for family in (HERMES, LLAMA3, MISTRAL)}


def family_of(template: str) -> Family | None:
    """Return the format whose markers a chat template contains; None if there are none."""
    for family in (HERMES, MISTRAL):
        if family.opens in template:
            return family
    return LLAMA3 if '"parameters":' in template else None
