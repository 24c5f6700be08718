"""Content blocks of a message, built as its text arrives, and their stream events."""

import hashlib
from typing import Any

from detcompile.reasoning.formats import Piece, Thinking
from detcompile.serving.openai.tools import ToolUse, call_id
from detcompile.serving.reasoning import AnswerReader
from detcompile.serving.tools.reader import read_json

Event = dict[str, Any]


class Blocks:
    """Splits an answer's text into thinking, text and tool_use blocks, in order.

    Args:
        name: id of the message; the ids of its calls are derived from it.
        use: the request's tools; None if no tool may be called.
        thinking: how to read reasoning; None for none.

    Attributes:
        content: the blocks so far. A call's input and a thinking block's signature, the sha256 of its text, are set
            when the block ends.
    """

    def __init__(self, name: str, use: ToolUse | None, thinking: Thinking | None = None) -> None:
        self.content: list[dict[str, Any]] = []
        self._name = name
        self._reader = AnswerReader(thinking, None if use is None else use.family)
        self._arguments = ""  # of the open tool_use block
        self._open: str | None = None  # type of the open block

    @property
    def num_calls(self) -> int:
        """Return the number of calls so far."""
        return self._reader.num_calls

    def add(self, text: str, *, last: bool) -> list[Event]:
        """Append text and return the new events; ``last`` closes the open block."""
        events: list[Event] = []
        for piece in self._reader.feed(text, last=last):
            if piece.call is not None or piece.text:
                events += self._add(piece)
        return events + (self._close() if last else [])

    def _add(self, piece: Piece) -> list[Event]:
        events: list[Event] = []
        kind = "thinking" if piece.reasoning else "text" if piece.call is None else "tool_use"
        if piece.name is not None or kind != self._open:
            events += [*self._close(), self._begin(piece, kind)]
        if not piece.text:
            return events
        if kind == "tool_use":
            self._arguments += piece.text
            delta = {"type": "input_json_delta", "partial_json": piece.text}
        else:
            self.content[-1][kind] += piece.text
            delta = {"type": f"{kind}_delta", kind: piece.text}
        return [*events, self._delta(delta)]

    def _begin(self, piece: Piece, kind: str) -> Event:
        block: dict[str, Any] = {"type": kind, kind: ""}
        if piece.call is not None:
            block = {"type": kind, "id": call_id(self._name, piece.call), "name": piece.name, "input": {}}
        elif piece.reasoning:
            block["signature"] = ""
        self._open, self._arguments = kind, ""
        self.content.append(block)
        return {"type": "content_block_start", "index": len(self.content) - 1, "content_block": dict(block)}

    def _close(self) -> list[Event]:
        if self._open is None:
            return []
        events: list[Event] = []
        block = self.content[-1]
        if self._open == "tool_use":
            block["input"] = _input(self._arguments)
        elif self._open == "thinking":
            block["signature"] = hashlib.sha256(block["thinking"].encode()).hexdigest()
            events.append(self._delta({"type": "signature_delta", "signature": block["signature"]}))
        self._open = None
        return [*events, {"type": "content_block_stop", "index": len(self.content) - 1}]

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self.content) - 1, "delta": delta}


def _input(arguments: str) -> dict[str, Any]:
    """Return a call's arguments as a dict; empty unless they are a JSON object (max_tokens may cut them)."""
    try:
        value = read_json(arguments)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
