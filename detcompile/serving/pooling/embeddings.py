"""POST /v1/embeddings: a vector for each text, in float32, as numbers or as base64 of their bytes."""

import base64
from array import array
from typing import Any

from starlette.responses import Response

from detcompile.serving.http_errors import HTTPError
from detcompile.serving.journal.jobs import Call
from detcompile.serving.openai.parameters import prompts_of
from detcompile.serving.pooling.reply import Row, facts_of, pooled, require_prompts
from detcompile.serving.pooling.schema import EmbeddingRequest
from detcompile.serving.service import Service

__all__ = ["embed"]


async def embed(service: Service, asked: EmbeddingRequest, call: Call) -> Response:
    """Answer a request.

    Raises:
        HTTPError: it cannot be served. InvalidInput: nor can its text.
    """
    facts = facts_of(service, asked, "embed")
    if asked.dimensions not in (None, facts.num_columns):
        said = f"dimensions {asked.dimensions} is not served: the embeddings have {facts.num_columns}"
        raise HTTPError(400, said, param="dimensions")
    special = asked.add_special_tokens is not False
    prompts = await service.texts.ids_of(prompts_of(asked.input, "input"), special, param="input", owner=call.owner)
    require_prompts(service, prompts, "input")
    write = _base64 if asked.encoding_format == "base64" else list

    def result(rows: list[Row]) -> dict[str, Any]:
        data = [{"object": "embedding", "index": index, "embedding": write(row)} for index, row in enumerate(rows)]
        return {"object": "list", "data": data}

    normalize = asked.normalize is not False
    return pooled(service, call, prompts, result, prefix="embd-", pooling=asked.pooling, normalize=normalize)


def _base64(row: Row) -> str:
    return base64.b64encode(array("f", row).tobytes()).decode()
