"""Request bodies of the pooling routes. Fields that OpenAI does not have are vLLM's."""

from typing import Annotated, Literal

from msgspec import Meta

from detcompile.serving.openai.fields import PoolingFields
from detcompile.serving.openai.schema import TokenId

__all__ = ["ClassifyRequest", "EmbeddingRequest", "RerankRequest", "ScoreRequest"]

Input = str | list[str | TokenId | list[TokenId]]


class EmbeddingRequest(PoolingFields, kw_only=True):
    """Body of POST /v1/embeddings. ``pooling`` is as in CompiledEmbedder.embed."""

    input: Input
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    pooling: Literal["last", "first", "mean"] | None = None
    add_special_tokens: bool | None = None


class ClassifyRequest(PoolingFields, kw_only=True):
    """Body of POST /classify."""

    input: Input
    model: str | None = None
    use_activation: bool | None = None
    add_special_tokens: bool | None = None


class ScoreRequest(PoolingFields, kw_only=True):
    """Body of POST /v1/score: texts paired one to one, or one text paired with many."""

    text_1: str | list[str]
    text_2: str | list[str]
    model: str | None = None
    use_activation: bool | None = None


class RerankRequest(PoolingFields, kw_only=True):
    """Body of POST /v1/rerank: documents ordered by relevance to a query; ``top_n`` 0 returns all."""

    query: str
    documents: list[str]
    model: str | None = None
    top_n: Annotated[int, Meta(ge=0)] = 0
    use_activation: bool | None = None
