"""RequestLog: a line of JSON a request, with ids, counts and times, and no text of anybody's."""

import json
import time
from collections.abc import Sequence
from typing import IO, Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from detcompile.errors import StorageError
from detcompile.serving.engines.answers import Answer
from detcompile.serving.responses import ANSWERS

__all__ = ["LogFile", "RequestLog"]

MOST_LETTERS = 100  # of a path, which a client may have made up


class LogFile:
    """A file that takes lines. One that cannot be written is left out."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._error: OSError | None = None  # of the last line

    def write(self, line: str) -> None:
        """Write a line."""
        try:
            print(line, file=self._file, flush=True)
            self._error = None
        except OSError as error:
            self._error = error

    def require_writable(self) -> None:
        """Try to write what is left of the last line, if it could not be written.

        Raises:
            StorageError: it still cannot be.
        """
        if self._error is None:
            return
        try:
            self._file.flush()
            self._error = None
        except OSError as error:
            raise StorageError(f"the request log cannot be written: {error.strerror}") from error


class RequestLog:
    """An ASGI layer that writes a line when a request has ended.

    Args:
        inside: what answers.
        file: takes the lines.
    """

    def __init__(self, inside: ASGIApp, file: LogFile) -> None:
        self._inside = inside
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Have a request answered, and note what became of it."""
        if scope["type"] != "http":
            await self._inside(scope, receive, send)
            return
        found: dict[str, Any] = {"time": round(time.time(), 3), "method": scope["method"]}
        found |= {"path": scope["path"][:MOST_LETTERS], "status": None}  # none: the client left before

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = Headers(raw=message["headers"])
                found["status"] = message["status"]
                found["id"], found["receipt"] = headers.get("x-request-id"), headers.get("x-detcompile-receipt")
            await send(message)

        started = time.monotonic()
        try:
            await self._inside(scope, receive, noting)
        finally:
            found["seconds"] = round(time.monotonic() - started, 4)
            self._write(found | _counts(scope.get(ANSWERS, ())))

    def _write(self, found: dict[str, Any]) -> None:
        kept = {name: value for name, value in found.items() if value is not None or name == "status"}
        self._file.write(json.dumps(kept))


def _counts(answers: Sequence[Answer]) -> dict[str, Any]:
    """What was asked and drawn, as numbers and reasons."""
    if not answers:
        return {}
    firsts = [answer.first_token - answer.arrival for answer in answers if answer.first_token is not None]
    reasons = [sample.finish_reason for answer in answers for sample in answer.samples]
    return {
        "prompt_tokens": sum(len(answer.prompt_ids) for answer in answers),
        "cached_tokens": sum(answer.num_cached_tokens for answer in answers),
        "generated_tokens": sum(answer.num_tokens for answer in answers),
        "first_token_seconds": round(min(firsts), 4) if firsts else None,
        "finish_reasons": reasons,
        "error": next((type(answer.error).__name__ for answer in answers if answer.error is not None), None),
    }
