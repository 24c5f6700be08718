"""Compare decode times of a model with quantized linears and the same model dequantized, on one GPU.

    python -m benchmarks.quantized_model --commit $(git rev-parse --short HEAD) [--layers 8] [--formats int4,fp8]

The model is Qwen3-8B's shape with random weights and fewer layers, activations in bfloat16. A time is the median of a
CUDA graph's replays over a step of 1, 16 and 64 sequences. The logits of both models must be equal by bytes. Writes
benchmarks/results/quantized-model-<device>-<commit>.json.
"""

import argparse
import gc
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import detcompile
from benchmarks.model import build, decode_milliseconds
from detcompile import CompiledModel
from detcompile.passes.modules.quantized_linear import QuantizedLinear, replace_module
from detcompile.templates.quantized.weights import QuantizedWeight

SEQUENCES = (1, 16, 64)
IDS = torch.arange(96)[None] * 37 % 1000


def _scales(groups: int, blocks: int, dtype: torch.dtype) -> torch.Tensor:
    return (0.001 + 0.002 * torch.rand(groups, blocks, device="cuda")).to(dtype)


def int4(n: int, k: int) -> QuantizedWeight:
    """Quantize in groups of 128 without zeros, as compressed-tensors does."""
    w = torch.randint(0, 256, (n, k // 2), device="cuda", dtype=torch.uint8)
    return QuantizedWeight(w, _scales(k // 128, n, torch.bfloat16), None, None, k, 128, 1)


def fp8(n: int, k: int) -> QuantizedWeight:
    """Quantize in blocks of 128 x 128, as DeepSeek does."""
    w = torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn)
    return QuantizedWeight(w, _scales(k // 128, n // 128, torch.float32), None, None, k, 128, 128)


def q4_k(n: int, k: int) -> QuantizedWeight:
    """Quantize in groups of 32 with a scale and a minimum, as GGUF's Q4_K with dequantize=False."""
    w = torch.randint(0, 256, (n, k // 2), device="cuda", dtype=torch.uint8)
    scales = _scales(k // 32, n, torch.float32)
    return QuantizedWeight(w, scales, None, -8 * scales, k, 32, 1)


FORMATS: dict[str, Callable[[int, int], QuantizedWeight]] = {"int4": int4, "fp8": fp8, "q4_k": q4_k}


def compiled(layers: int, make: Callable[[int, int], QuantizedWeight], dequantize: bool) -> CompiledModel:
    """Return the model with its layers' linears quantized, or dequantized."""
    model = build(layers)
    torch.manual_seed(1)
    for name, linear in list(model.named_modules()):
        if isinstance(linear, nn.Linear) and name != "lm_head":
            quantized = QuantizedLinear(make(linear.out_features, linear.in_features), None)
            if dequantize:
                linear.weight = nn.Parameter(quantized.dequantized(torch.bfloat16), requires_grad=False)
            else:
                replace_module(model, name, quantized)
    return detcompile.compile(model, max_context=2048)


def measure(layers: int, make: Callable[[int, int], QuantizedWeight]) -> dict[str, object]:
    """Return milliseconds a step of both models by the number of sequences."""
    times: dict[bool, dict[int, float]] = {}
    logits = []
    for dequantize in (False, True):
        model = compiled(layers, make, dequantize)
        logits.append(model(IDS.cuda()).logits.cpu())
        times[dequantize] = {count: decode_milliseconds(model, count) for count in SEQUENCES}
        del model
        gc.collect()
        torch.cuda.empty_cache()
    if not torch.equal(logits[0].view(torch.int16), logits[1].view(torch.int16)):
        raise SystemExit("the quantized model's logits differ from those of the dequantized one")
    ratios = {count: times[True][count] / times[False][count] for count in SEQUENCES}
    return {"quantized_ms": times[False], "dequantized_ms": times[True], "dequantized_over_quantized": ratios}


def main() -> None:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    device = torch.cuda.get_device_name()
    figures: dict[str, object] = {"device": device, "commit": arguments.commit, "layers": arguments.layers}
    name = f"quantized-model-{device.lower().replace(' ', '-')}-{arguments.commit}.json"
    for chosen in arguments.formats.split(","):
        figures[chosen] = measure(arguments.layers, FORMATS[chosen])
        print(chosen, json.dumps(figures[chosen]), flush=True)
        (arguments.out / name).write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
