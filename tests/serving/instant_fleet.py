"""Engines without a process: each answer gets two tokens in the next turns of the event loop."""

import asyncio
from array import array

from msgspec.structs import replace

from detcompile.serving.engines.answers import Answer, AuxiliaryTask, Pooling, Verification, given_params
from detcompile.serving.engines.fleet import Fleet
from detcompile.serving.engines.protocol import (
    LENGTH,
    Add,
    Delta,
    EngineSpec,
    Hello,
    Pooled,
    PoolingFacts,
    SampleDelta,
    Token,
    Verified,
    decode_command,
    frame,
)
from detcompile.serving.receipts.verdict import Verdict
from tests.serving.scripted_engine import HELLO

__all__ = ["EMBEDDER", "InstantFleet"]

NUM_TOKENS = 2
EMBEDDER = replace(
    HELLO, pooling=PoolingFacts(task="embed", num_columns=2, labels=[], each_alone=False, reads_token_types=False)
)


class InstantFleet(Fleet):
    """A fleet that answers everything at once. ``known`` describes the model."""

    known = HELLO
    ready = True  # type: ignore[assignment]

    async def start(self, spec: EngineSpec) -> None:
        self.hello = self.known

    async def settled(self) -> Hello:
        return self.known

    def add(self, answer: Answer) -> None:
        if isinstance(answer, AuxiliaryTask):
            decode_command(frame(answer.command())[LENGTH.size :])  # check that the command can be sent
            self._later(self._settle, answer)
            return
        add = Add(answer.request_id, answer.prompt_ids, given_params(answer.params), answer.priority)
        decode_command(frame(add)[LENGTH.size :])
        self._later(self._draw, answer)

    def cancel(self, answer: Answer) -> None:
        pass

    async def stop(self) -> None:
        pass

    def _later(self, work, answer: Answer) -> None:
        asyncio.get_running_loop().call_soon(work, answer)

    def _draw(self, answer: Answer) -> None:
        if answer.finished:  # canceled
            return
        logprobs = None if answer.params.logprobs is None else [Token(40, -0.5, [])]
        last = answer.samples[0].token_ids == array("i", [40] * (NUM_TOKENS - 1))
        samples = [SampleDelta(n, [40], logprobs, "length" if last else None, None) for n in range(answer.params.n)]
        delta = Delta(answer.request_id, samples, last, None, None, 0, None)
        answer.extend(delta)
        self._on_delta(answer, delta)
        answer.signal.notify()
        self._later(self._draw, answer)

    def _settle(self, errand: Answer) -> None:
        if isinstance(errand, Verification):
            errand.finish(Verified(errand.request_id, Verdict(outcome="equal")))
        elif isinstance(errand, Pooling):
            errand.finish(Pooled(errand.request_id, 2, array("f", [0.0, 1.0] * len(errand._arguments[0])).tobytes()))
