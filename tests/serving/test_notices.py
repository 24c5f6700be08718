"""Readers are woken in turns of the event loop, and what they have not taken yet comes with what is newer."""

import asyncio
from itertools import pairwise

from detcompile.serving.engines.notices import TOGETHER, News, Notices


def test_readers_are_woken_some_at_a_time_and_in_order() -> None:
    async def scenario() -> tuple[list[int], list[int]]:
        bells, notices = [News() for _ in range(3 * TOGETHER)], Notices()
        woken: list[int] = []
        turns: list[int] = []

        async def read(index: int) -> None:
            while True:
                await bells[index].wait(bells[index].count)
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


def test_news_are_heard_by_every_reader_and_missed_by_none() -> None:
    async def scenario() -> list[bool]:
        news = News()
        seen = news.count
        news.tell()
        await asyncio.wait_for(news.wait(seen), 1)  # told before anybody waited
        readers = [asyncio.create_task(news.wait(news.count)) for _ in range(3)]
        await asyncio.sleep(0)
        unheard = [not reader.done() for reader in readers]
        readers[1].cancel()
        await asyncio.sleep(0)
        news.tell()
        await asyncio.wait_for(asyncio.gather(readers[0], readers[2]), 1)
        return unheard

    assert asyncio.run(scenario()) == [True] * 3
