"""Placement: which engine serves an answer, and the blocklist of requests that none serves.

A router's choice cannot change a bit of an answer.
"""

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

import msgspec

from detcompile.runtime.requests.poison_guard import ALONE_DEATHS
from detcompile.serving.engines.answers import Answer
from detcompile.serving.engines.engine_link import EngineLink
from detcompile.serving.http_errors import BlockedRequestError

DECODE_TOKENS = 16  # cost of a running sample, in prompt tokens
BLOCKED_SECONDS = 600.0
MOST_BLOCKED = 10_000


class Router:
    """Sends an answer to the engine that has to compute the fewest tokens before the answer is done.

    It remembers the blocks of prompts sent to each engine (LRU) and assumes that they are in the engine's prefix cache.
    """

    def __init__(self) -> None:
        self._sent: dict[EngineLink, OrderedDict[bytes, None]] = {}

    def choose(self, links: Sequence[EngineLink], answer: Answer) -> EngineLink:
        """Return the engine for an answer; of equally good ones the first."""
        if len(links) == 1:
            return links[0]
        hello = links[0].hello
        assert hello is not None
        digests = _digests(answer.prompt_ids, hello.block_size, answer.cache_salt)

        def cost(link: EngineLink) -> int:
            known = self._sent.get(link, OrderedDict())
            num_cached = next((i for i, digest in enumerate(digests) if digest not in known), len(digests))
            waiting = sum(len(other.prompt_ids) for other in link.answers.values() if other.first_token is None)
            drawing = sum(other.params.n for other in link.answers.values())
            return len(answer.prompt_ids) - num_cached * hello.block_size + waiting + DECODE_TOKENS * drawing

        chosen = min(links, key=cost)
        self._remember(chosen, digests, hello.num_blocks)
        return chosen

    def forget(self, link: EngineLink) -> None:
        """Drop what is known about an ended engine's cache."""
        self._sent.pop(link, None)

    def _remember(self, link: EngineLink, digests: Sequence[bytes], most: int) -> None:
        sent = self._sent.setdefault(link, OrderedDict())
        for digest in reversed(digests):  # evict a prompt's first block last
            sent[digest] = None
            sent.move_to_end(digest)
        while len(sent) > most:
            sent.popitem(last=False)


class Blocklist:
    """Requests that crashed engines while running alone, by content without seed; refused for 10 minutes.

    Clients retry failed requests, OpenAI's client by itself. Each retry would cost more engines, including those that
    serve other clients.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[bytes, float] = {}  # time of addition, oldest first

    def add(self, answer: Answer) -> None:
        """Fail an answer and block its request."""
        self._known[_digest_of(answer)] = self._clock()
        while len(self._known) > MOST_BLOCKED:
            del self._known[next(iter(self._known))]
        answer.fail(BlockedRequestError(f"{ALONE_DEATHS} engines ended while they served this request alone"))

    def require_unblocked(self, answer: Answer) -> None:
        """Raise BlockedRequestError if the answer's request is blocked."""
        if not self._known:
            return
        at = self._known.get(_digest_of(answer))
        if at is not None and self._clock() - at < BLOCKED_SECONDS:
            minutes = BLOCKED_SECONDS / 60
            raise BlockedRequestError(
                f"engines ended while they served this request alone; it is not tried again for {minutes:.0f} minutes"
            )


def _digests(token_ids: Sequence[int], block_size: int, cache_salt: str) -> list[bytes]:
    """Return a digest for each full block, of the salt and all tokens up to its end."""
    digests, running = [], hashlib.blake2b(cache_salt.encode(), digest_size=16)
    for end in range(block_size, len(token_ids) + 1, block_size):
        running.update(b"".join(token.to_bytes(4, "little") for token in token_ids[end - block_size : end]))
        digests.append(running.digest())
    return digests


def _digest_of(answer: Answer) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode(answer.content)).digest()
