"""Families: the ways in which models write calls of functions, and which of them a chat template asks for."""

from typing import NamedTuple

__all__ = ["FAMILIES", "Family", "HERMES", "LLAMA3", "MISTRAL", "family_of"]


class Family(NamedTuple):
    """How calls are written: as JSON objects with a name and arguments.

    Attributes:
        opens: what stands before calls.
        closes: what stands behind each; "" for nothing.
        key: the name of the arguments in a call.
        array: calls stand in a JSON list, or each is a name, "[ARGS]" and its arguments.
        short_ids: templates want ids of calls of nine letters.
        bare: an answer that begins with a JSON object is a call, also without ``opens``.
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
    """The family whose words a chat template has; None where it has none's."""
    for family in (HERMES, MISTRAL):
        if family.opens in template:
            return family
    return LLAMA3 if '"parameters":' in template else None
