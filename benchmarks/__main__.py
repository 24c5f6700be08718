"""Every GPU benchmark in turn: python -m benchmarks, or make bench. Each writes its JSON to benchmarks/results/."""

import subprocess
import sys

import torch

SCRIPTS = ("templates", "experts_and_quantized", "model", "dispatch", "serve", "speculation", "at_size")
SEVERAL_GPUS = ("collectives",)


def main() -> int:
    """Run SCRIPTS on this commit, and SEVERAL_GPUS where there are; the exit code is the number that failed."""
    if not torch.cuda.is_available():
        sys.exit("the benchmarks need a CUDA GPU")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    name = commit.stdout.strip() or "unknown"
    failed = 0
    for script in SCRIPTS + (SEVERAL_GPUS if torch.cuda.device_count() > 1 else ()):
        print(f"== {script}", flush=True)
        command = [sys.executable, "-m", f"benchmarks.{script}", "--commit", name]
        failed += subprocess.run(command, check=False).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
