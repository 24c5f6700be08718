"""Measure seconds from a model to its first call, by depth: a region for each distinct layer, or one whole graph.

    python -m benchmarks.start --commit $(git rev-parse --short HEAD) [--layers 4,36] [--whole 4]

On a CPU the model has the embedded model's shape with random float32 weights, on a GPU Qwen3-8B's in bf16. Each
measurement is a separate process. The first starts with empty caches of Inductor and detcompile, except for CPU
templates (cold); the second compiles with the first one's kernels (warm kernels); the third loads a program that a
process between them kept (warm). CPU seconds include child processes. The logits of one call are compared by bytes
between all measurements of a depth; the script fails if they differ.

Writes benchmarks/results/start-<device>-<commit>.json.
"""

import argparse
import hashlib
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
KINDS = ("regions", "one graph")
CACHES = {"cold": "0", "warm kernels": "0", "keeping": "1", "warm": "1"}  # whether programs are kept


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(part.ru_utime + part.ru_stime for part in used)


def measure(kind: str, num_layers: int) -> dict[str, Any]:
    """Import, compile and call a model in this process."""
    started, used = time.perf_counter(), cpu_seconds()
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import detcompile
    from benchmarks.model import build
    from detcompile.models.hub import TINY_FOLDER
    from detcompile.passes import program_source
    from detcompile.templates import cpp_dispatch
    from detcompile.templates.cpu import library

    result = {"import, s": time.perf_counter() - started, "import, CPU s": cpu_seconds() - used}
    if kind == "one graph":
        program_source.find_repeats = lambda *_: None
    torch.manual_seed(0)
    if torch.cuda.is_available():
        model = build(num_layers)
    else:
        config = AutoConfig.from_pretrained(TINY_FOLDER)
        config.layer_types = (num_layers * config.layer_types)[:num_layers]
        config.num_hidden_layers = num_layers
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    if not torch.cuda.is_available():
        library.library(), cpp_dispatch.direct_ops()
    started, used = time.perf_counter(), cpu_seconds()
    compiled = detcompile.compile(model)
    result |= {"compile, s": time.perf_counter() - started, "compile, CPU s": cpu_seconds() - used}
    ids = torch.arange(1, 41, device=compiled.device)[None]
    started = time.perf_counter()
    logits = compiled(ids).logits
    result["first call, s"] = time.perf_counter() - started
    return result | {"logits": hashlib.sha256(logits.float().cpu().numpy().tobytes()).hexdigest()}


def measured(kind: str, num_layers: int, folder: str, programs: str) -> dict[str, Any]:
    """Run ``measure`` in a process with caches in ``folder``."""
    caches = {"DETCOMPILE_KEEP_PROGRAMS": programs}
    caches |= {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "DETCOMPILE_CACHE": f"{folder}/detcompile"}
    command = [sys.executable, "-m", "benchmarks.start", "--one", kind, "--layers", str(num_layers)]
    environment = os.environ | caches | {"TRITON_CACHE_DIR": f"{folder}/triton"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> int:
    """Measure every depth. Return 1 if bits differed, otherwise 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--layers", default="4,36", help="depths, comma-separated")
    parser.add_argument("--whole", default="4", help="depths at which one graph of all layers is measured too")
    parser.add_argument("--one", choices=KINDS, help="measure in this process and print one JSON object")
    arguments = parser.parse_args()
    depths = [int(part) for part in arguments.layers.split(",")]
    if arguments.one:
        print(json.dumps(measure(arguments.one, depths[0])))
        return 0
    rows, differ = [], False
    for num_layers in depths:
        logits = set()
        for kind in KINDS if num_layers in map(int, arguments.whole.split(",")) else KINDS[:1]:
            with tempfile.TemporaryDirectory() as folder:
                for caches, programs in CACHES.items():
                    if kind == "one graph" and programs == "1":
                        continue  # this one is not kept
                    result = measured(kind, num_layers, folder, programs)
                    if caches == "keeping":
                        continue
                    row = {"layers": num_layers, "program": kind, "caches": caches} | result
                    logits.add(row.pop("logits"))
                    rows.append({key: round(v, 2) if isinstance(v, float) else v for key, v in row.items()})
                    print(json.dumps(rows[-1]), flush=True)
        differ |= len(logits) > 1
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU"
    result = {
        "commit": arguments.commit,
        "device": device,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "logits differ": differ,
        "rows": rows,
    }
    name = device.lower().replace(" ", "-")
    (RESULTS / f"start-{name}-{arguments.commit}.json").write_text(json.dumps(result, indent=1) + "\n")
    return int(differ)


if __name__ == "__main__":
    sys.exit(main())
