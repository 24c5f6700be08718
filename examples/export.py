"""Write the compiled model to one file, answer from it in another process, and see that no byte of the answers changed.

    python examples/export.py smollm2     # after `detcompile fetch smollm2`
    python examples/export.py             # the embedded model: no download

Needs no GPU. Compiling ahead of time takes a while, loading does not.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import detcompile
from detcompile import CompiledModel, EngineConfig, SamplingParams

PROMPTS = ['def mean(values: list[float]) -> float:\n    """Return the arithmetic mean."""\n', "import json\n"]


def answers(model: CompiledModel) -> list[tuple[str, float]]:
    """Return the answer to each prompt and the sum of its logprobs."""
    params = [SamplingParams(temperature=0.8, max_tokens=32, logprobs=1, seed=seed) for seed in range(len(PROMPTS))]
    outputs = model.engine(EngineConfig(num_blocks=64)).generate(PROMPTS, params, progress=False)
    return [(output.outputs[0].text, output.outputs[0].cumulative_logprob) for output in outputs]


def answer_from(path: str) -> None:
    """Answer in the other process, which has only the file."""
    start = time.perf_counter()
    model = detcompile.load(path)
    seconds = time.perf_counter() - start
    print(json.dumps({"fingerprint": model.fingerprint, "seconds": seconds, "answers": answers(model)}))


def main(name: str) -> None:
    model = detcompile.compile(name)
    with tempfile.TemporaryDirectory() as folder:
        path = detcompile.export(model, Path(folder) / "model.pt2")
        print(f"--- {path.name}: {path.stat().st_size / 2**20:.1f} MiB, weights inside")
        child = subprocess.run(
            [sys.executable, __file__, "load", str(path)], capture_output=True, text=True, check=True
        )
    loaded = json.loads(child.stdout)
    print(f"--- loaded in {loaded['seconds']:.2f} s by another process")

    here = answers(model)
    assert [tuple(answer) for answer in loaded["answers"]] == here  # text, and logprobs to the last bit
    assert loaded["fingerprint"] == model.fingerprint
    for prompt, (text, logprob) in zip(PROMPTS, here):
        print(f"--- sum of logprobs {logprob!r}")
        print(f"{prompt}{text}")
    print(f"--- equal, compiled and loaded; fingerprint {model.fingerprint}")


if __name__ == "__main__":
    names = sys.argv[1:] or ["tiny"]
    answer_from(names[1]) if names[0] == "load" else main(names[0])
