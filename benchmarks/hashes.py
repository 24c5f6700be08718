"""Report hashes of an 8B model's tokens and logits on one GPU, start-up time, kernel count and workload times.

    python -m benchmarks.hashes --commit $(git rev-parse --short HEAD) [--tp-sizes 1 | --arithmetic exact8x16]

Qwen3-8B's shape with random weights in bf16 and the workloads of benchmarks.serve. Tokens are those of workload (c),
logits those of a dense call. EXPECTED holds the hashes of earlier commits, equal on an H100 and an H200; the script
fails if one differs. Writes benchmarks/results/hashes-<device>-<commit>.json.
"""

import argparse
import dataclasses
import hashlib
import json
import sys
import time
from pathlib import Path

import torch
import triton

import detcompile
from benchmarks.model import build
from benchmarks.serve import CONFIG, workload
from detcompile import Numerics
from detcompile.runtime.engine import Engine

LAYERS = 36
EXPECTED = {
    (1,): {"tokens": "6b795d9056ad0056", "logits": "b6e3e4bebc1ac17e"},
    (1, 2, 4, 8): {"tokens": "b384207f04e6e1ca", "logits": "5def5fbfc8d46352"},
}


def hashed(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def seconds_of(engine: Engine, name: str, repeats: int) -> tuple[list[float], str]:
    """Return the seconds of a workload's runs, and the hash of its tokens."""
    seconds, tokens = [], ""
    for _ in range(repeats):
        prompts, params = workload(name)
        started = time.perf_counter()
        outputs = engine.generate(prompts, params, progress=False)
        torch.cuda.synchronize()
        seconds.append(round(time.perf_counter() - started, 3))
        tokens = hashed("".join(str(output.outputs[0].token_ids) for output in outputs).encode())
    return seconds, tokens


def main() -> int:
    """Measure. Return 1 if a hash differs from the expected one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--tp-sizes", default="1", help="comma-separated")
    parser.add_argument("--arithmetic", default="float")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--workloads", default="abc")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    exact = arguments.arithmetic != "float"
    sizes = (1,) if exact else tuple(map(int, arguments.tp_sizes.split(",")))
    counts = {"kernels compiled": 0, "kernels loaded": 0}

    def note(*, cache_hit: bool, **_: object) -> None:
        counts["kernels loaded" if cache_hit else "kernels compiled"] += 1

    triton.knobs.compilation.listener = note
    model = build(LAYERS)
    torch.cuda.synchronize()
    started = time.perf_counter()
    compiled = detcompile.compile(model, numerics=Numerics(tp_sizes=sizes, arithmetic=arguments.arithmetic))
    times = {"compile": time.perf_counter() - started}
    engine = compiled.engine(CONFIG)
    times["engine"] = time.perf_counter() - started - times["compile"]
    prompts, params = workload("a")
    engine.generate(prompts, [dataclasses.replace(params[0], max_tokens=1)], progress=False)
    times["compile to first token"] = time.perf_counter() - started
    report = {
        "commit": arguments.commit,
        "hardware": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "tp_sizes": sizes,
        "arithmetic": arguments.arithmetic,
        "seconds": {name: round(value, 2) for name, value in times.items()},
        "start": dict(counts),
    }
    tokens = ""
    for name in arguments.workloads:
        report[name], tokens = seconds_of(engine, name, arguments.repeats)
        print(name, report[name], flush=True)
    ids = torch.randint(0, 100000, (3, 700), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        logits = compiled(ids.cuda()).logits
    report["hashes"] = {"tokens": tokens, "logits": hashed(logits.cpu().view(torch.uint8).numpy().tobytes())}
    report["as expected"] = report["hashes"] == EXPECTED[sizes] if sizes in EXPECTED and not exact else None
    name = torch.cuda.get_device_name().replace(" ", "-").lower()
    suffix = arguments.arithmetic if exact else "x".join(map(str, sizes))
    (arguments.out / f"hashes-{name}-{arguments.commit}-{suffix}.json").write_text(json.dumps(report, indent=1))
    print(json.dumps(report), flush=True)
    return int(report["as expected"] is False)


if __name__ == "__main__":
    sys.exit(main())
