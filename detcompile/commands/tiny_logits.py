"""Print the sha256 of the logits of the embedded model on a CPU, by dtype, as JSON: `python -m ...tiny_logits`."""

import hashlib
import json

import torch

import detcompile
from detcompile.templates.cpu.library import isa


def digests() -> dict[str, str]:
    """Return the sha256 of the logits of `tiny` for 64 tokens, on a CPU, by dtype.

    bfloat16 is left out with AMX, whose products have a different order.
    """
    results = {}
    for dtype in (torch.float32,) if isa() == "amx" else (torch.float32, torch.bfloat16):
        model = detcompile.compile("tiny", device="cpu", dtype=dtype)
        logits = model(torch.arange(1, 65)[None]).logits
        results[str(dtype).removeprefix("torch.")] = hashlib.sha256(logits.view(torch.uint8).numpy()).hexdigest()
    return results


if __name__ == "__main__":
    print(json.dumps(digests()))
