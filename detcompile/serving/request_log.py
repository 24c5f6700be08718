"""Request log: one JSON line per request with ids, counts and times, but no prompts or answers."""

import json
import time
from collections.abc import Sequence
from typing import IO, Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from detcompile.errors import StorageError
from detcompile.serving.engines.answers import Answer
from detcompile.serving.responses import ANSWERS

TRACE_ID = "detcompile.trace_id"  # key of the request's trace id, in hex, in the scope
MOST_LETTERS = 100  # of a path, which clients choose


class LogFile:
    """A file for log lines. Lines that cannot be written are dropped."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._error: OSError | None = None  # of the last write

    def write(self, line: str) -> None:
        """Write a line."""
        try:
            print(line, file=self._file, flush=True)
            self._error = None
        except OSError as error:
            self._error = error

    def require_writable(self) -> None:
        """Retry the last write if it failed.

        Raises:
            StorageError: the retry failed.
        """
        if self._error is None:
            return
        try:
            self._file.flush()
            self._error = None
        except OSError as error:
            raise StorageError(f"the request log cannot be written: {error.strerror}") from error


class RequestLog:
    """ASGI layer that writes a line after each request.

    Args:
        inside: the application.
        file: receives the lines.
    """

    def __init__(self, inside: ASGIApp, file: LogFile) -> None:
        self._inside = inside
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run a request and log it."""
        if scope["type"] != "http":
            await self._inside(scope, receive, send)
            return
        entry: dict[str, Any] = {"time": round(time.time(), 3), "method": scope["method"]}
        entry |= {"path": scope["path"][:MOST_LETTERS], "status": None}  # None: the client left before the response

        async def logged_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = Headers(raw=message["headers"])
                entry["status"] = message["status"]
                entry["id"], entry["receipt"] = headers.get("x-request-id"), headers.get("x-detcompile-receipt")
            await send(message)

        started = time.monotonic()
        try:
            await self._inside(scope, receive, logged_send)
        finally:
            entry["seconds"] = round(time.monotonic() - started, 4)
            entry |= _counts(scope.get(ANSWERS, ())) | {"trace_id": scope.get(TRACE_ID)}
            written = {name: value for name, value in entry.items() if value is not None or name == "status"}
            self._file.write(json.dumps(written))


def _counts(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the numbers of tokens, times and finish reasons."""
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
