"""Output items of a response, built as its text arrives, and their stream events."""

import hashlib
from typing import Any

from detcompile.reasoning.formats import Piece
from detcompile.serving.openai.tools import call_id

Event = dict[str, Any]  # without its sequence number


class ResponseOutput:
    """Turns pieces of an answer into items: reasoning, messages and function_call items.

    Args:
        name: id of the response; item ids are derived from it.

    Attributes:
        items: the items so far.
    """

    def __init__(self, name: str) -> None:
        self.items: list[dict[str, Any]] = []
        self._name = name
        self._open: dict[str, Any] | None = None
        self._kind: tuple[int | None, bool] = (None, False)  # the open item's call, and whether it is reasoning

    def add(self, piece: Piece, logprobs: list[dict[str, Any]]) -> list[Event]:
        """Add a piece.

        Args:
            logprobs: entries of the content's tokens, if requested; reasoning and calls have none.
        """
        events: list[Event] = []
        if piece.name is not None or self._open is None or self._kind != (piece.call, piece.reasoning):
            events += self.close("completed")
            events += self._opened(piece)
        assert self._open is not None
        place = {"item_id": self._open["id"], "output_index": len(self.items) - 1}
        if piece.call is not None:
            self._open["arguments"] += piece.text
            if piece.text:
                events.append({"type": "response.function_call_arguments.delta", **place, "delta": piece.text})
            return events
        part = self._open["content"][0]
        part["text"] += piece.text
        delta: Event = {"content_index": 0, "delta": piece.text}
        if piece.reasoning:
            return [*events, {"type": "response.reasoning_text.delta", **place, **delta}]
        part["logprobs"] += logprobs
        delta["logprobs"] = logprobs
        return [*events, {"type": "response.output_text.delta", **place, **delta}]

    def close(self, status: str) -> list[Event]:
        """Close the open item, if any."""
        item, self._open = self._open, None
        if item is None:
            return []
        item["status"] = status
        index = len(self.items) - 1
        place = {"item_id": item["id"], "output_index": index}
        done: Event = {"type": "response.output_item.done", "output_index": index, "item": item}
        if item["type"] == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            return [{"type": "response.function_call_arguments.done", **place, **function}, done]
        part, place = item["content"][0], place | {"content_index": 0}
        text = {name: part[name] for name in ("text", "logprobs") if name in part}
        return [
            {"type": f"response.{part['type']}.done", **place, **text},
            {"type": "response.content_part.done", **place, "part": part},
            done,
        ]

    def _opened(self, piece: Piece) -> list[Event]:
        index, self._kind = len(self.items), (piece.call, piece.reasoning)
        digest = hashlib.sha256(f"{self._name}/{index}".encode()).hexdigest()[:24]
        item: dict[str, Any]
        if piece.name is not None:
            assert piece.call is not None
            call = {"call_id": call_id(self._name, piece.call), "name": piece.name, "arguments": ""}
            item = {"type": "function_call", "id": f"fc_{digest}", "status": "in_progress", **call}
        elif piece.reasoning:
            item = {"type": "reasoning", "id": f"rs_{digest}", "status": "in_progress", "summary": [], "content": []}
        else:
            item = {"type": "message", "id": f"msg_{digest}", "status": "in_progress", "role": "assistant"}
            item["content"] = []
        self.items.append(item)
        self._open = item
        added: list[Event] = [{"type": "response.output_item.added", "output_index": index, "item": _copy(item)}]
        if piece.name is None:
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            if piece.reasoning:
                part = {"type": "reasoning_text", "text": ""}
            item["content"].append(part)
            place = {"item_id": item["id"], "output_index": index, "content_index": 0}
            added.append({"type": "response.content_part.added", **place, "part": _copy(part)})
        return added


def _copy(value: Any) -> Any:
    """Copy a value deeply: items grow, events must not."""
    if isinstance(value, dict):
        return {name: _copy(item) for name, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value
