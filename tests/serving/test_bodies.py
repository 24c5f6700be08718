"""Request bodies in memory share a bound, and are freed without the cycle collector."""

import asyncio
import gc
from collections.abc import AsyncIterator

import pytest

from detcompile.serving import bodies as bodies_module
from detcompile.serving.bodies import MOST_HELD, SHORT, BodyLimiter
from detcompile.serving.http_errors import HTTPError
from detcompile.serving.limiter import Reservation
from detcompile.serving.metrics import Metrics
from tests.serving.instant_fleet import InstantFleet

LARGEST = 2 * SHORT
PART = SHORT // 2


class Sender:
    """A client that sends a body in parts."""

    def __init__(self, limiter: BodyLimiter, owner: str = "") -> None:
        self.reservation = Reservation()
        self._parts: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.headers = {"content-type": "application/json"}
        self.task = asyncio.create_task(limiter.read(self, owner, self.reservation))  # type: ignore[arg-type]

    async def stream(self) -> AsyncIterator[bytes]:
        while (part := await self._parts.get()) is not None:
            yield part

    async def send(self, num_bytes: int, *, ends: bool = False) -> int | None:
        """Send bytes and perhaps the end; return a refusal's status, 200 for a whole body, or None."""
        for _ in range(num_bytes // PART):
            self._parts.put_nowait(bytes(PART))
        if ends:
            self._parts.put_nowait(None)
        for _ in range(20):
            await asyncio.sleep(0)
        return self.status

    @property
    def status(self) -> int | None:
        if not self.task.done():
            return None
        error = self.task.exception()
        assert error is None or isinstance(error, HTTPError)
        return 200 if error is None else error.status


def limiter_of(keys: str = "") -> BodyLimiter:
    return BodyLimiter(LARGEST, Metrics(InstantFleet(), 8, 100), keys)


async def test_stalled_bodies_are_dropped_for_new_ones() -> None:
    limiter = limiter_of()
    slow = [Sender(limiter) for _ in range(MOST_HELD * 2)]
    for sender in slow:  # as many as there is room for, all but their ends, of half the size
        assert await sender.send(SHORT) is None
    assert limiter.num_bytes == MOST_HELD * LARGEST
    other = Sender(limiter)
    assert await other.send(LARGEST, ends=True) == 200
    assert [sender.status for sender in slow[:3]] == [429, 429, None] and limiter.num_bytes == MOST_HELD * LARGEST
    assert await slow[2].send(PART) is None and slow[3].status == 429  # one that goes on is not the next to go
    for sender in [*slow, other]:
        sender.task.cancel()
        await asyncio.gather(sender.task, return_exceptions=True)
        sender.reservation.release()
    assert not (limiter.num_bytes or limiter._arriving or limiter._owners)


async def test_bodies_of_running_requests_count_toward_bound() -> None:
    limiter = limiter_of()
    held = [Sender(limiter) for _ in range(MOST_HELD)]
    for sender in held:
        assert await sender.send(LARGEST, ends=True) == 200
    refused, short = Sender(limiter), Sender(limiter)
    assert await refused.send(LARGEST, ends=True) == 429
    assert await short.send(SHORT, ends=True) == 200  # one that is never refused
    for sender in (held[0], refused, short):
        sender.reservation.release()
    assert await Sender(limiter).send(LARGEST, ends=True) == 200


async def test_one_key_gets_half_of_the_bound_at_most() -> None:
    limiter = limiter_of("ab")
    for _ in range(MOST_HELD // 2):
        assert await Sender(limiter, "a").send(LARGEST, ends=True) == 200
    arriving = Sender(limiter, "b")
    assert await arriving.send(SHORT) is None
    assert await Sender(limiter, "a").send(LARGEST, ends=True) == 429
    assert arriving.status is None and await arriving.send(SHORT, ends=True) == 200


async def test_oversized_body_is_refused() -> None:
    limiter = limiter_of()
    assert await Sender(limiter).send(LARGEST + PART) == 413
    assert await Sender(limiter).send(LARGEST, ends=True) == 200


async def test_garbage_collection_runs_after_enough_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    collected: list[int] = []
    monkeypatch.setattr(bodies_module, "COLLECTION_BYTES", 3 * LARGEST)
    monkeypatch.setattr(gc, "collect", lambda: collected.append(1))

    limiter = limiter_of()
    for number in range(8):
        sender = Sender(limiter)
        assert await sender.send(LARGEST, ends=True) == 200
        sender.reservation.release()
        assert len(collected) == (number + 1) // 4
