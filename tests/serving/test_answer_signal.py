"""Readers wake up in turns of the event loop, and get everything that is new at once."""

import asyncio
from itertools import pairwise

from detcompile.serving.engines.answers import WAKES_PER_TURN, AnswerSignal, WakeQueue


def test_readers_wake_in_order_in_batches() -> None:
    async def scenario() -> tuple[list[int], list[int]]:
        bells, queue = [AnswerSignal() for _ in range(3 * WAKES_PER_TURN)], WakeQueue()
        woken: list[int] = []
        turns: list[int] = []

        async def read(index: int) -> None:
            while True:
                await bells[index].wait(bells[index].count)
                woken.append(index)

        tasks = [asyncio.create_task(read(index)) for index in range(len(bells))]
        await asyncio.sleep(0)
        for bell in bells:
            queue.put(bell)
        queue.put(bells[-1])  # twice before its turn: woken once
        while len(woken) < len(bells):
            turns.append(len(woken))
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        return woken, turns

    woken, turns = asyncio.run(scenario())
    assert woken == list(range(3 * WAKES_PER_TURN))
    assert {after - before for before, after in pairwise(turns)} <= {0, WAKES_PER_TURN} and len(turns) >= 3


def test_signal_reaches_every_reader() -> None:
    async def scenario() -> list[bool]:
        signal = AnswerSignal()
        seen = signal.count
        signal.notify()
        await asyncio.wait_for(signal.wait(seen), 1)  # notified before anybody waited
        readers = [asyncio.create_task(signal.wait(signal.count)) for _ in range(3)]
        await asyncio.sleep(0)
        unheard = [not reader.done() for reader in readers]
        readers[1].cancel()
        await asyncio.sleep(0)
        signal.notify()
        await asyncio.wait_for(asyncio.gather(readers[0], readers[2]), 1)
        return unheard

    assert asyncio.run(scenario()) == [True] * 3
