"""Run benchmarks in turn: python -m benchmarks [templates model ...], or make bench [BENCHMARKS="templates model"].

Without names, all that this machine has GPUs for run; cpu measures two cores of the machine. Each writes its
JSON to benchmarks/results/.
"""

import argparse
import subprocess
import sys

import torch

SCRIPTS = (
    "templates", "training_ops", "experts_and_quantized", "model", "serve", "memory", "speculation", "at_size", "cpu",
)  # fmt: skip
SEVERAL_GPUS = ("collectives",)


def main() -> int:
    """Run the benchmarks named on this commit; the exit code is the number that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = ", ".join(SCRIPTS + SEVERAL_GPUS)
    parser.add_argument("names", nargs="*", metavar="name", help=known)
    names = parser.parse_args().names
    if unknown := sorted(set(names) - set(SCRIPTS + SEVERAL_GPUS)):
        parser.error(f"no benchmark is called {', '.join(unknown)}; there are {known}")
    if names != ["cpu"] and not torch.cuda.is_available():
        sys.exit("the benchmarks need a CUDA GPU, all but cpu")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    name = commit.stdout.strip() or "unknown"
    failed = 0
    for script in names or SCRIPTS + (SEVERAL_GPUS if torch.cuda.device_count() > 1 else ()):
        print(f"== {script}", flush=True)
        command = [sys.executable, "-m", f"benchmarks.{script}", "--commit", name]
        failed += subprocess.run(command, check=False).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
