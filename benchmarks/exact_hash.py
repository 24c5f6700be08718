"""Hash a model's logits over a fixed text: exact arithmetic (docs/exact.md) gives one hash on every machine.

    python -m benchmarks.exact_hash [--models tiny,smollm2] [--variants exact16,exact8x16,exact8] [--device cuda]
        [--tp 3]

A row has the fingerprint of a model in a variant and the sha256 of its logits (the first 16 digits of each), and the
seconds of the second call. EXPECTED holds the values computed on a CPU; the script fails if a value differs. The device
"numpy" is the reference, which has no fingerprint.
"""

import argparse
import contextlib
import hashlib
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import transformers

import detcompile
from benchmarks.cpu import cpu_name
from detcompile import Numerics
from detcompile.models.remote import RemoteModel
from detcompile.orders.exact import ARITHMETICS, DEFINITION
from detcompile.templates.cpu import library as cpu_library
from tests.exact.definition import VARIANTS, Decoder

LENGTH = 300
EXPECTED = {
    ("tiny", "exact8"): ("e2c568f10c3b8355", "72d68edd714eaab8"),
    ("tiny", "exact8x16"): ("643d755bdba3be5f", "f72ea99fbc87659e"),
    ("tiny", "exact16"): ("01f5b2772d248375", "2524095d3e57f5de"),
    ("smollm2", "exact8"): ("ecc327d0ba7586c5", "158edaa580763ac4"),
    ("smollm2", "exact8x16"): ("d8c8a51f1c178ad9", "77382689275c3063"),
    ("smollm2", "exact16"): ("cf1e9d0fc1dd6c1f", "1014e56243e46039"),
}


def fixed_text(vocabulary: int) -> list[int]:
    """Return LENGTH tokens from the generator x -> (1103515245 x + 12345) mod 2^31."""
    x, tokens = LENGTH, []
    for _ in range(LENGTH):
        x = (1103515245 * x + 12345) % 2**31
        tokens.append((x >> 12) % vocabulary)
    return tokens


def hashes_of(name: str, variant: str, device: str | None, tp: int) -> tuple[str, str, float]:
    """Return the fingerprint, the sha256 of the logits and the seconds of a call."""
    if device == "numpy":
        return "", *hash_of_reference(name, variant)
    model = detcompile.compile(name, device=device, tp=tp, numerics=Numerics(arithmetic=variant))
    with model if isinstance(model, RemoteModel) else contextlib.nullcontext():
        tokens = torch.tensor([fixed_text(model.facts.num_token_ids)], device=model.device)
        for _ in range(2):
            start = time.perf_counter()
            logits = model(tokens).logits[0].cpu()
            seconds = time.perf_counter() - start
        return model.fingerprint[:16], digest(logits.numpy()), seconds


def hash_of_reference(name: str, variant: str) -> tuple[str, float]:
    """Return the sha256 of the reference's logits and the seconds of its only call."""
    model = detcompile.load_model(name, device="cpu")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        decoder = Decoder(Path(folder), VARIANTS[variant])
    start = time.perf_counter()
    logits, _ = decoder.forward(fixed_text(model.config.vocab_size))
    return digest(logits), time.perf_counter() - start


def digest(logits: "np.ndarray[tuple[int, ...], np.dtype[np.float32]]") -> str:
    """Return the first 16 digits of the bytes' sha256."""
    return hashlib.sha256(np.ascontiguousarray(logits).tobytes()).hexdigest()[:16]


def main() -> int:
    """Print the table. Return 1 if a value differs from the expected one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="tiny,smollm2")
    parser.add_argument("--variants", default=",".join(ARITHMETICS))
    parser.add_argument("--device", help="cpu, cuda or numpy; default: a GPU if there is one")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share the model")
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available() and arguments.device not in ("cpu", "numpy")
    machine = torch.cuda.get_device_name() if on_gpu else f"{cpu_name()}, {cpu_library.isa()}"
    releases = f"torch {torch.__version__}, transformers {transformers.__version__}, numpy {np.__version__}"
    print(f"{DEFINITION}; {machine}; tp {arguments.tp}; {releases}")
    print("| model | variant | fingerprint | sha256 of the logits | seconds | as expected |\n|---|---|---|---|---|---|")
    differing = 0
    for name in arguments.models.split(","):
        for variant in arguments.variants.split(","):
            *hashes, seconds = hashes_of(name, variant, arguments.device, arguments.tp)
            expected = EXPECTED.get((name, variant))
            equal = expected is not None and expected[1] == hashes[1] and hashes[0] in ("", expected[0])
            verdict = "yes" if equal else "not recorded" if expected is None else f"no: {expected}"
            differing += verdict.startswith("no:")
            print(f"| {name} | {variant} | {' | '.join(hashes)} | {seconds:.2f} | {verdict} |", flush=True)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
