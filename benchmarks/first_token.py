"""Measure the seconds from importing detcompile to an engine's first token, with empty and with full caches.

    python -m benchmarks.first_token --commit $(git rev-parse --short HEAD) [--layers 36] [--before FOLDER]

Qwen3-8B's shape in bf16 on a GPU, or the embedded model's on a CPU, with random weights that are on the device before
the clock starts. Each measurement is a separate process; ``--before`` measures another version's sources in the same
run, with empty caches. The token and its logprob are compared between all of them; the script fails if they differ.

Writes benchmarks/results/first-token-<device>-<commit>.json.
"""

import argparse
import cProfile
import itertools
import json
import os
import pstats
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
LOOPS = 20_000_000  # additions of the Python loop that tells how fast a host is
PROMPT = list(range(3, 43))


def measure(num_layers: int, profile: bool) -> dict[str, Any]:
    """Import, compile, make an engine and draw a token in this process."""
    started = time.perf_counter()
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.qwen3 import Qwen3Config

    imported = time.perf_counter() - started
    on_gpu = torch.cuda.is_available()
    sizes = (4096, 12288, 32, 8, 151936) if on_gpu else (256, 640, 8, 4, 2048)
    hidden, intermediate, heads, kv_heads, vocab = sizes
    config = Qwen3Config(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocab,
        num_hidden_layers=num_layers,
        head_dim=128 if on_gpu else 32,
        max_position_embeddings=40960 if on_gpu else 2048,
        rope_theta=1e6,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if on_gpu else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if on_gpu else torch.float32).eval()
    profiler = cProfile.Profile()
    times = [time.perf_counter()]
    import detcompile

    compiled = detcompile.compile(model)
    times.append(time.perf_counter())
    if profile:
        profiler.enable()
    engine = compiled.engine()
    profiler.disable()
    times.append(time.perf_counter())
    (output,) = engine.generate([PROMPT], detcompile.SamplingParams(max_tokens=1, temperature=0.0, logprobs=1))
    times.append(time.perf_counter())
    if profile:
        for order in ("cumulative", "tottime"):
            pstats.Stats(profiler, stream=sys.stderr).sort_stats(order).print_stats(60)
    spans = [later - earlier for earlier, later in itertools.pairwise(times)]
    result = {"import of torch and transformers, s": imported}
    result |= dict(zip(("compile and import, s", "engine, s", "first token, s"), spans))
    result["all, s"] = imported + sum(spans)
    return result | {"token": f"{output.outputs[0].token_ids} {float(output.outputs[0].cumulative_logprob).hex()}"}


def measured(num_layers: int, folder: str, sources: str, profile: bool = False) -> dict[str, Any]:
    """Run ``measure`` in a process with caches in ``folder`` and detcompile from ``sources``."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "DETCOMPILE_CACHE": f"{folder}/own"}
    paths = [sources, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment |= {"TRITON_CACHE_DIR": f"{folder}/triton", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-P", __file__, "--one", "--layers", str(num_layers), *["--profile"] * profile]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def host_seconds() -> float:
    """Return the seconds of a Python loop of LOOPS additions."""
    started, total = time.perf_counter(), 0
    for number in range(LOOPS):
        total += number
    return time.perf_counter() - started


def main() -> int:
    """Measure. Return 1 if tokens differed, otherwise 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--before", help="folder of another version's sources")
    parser.add_argument("--profile", action="store_true", help="print where an engine's start with full caches goes")
    parser.add_argument("--one", action="store_true", help="measure in this process and print one JSON object")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.layers, arguments.profile)))
        return 0
    here = str(Path(__file__).resolve().parent.parent)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        plan = [("empty", here, False), ("full", here, False)]
        plan += [("full, profiled", here, True)] * arguments.profile
        for caches, sources, profile in plan:
            rows.append({"version": "this", "caches": caches} | measured(arguments.layers, folder, sources, profile))
            print(json.dumps(rows[-1]), flush=True)
    if arguments.before:
        with tempfile.TemporaryDirectory() as folder:
            rows.append({"version": "before", "caches": "empty"} | measured(arguments.layers, folder, arguments.before))
            print(json.dumps(rows[-1]), flush=True)
    tokens = {row["token"] for row in rows}
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    result = {
        "commit": arguments.commit,
        "device": device,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "host, s": round(host_seconds(), 2),
        "tokens differ": len(tokens) > 1,
        "rows": [{k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()} for row in rows],
    }
    name = device.lower().replace(" ", "-")
    (RESULTS / f"first-token-{name}-{arguments.commit}.json").write_text(json.dumps(result, indent=1) + "\n")
    return int(len(tokens) > 1)


if __name__ == "__main__":
    sys.exit(main())
