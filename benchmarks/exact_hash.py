"""Hash a model's logits over a fixed text: exact arithmetic (docs/exact.md) gives one hash on every machine.

    python -m benchmarks.exact_hash [--models tiny,smollm2] [--variants exact16,exact8x16,exact8] [--device cuda]

A row is a model and a variant: its fingerprint and the sha256 of its logits, both as their first 16 digits, and the
seconds of the second call. EXPECTED holds the values that the CPU gave; the script fails if one differs.
"""

import argparse
import hashlib
import sys
import time

import torch
import transformers

import detcompile
from benchmarks.cpu import cpu_name
from detcompile import Numerics
from detcompile.orders.exact import ARITHMETICS, DEFINITION
from detcompile.templates.cpu import library as cpu_library

LENGTH = 300
EXPECTED = {
    ("tiny", "exact8"): ("adbfb27ae06863f0", "72d68edd714eaab8"),
    ("tiny", "exact8x16"): ("e7bcef5d6615dce1", "f72ea99fbc87659e"),
    ("tiny", "exact16"): ("bc33ab4fcef612a0", "2524095d3e57f5de"),
    ("smollm2", "exact8"): ("13135d02610444c7", "158edaa580763ac4"),
    ("smollm2", "exact8x16"): ("5a1a900fe51de92a", "77382689275c3063"),
    ("smollm2", "exact16"): ("e5a60544c2618e47", "1014e56243e46039"),
}


def fixed_text(vocabulary: int) -> list[int]:
    """Return LENGTH tokens: x -> 1103515245 x + 12345 mod 2^31."""
    x, tokens = LENGTH, []
    for _ in range(LENGTH):
        x = (1103515245 * x + 12345) % 2**31
        tokens.append((x >> 12) % vocabulary)
    return tokens


def hashes_of(name: str, variant: str, device: str | None) -> tuple[str, str, float]:
    """Return the fingerprint, the sha256 of the logits and the seconds of a call."""
    model = detcompile.compile(name, device=device, numerics=Numerics(arithmetic=variant))
    tokens = torch.tensor([fixed_text(model.facts.num_token_ids)], device=model.device)
    for _ in range(2):
        start = time.perf_counter()
        logits = model(tokens).logits[0].cpu()
        seconds = time.perf_counter() - start
    return model.fingerprint[:16], hashlib.sha256(logits.float().numpy().tobytes()).hexdigest()[:16], seconds


def main() -> int:
    """Print the table. Return 1 if a value differs from the expected one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="tiny,smollm2")
    parser.add_argument("--variants", default=",".join(ARITHMETICS))
    parser.add_argument("--device", help="cpu or cuda; default: a GPU if there is one")
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available() and arguments.device != "cpu"
    machine = torch.cuda.get_device_name() if on_gpu else f"{cpu_name()}, {cpu_library.isa()}"
    print(f"{DEFINITION}; {machine}; torch {torch.__version__}, transformers {transformers.__version__}")
    print("| model | variant | fingerprint | sha256 of the logits | seconds | as expected |\n|---|---|---|---|---|---|")
    differing = 0
    for name in arguments.models.split(","):
        for variant in arguments.variants.split(","):
            *hashes, seconds = hashes_of(name, variant, arguments.device)
            expected = EXPECTED.get((name, variant))
            verdict = "not recorded" if expected is None else "yes" if expected == tuple(hashes) else f"no: {expected}"
            differing += verdict.startswith("no:")
            print(f"| {name} | {variant} | {' | '.join(hashes)} | {seconds:.2f} | {verdict} |", flush=True)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
