"""Content blocks of a message, built as its text arrives, and their stream events."""

from typing import Any

from detcompile.serving.openai.tools import ToolUse, call_id
from detcompile.serving.tools.reader import Piece, Reader, read_json

__all__ = ["Blocks"]

Event = dict[str, Any]


class Blocks:
    """Splits an answer's text into text and tool_use blocks, in order.

    Args:
        name: id of the message; the ids of its calls are derived from it.
        use: the request's tools; None if no tool may be called.

    Attributes:
        content: the blocks so far. A call's input is set when its block ends.
    """

    def __init__(self, name: str, use: ToolUse | None) -> None:
        self.content: list[dict[str, Any]] = []
        self._name = name
        self._reader = None if use is None else Reader(use.family)
        self._arguments: str | None = None  # of the open tool_use block; None for text
        self._open = False

    @property
    def num_calls(self) -> int:
        """Return the number of calls so far."""
        return 0 if self._reader is None else self._reader.num_calls

    def add(self, text: str, *, last: bool) -> list[Event]:
        """Append text and return the new events; ``last`` closes the open block."""
        events: list[Event] = []
        for piece in [Piece(None, None, text)] if self._reader is None else self._reader.feed(text, last=last):
            if piece.call is not None or piece.text:
                events += self._add(piece)
        return events + (self._close() if last else [])

    def _add(self, piece: Piece) -> list[Event]:
        events: list[Event] = []
        if piece.name is not None or (piece.call is None and (not self._open or self._arguments is not None)):
            events += [*self._close(), self._begin(piece)]
        if not piece.text:
            return events
        if piece.call is None:
            self.content[-1]["text"] += piece.text
            delta = {"type": "text_delta", "text": piece.text}
        else:
            assert self._arguments is not None
            self._arguments += piece.text
            delta = {"type": "input_json_delta", "partial_json": piece.text}
        return [*events, {"type": "content_block_delta", "index": len(self.content) - 1, "delta": delta}]

    def _begin(self, piece: Piece) -> Event:
        block: dict[str, Any] = {"type": "text", "text": ""}
        if piece.call is not None:
            block = {"type": "tool_use", "id": call_id(self._name, piece.call), "name": piece.name, "input": {}}
        self._arguments = None if piece.call is None else ""
        self.content.append(block)
        self._open = True
        return {"type": "content_block_start", "index": len(self.content) - 1, "content_block": dict(block)}

    def _close(self) -> list[Event]:
        if not self._open:
            return []
        if self._arguments is not None:
            self.content[-1]["input"] = _input(self._arguments)
        self._open, self._arguments = False, None
        return [{"type": "content_block_stop", "index": len(self.content) - 1}]


def _input(arguments: str) -> dict[str, Any]:
    """Return a call's arguments as a dict; empty unless they are a JSON object (max_tokens may cut them)."""
    try:
        value = read_json(arguments)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
