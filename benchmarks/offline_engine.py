"""The engine of benchmarks.serving --beside-offline and --first-token that runs in the benchmark's own process."""

import asyncio
import time
from typing import Any

from detcompile.models.spec import ModelSpec
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.requests.sampling_params import SamplingParams

__all__ = ["Offline"]

NAMES = ("temperature", "max_tokens", "ignore_eos", "seed")


class Offline:
    """A compiled model and an engine, as ``detcompile serve`` makes them.

    Args:
        model: a name that compile() takes.
        random: draw random weights, with the seed of the command line.
        num_blocks: blocks of the KV cache.

    Attributes:
        has_texts: whether answers have texts.
    """

    def __init__(self, model: str, random: bool, num_blocks: int) -> None:
        compiled = ModelSpec(model, random).compile(1)
        self.has_texts = compiled.tokenizer is not None
        self.vocab_size = compiled.vocab_size
        self._engine = compiled.engine(EngineConfig(num_blocks=num_blocks))

    def run(self, requests: list[tuple[float, dict[str, Any]]]) -> dict[str, Any]:
        """Run all requests at once; return seconds, tokens a second, and the texts."""
        prompts = [body["prompt"] for _, body in requests]
        params = [SamplingParams(**{name: body[name] for name in NAMES}) for _, body in requests]
        start, used = time.monotonic(), time.process_time()
        outputs = self._engine.generate(prompts, params, progress=False)
        seconds = time.monotonic() - start
        num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        return {
            "seconds": round(seconds, 3),
            "tokens": num_tokens,
            "tokens a second": round(num_tokens / seconds, 1),
            "CPU seconds": round(time.process_time() - used, 2),
            "texts": [output.outputs[0].text for output in outputs] if self.has_texts else [],
        }

    def first_tokens(self, requests: list[tuple[float, dict[str, Any]]]) -> list[float]:
        """Send each request at its time; return the seconds to its first token from ``engine.stream``."""
        return asyncio.run(self._first_tokens(requests))

    async def _first_tokens(self, requests: list[tuple[float, dict[str, Any]]]) -> list[float]:
        begin = time.monotonic() + 0.5

        async def ask(seconds: float, body: dict[str, Any]) -> float:
            await asyncio.sleep(begin + seconds - time.monotonic())
            sent, first = time.monotonic(), 0.0
            params = SamplingParams(**{name: body[name] for name in NAMES})
            async for _ in self._engine.stream(body["prompt"], params):
                first = first or time.monotonic() - sent
            return first

        return list(await asyncio.gather(*(ask(*request) for request in requests)))
