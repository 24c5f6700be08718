"""Readers are woken in turns of the event loop, and what they have not taken yet comes with what is newer."""

import asyncio
from itertools import pairwise

from detcompile.serving.engines.notices import TOGETHER, Bell, Notices


def test_readers_are_woken_some_at_a_time_and_in_order() -> None:
    async def scenario() -> tuple[list[int], list[int]]:
        bells, notices = [Bell() for _ in range(3 * TOGETHER)], Notices()
        woken: list[int] = []
        turns: list[int] = []

        async def read(index: int) -> None:
            while True:
                await bells[index].wait()
                woken.append(index)

        tasks = [asyncio.create_task(read(index)) for index in range(len(bells))]
        await asyncio.sleep(0)
        for bell in bells:
            notices.put(bell)
        notices.put(bells[-1])  # twice before its turn: told once
        while len(woken) < len(bells):
            turns.append(len(woken))
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        return woken, turns

    woken, turns = asyncio.run(scenario())
    assert woken == list(range(3 * TOGETHER))
    assert {after - before for before, after in pairwise(turns)} <= {0, TOGETHER} and len(turns) >= 3


def test_a_bell_that_rang_before_anybody_waited_is_heard_once() -> None:
    async def scenario() -> bool:
        bell = Bell()
        bell.ring()
        bell.ring()
        await asyncio.wait_for(bell.wait(), 1)
        again = asyncio.create_task(bell.wait())
        await asyncio.sleep(0)
        unheard = not again.done()
        bell.ring()
        await asyncio.wait_for(again, 1)
        cancelled = asyncio.create_task(bell.wait())
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        bell.ring()  # of a reader that is gone
        await asyncio.wait_for(bell.wait(), 1)
        return unheard

    assert asyncio.run(scenario())
