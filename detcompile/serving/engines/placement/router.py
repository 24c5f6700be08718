"""Router: which engine an answer goes to. No choice made here can change a bit."""

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from detcompile.serving.engines.answers import Answer
from detcompile.serving.engines.engine_link import EngineLink

__all__ = ["Router"]

DECODE_TOKENS = 16  # a sample that draws costs an engine about what so many prompt tokens cost it


class Router:
    """Sends an answer where the fewest tokens are to be computed before it is done: its own and those before it.

    It keeps for each engine which blocks of prompts were sent there, least recently used ones first to go, and takes
    an engine's prefix cache to have them.
    """

    def __init__(self) -> None:
        self._sent: dict[EngineLink, OrderedDict[bytes, None]] = {}

    def choose(self, links: Sequence[EngineLink], answer: Answer) -> EngineLink:
        """The engine of these for an answer; of equal ones the first."""
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
        """An engine has ended, and its cache with it."""
        self._sent.pop(link, None)

    def _remember(self, link: EngineLink, digests: Sequence[bytes], most: int) -> None:
        sent = self._sent.setdefault(link, OrderedDict())
        for digest in reversed(digests):  # the first block of a prompt is the last to go
            sent[digest] = None
            sent.move_to_end(digest)
        while len(sent) > most:
            sent.popitem(last=False)


def _digests(token_ids: Sequence[int], block_size: int, cache_salt: str) -> list[bytes]:
    """A digest for each full block, of it, all before it, and the salt."""
    digests, running = [], blake2b(cache_salt.encode(), digest_size=16)
    for end in range(block_size, len(token_ids) + 1, block_size):
        running.update(b"".join(token.to_bytes(4, "little") for token in token_ids[end - block_size : end]))
        digests.append(running.digest())
    return digests
