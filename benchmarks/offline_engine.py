"""The engine of benchmarks.serving --beside-offline that runs in the benchmark's own process."""

import time
from typing import Any

from detcompile.commands.verification import ModelSpec
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.requests.sampling_params import SamplingParams

__all__ = ["Offline"]


class Offline:
    """A compiled model and an engine, as ``detcompile serve`` makes them.

    Args:
        model: a name that compile() takes.
        random: draw the weights, by the seed that the command line draws them by.
        num_blocks: of the KV cache.

    Attributes:
        has_texts: whether answers have texts.
    """

    def __init__(self, model: str, random: bool, num_blocks: int) -> None:
        compiled = ModelSpec(model, random).compile(1)
        self.has_texts = compiled.tokenizer is not None
        self.vocab_size = compiled.vocab_size
        self._engine = compiled.engine(EngineConfig(num_blocks=num_blocks))

    def run(self, requests: list[tuple[float, dict[str, Any]]]) -> dict[str, Any]:
        """All requests at once: seconds, tokens a second, and the texts."""
        prompts = [body["prompt"] for _, body in requests]
        names = ("temperature", "max_tokens", "ignore_eos", "seed")
        params = [SamplingParams(**{name: body[name] for name in names}) for _, body in requests]
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
