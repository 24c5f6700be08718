"""Log-probabilities as chats and responses tell them: tokens by name and bytes, likeliest alternatives first."""

from typing import Any

from detcompile.serving.engines.protocol import Token
from detcompile.serving.tokenizer_pool import TokenizerPool

__all__ = ["chat_entry", "finite"]

LEAST_LOGPROB = -9999.0  # OpenAI's value for minus infinity, which JSON lacks


def chat_entry(texts: TokenizerPool, entry: Token) -> dict[str, Any]:
    """Return a token with its alternatives, in the form of chats and responses."""
    top = [_named(texts, token, logprob) for token, logprob in entry.top]
    return _named(texts, entry.token_id, entry.logprob) | {"top_logprobs": top}


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can represent."""
    return max(logprob, LEAST_LOGPROB)


def _named(texts: TokenizerPool, token: int, logprob: float) -> dict[str, Any]:
    text = texts.bytes_of(token)
    return {
        "token": texts.name_of(token),
        "logprob": finite(logprob),
        "bytes": list(text) if texts.present else None,
    }
