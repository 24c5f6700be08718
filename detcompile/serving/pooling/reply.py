"""Shared parts of the pooling routes: checks of prompts, and the reply built from the model's rows."""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from starlette.responses import Response

from detcompile.serving.engines.protocol import PoolingFacts
from detcompile.serving.http_errors import HTTPError, too_long
from detcompile.serving.journal.jobs import Call
from detcompile.serving.openai.fields import require_served
from detcompile.serving.responses import Whole
from detcompile.serving.service import Service

MAX_PROMPTS = 2048
Row = Sequence[float]  # float32


def facts_of(service: Service, request: Any, *tasks: str) -> PoolingFacts:
    """Return the pooling facts of a model that does one of these tasks.

    Raises:
        HTTPError: another model or task, or a field that is not supported.
    """
    service.require_ready()
    service.require_model(request.model)
    facts = service.require_pooling(*tasks)
    require_served(request)
    return facts


def require_count(count: int, param: str) -> None:
    """Reject no texts or too many.

    Raises:
        HTTPError: states their number.
    """
    if not 1 <= count <= MAX_PROMPTS:
        raise HTTPError(400, f"{param} has {count} texts: give 1 to {MAX_PROMPTS}", param=param)


def require_prompts(service: Service, prompts: Sequence[Sequence[int]], param: str) -> None:
    """Reject prompts that the model cannot take.

    Raises:
        HTTPError: states their number, or names one.
    """
    hello = service.hello
    require_count(len(prompts), param)
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise HTTPError(400, f"{param} {index} has no tokens: give at least one", param=param)
        if len(prompt) > hello.max_context:
            raise too_long(f"{len(prompt)} tokens", hello.max_context, param)
        if max(prompt) >= hello.vocab_size:
            message = f"{param} {index} has token {max(prompt)}, but the vocabulary ends at {hello.vocab_size - 1}"
            raise HTTPError(400, message, param=param)


def pooled(
    service: Service,
    call: Call,
    prompts: Sequence[list[int]],
    result: Callable[[list[Row]], dict[str, Any]],
    *,
    prefix: str,
    pooling: Literal["last", "first", "mean"] | None = None,
    normalize: bool = True,
) -> Response:
    """Run prompts through the model and reply with the result of their rows.

    Args:
        result: builds the reply's fields from one row per prompt.
        prefix: prefix of the reply's id.

    Raises:
        HTTPError: over a limit, or no engine serves.
    """
    task = service.pool(prompts, pooling, call.owner, call.reservation, normalize=normalize)
    task.name = prefix + secrets.token_hex(12)
    num_tokens = sum(map(len, prompts))
    head = {
        "id": task.name,
        "created": int(time.time()),
        "model": service.name,
        "system_fingerprint": service.hello.fingerprint,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }

    async def whole() -> dict[str, Any]:
        values = memoryview(task.values).cast("f")
        rows: list[Row] = [
            values[start : start + task.num_columns] for start in range(0, len(values), task.num_columns)
        ]
        return head | await asyncio.to_thread(result, rows)

    return Whole([task], call.reservation, {"X-Request-Id": task.name}, whole)
