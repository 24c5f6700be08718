"""HTTP errors and their JSON bodies, in OpenAI's or Anthropic's form."""

from typing import Any

import msgspec

from detcompile.errors import DetcompileError, EngineError, InvalidInput, WorkerError

TYPES = {  # by status; otherwise invalid_request_error below 500, else api_error
    401: "authentication_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
MESSAGES = "/v1/messages"  # routes whose errors have Anthropic's form
MESSAGES_TYPES = {404: "not_found_error", 413: "request_too_large"}  # by status, where they differ from OpenAI's


class HTTPError(Exception):
    """An error response.

    Args:
        status: the HTTP status.
        param: the request field at fault.
        retry_after: seconds after which to retry.
        in_vain: retrying fails again; tells clients not to retry on their own.
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
            self.headers["X-Should-Retry"] = "false"  # read by OpenAI's and Anthropic's clients
        if status == 401:
            self.headers["WWW-Authenticate"] = "Bearer"
        kind = TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        self.content: dict[str, Any] = {
            "error": {"message": message, "type": kind, "param": param, "code": code or CODES.get(status)}
        }

    def body(self, path: str) -> bytes:
        """Return the error as JSON in the form of the path's API."""
        if not path.startswith(MESSAGES):
            return msgspec.json.encode(self.content)
        error = self.content["error"]
        kind = MESSAGES_TYPES.get(self.status, error["type"])
        return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": error["message"]}})

    def event(self, path: str) -> bytes:
        """Return the error as a server-sent event for a stream that has started."""
        return (b"event: error\n" if path.startswith(MESSAGES) else b"") + b"data: " + self.body(path) + b"\n\n"


class OverdueError(DetcompileError):
    """A request that missed its deadline.

    Args:
        status: the HTTP status.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class BlockedRequestError(EngineError):
    """A request that crashed engines while it was the only one running."""


def too_long(size: str, max_context: int, param: str) -> HTTPError:
    """Return the error for a prompt that does not fit, with the code and wording that clients look for.

    Args:
        size: the prompt's length, such as "9 tokens".
    """
    message = (
        f"This model's maximum context length is {max_context} tokens, and the prompt is too long: {param} has {size}."
        " Shorten it, or compile with a larger max_context"
    )
    return HTTPError(400, message, param=param, code="context_length_exceeded")


ENGINE_RETRY_SECONDS = 30  # a supervisor may have restarted the server by then
OVERDUE_RETRY_SECONDS = 10
CLIENT_LEFT = "the client disconnected before its request was admitted"
FAULT = "internal error: see the server's log"
CODES = {401: "invalid_api_key", 413: "request_too_large", 429: "rate_limit_exceeded"}


def error_of(error: DetcompileError | HTTPError, params: frozenset[str] = frozenset()) -> HTTPError:
    """Return the HTTP error for an exception of this package; an HTTPError is returned as is.

    Args:
        params: request fields; if the message starts with one, it becomes ``param``.
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
