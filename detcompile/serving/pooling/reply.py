"""What routes over whole sequences share: prompts are checked, rows waited for, and answers have one head."""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from starlette.responses import Response

from detcompile.serving.engines.answers import Pooling
from detcompile.serving.engines.protocol import PoolingFacts
from detcompile.serving.http_errors import HTTPError, too_long
from detcompile.serving.journal.jobs import Call
from detcompile.serving.openai.fields import require_served
from detcompile.serving.responses import Whole
from detcompile.serving.service import Service

__all__ = ["Row", "facts_of", "pooled", "require_count", "require_prompts"]

MAX_PROMPTS = 2048
Row = Sequence[float]  # of float32


def facts_of(service: Service, asked: Any, *tasks: str) -> PoolingFacts:
    """What is known of the model, where it does one of these tasks.

    Raises:
        HTTPError: another model, or one that does another task; or a field that is not served.
    """
    service.require_ready()
    service.require_model(asked.model)
    found = service.require_pooling(*tasks)
    require_served(asked)
    return found


def require_count(count: int, param: str) -> None:
    """Refuse no texts, and too many.

    Raises:
        HTTPError: how many there are.
    """
    if not 1 <= count <= MAX_PROMPTS:
        raise HTTPError(400, f"{param} holds {count} texts: give 1 to {MAX_PROMPTS}", param=param)


def require_prompts(service: Service, prompts: Sequence[Sequence[int]], param: str) -> None:
    """Refuse prompts that the model cannot take.

    Raises:
        HTTPError: how many there are, or which one it is.
    """
    hello = service.hello
    require_count(len(prompts), param)
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise HTTPError(400, f"{param} {index} has no tokens: give one at least", param=param)
        if len(prompt) > hello.max_context:
            raise too_long(f"{len(prompt)} tokens", hello.max_context, param)
        if max(prompt) >= hello.vocab_size:
            said = f"{param} {index} holds token {max(prompt)}, and the vocabulary ends at {hello.vocab_size - 1}"
            raise HTTPError(400, said, param=param)


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
    """Have prompts pooled, and answer with what is made of their rows.

    Args:
        result: makes the fields of the answer of a row a prompt.
        prefix: begins the answer's id.

    Raises:
        HTTPError: no room, or no engine.
    """
    asked = service.pool(prompts, pooling, call.owner, call.reservation, normalize=normalize)
    asked.name = prefix + secrets.token_hex(12)
    num_tokens = sum(map(len, prompts))
    head = {
        "id": asked.name,
        "created": int(time.time()),
        "model": service.name,
        "system_fingerprint": service.hello.fingerprint,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }

    async def whole() -> dict[str, Any]:
        return head | await asyncio.to_thread(result, _rows(asked))

    return Whole([asked], call.reservation, {"X-Request-Id": asked.name}, whole)


def _rows(asked: Pooling) -> list[Row]:
    values = memoryview(asked.values).cast("f")
    return [values[start : start + asked.num_columns] for start in range(0, len(values), asked.num_columns)]
