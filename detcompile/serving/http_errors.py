"""HTTPError: what a client did wrong, or why it cannot be served now, in OpenAI's form or in Anthropic's."""

from typing import Any

import msgspec

from detcompile.errors import DetcompileError, EngineError, InvalidInput, WorkerError

__all__ = ["BlockedRequestError", "CLIENT_LEFT", "FAULT", "HTTPError", "OverdueError", "error_of", "too_long"]

TYPES = {  # of statuses; others are invalid_request_error below 500, else api_error
    401: "authentication_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
MESSAGES = "/v1/messages"  # where errors have Anthropic's form
MESSAGES_TYPES = {404: "not_found_error", 413: "request_too_large"}  # of statuses, where they are not OpenAI's


class HTTPError(Exception):
    """An answer that is an error.

    Args:
        status: the HTTP status.
        param: the field of the request that is to blame.
        retry_after: seconds after which to try again.
        in_vain: another try comes to the same, so that clients that try by themselves shall not.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        in_vain: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
        if in_vain:
            self.headers["X-Should-Retry"] = "false"  # which OpenAI's and Anthropic's clients heed
        if status == 401:
            self.headers["WWW-Authenticate"] = "Bearer"
        kind = TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        self.content: dict[str, Any] = {
            "error": {"message": message, "type": kind, "param": param, "code": code or CODES.get(status)}
        }

    def body(self, path: str) -> bytes:
        """The error as JSON, in the form that the clients of a path read."""
        if not path.startswith(MESSAGES):
            return msgspec.json.encode(self.content)
        own = self.content["error"]
        kind = MESSAGES_TYPES.get(self.status, own["type"])
        return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": own["message"]}})

    def event(self, path: str) -> bytes:
        """The error as a server-sent event, in a stream that has begun."""
        return (b"event: error\n" if path.startswith(MESSAGES) else b"") + b"data: " + self.body(path) + b"\n\n"


class OverdueError(DetcompileError):
    """A request that was not answered in time.

    Args:
        status: the HTTP status that says so.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class BlockedRequestError(EngineError):
    """A request that crashed engines while it was the only one running."""


def too_long(size: str, max_context: int, param: str) -> HTTPError:
    """Return the refusal of a prompt that has no room, with the code and the words that clients look for.

    Args:
        size: what it has, as "9 tokens".
    """
    said = (
        f"This model's maximum context length is {max_context} tokens, and the prompt is too long: {param} has {size}."
        " Shorten it, or compile with a larger max_context"
    )
    return HTTPError(400, said, param=param, code="context_length_exceeded")


ENGINE_RETRY_SECONDS = 30  # after which whoever watches the server may have started another
OVERDUE_RETRY_SECONDS = 10
CLIENT_LEFT = "the client left before its request was taken"
FAULT = "the server failed at this request; its log says why"
CODES = {401: "invalid_api_key", 413: "request_too_large", 429: "rate_limit_exceeded"}


def error_of(error: DetcompileError | HTTPError, params: frozenset[str] = frozenset()) -> HTTPError:
    """The answer to a request that this package refused, or failed at; an HTTPError is one.

    Args:
        params: fields that a message may begin with, and be about.
    """
    if isinstance(error, HTTPError):
        return error
    if isinstance(error, InvalidInput):
        first = str(error).replace(":", " ").split(" ", 1)[0]
        return HTTPError(400, str(error), param=first if first in params else None)
    if isinstance(error, OverdueError):
        return HTTPError(error.status, str(error), code="timeout", retry_after=OVERDUE_RETRY_SECONDS)
    if isinstance(error, WorkerError):
        return HTTPError(503, str(error), code="engine_error", retry_after=ENGINE_RETRY_SECONDS)
    return HTTPError(500, str(error), code="engine_error", in_vain=isinstance(error, BlockedRequestError))
