"""The AOTInductor half of benchmarks/dispatch.py, each package in a process that may crash.

python -m benchmarks.dispatch_aoti package VARIANT PACKAGE
python -m benchmarks.dispatch_aoti check VARIANT PACKAGE OUTPUTS
"""

import faulthandler
import json
import sys

import torch
from torch.fx.experimental import _config as symbolic_shapes_config

from benchmarks.dispatch import INDUCTOR, SHAPES, first_line, graph_microseconds, host_microseconds, make_inputs
from benchmarks.dispatch_variants import PROGRAMS

__all__ = ["main"]


class Program(torch.nn.Module):
    """One variant as a module, for torch.export."""

    def __init__(self, name):
        super().__init__()
        self.program = PROGRAMS[name]

    def forward(self, x, w, residual):
        return self.program(x, w, residual)


def package(name, path):
    """Export one variant for every token count >= 1 and compile it ahead of time into `path`."""
    x, weights, residual = make_inputs(*SHAPES[0])
    tokens = torch.export.Dim("T", min=1, max=1 << 16)
    shapes = {"x": {0: tokens}, "w": None, "residual": {0: tokens}}
    with symbolic_shapes_config.patch(backed_size_oblivious=True):
        arguments = (x[:64].clone(), weights[0], residual[:64].clone())
        program = torch.export.export(Program(name), arguments, dynamic_shapes=shapes, strict=False)
        torch._inductor.aoti_compile_and_package(program, package_path=path, inductor_configs=INDUCTOR)


def check(path, outputs_path):
    """Load one package, compare it with the given outputs by bytes, time it; prints one JSON object a line."""
    x, weights, residual = make_inputs(*SHAPES[0])
    expected = torch.load(outputs_path)
    print(json.dumps({"inputs": True}), flush=True)
    loaded = torch._inductor.aoti_load_package(path)
    print(json.dumps({"loaded": True}), flush=True)
    parts = {m: (x[:m].clone(), residual[:m].clone()) for m in expected}
    outputs = {m: loaded(a, weights[0], b) for m, (a, b) in parts.items()}
    print(
        json.dumps({"bits_equal_launcher": all(torch.equal(outputs[m], expected[m].cuda()) for m in expected)}),
        flush=True,
    )
    one = (parts[1][0], weights[0], parts[1][1])
    print(json.dumps({"host_us_1_token": host_microseconds(loaded, one)}), flush=True)
    for m, (a, b) in parts.items():
        try:
            times = graph_microseconds(loaded, [(a, w, b) for w in (weights if m <= 256 else weights[:3])])
        except Exception as error:  # a package that cannot be captured is an answer
            print(json.dumps({"graph_error": first_line(error)}), flush=True)
            return
        print(json.dumps({f"us_{m}": times}), flush=True)


def main():
    """Dispatch on the first argument."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(45)
    action, name, path, *rest = sys.argv[1:]
    with torch.no_grad():
        if action == "package":
            faulthandler.cancel_dump_traceback_later()
            package(name, path)
        else:
            check(path, *rest)


if __name__ == "__main__":
    main()
