"""How tiles of rows are laid out on NVIDIA GPUs, compiled without one: by the load of the rows, whatever else is loaded
or stored beside. The tree of the lanes follows the layout (row_sums)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.templates.triton_interpreter import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")

# A process of its own: Triton asks for a driver, and a target is given instead.
COMPILE = """
import json
import re
import sys
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from detcompile.numerics import row_order
from detcompile.templates import rows_triton, softmax_triton
from detcompile.templates.row_tiles import row_plan

TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}


def pieces(kernel, length, short, dtypes, **flags):
    order = row_order(length, "cuda", (), dtypes["x_ptr"])
    plan = row_plan(order, short=short)
    constants = {
        "R": length, "UNIT": order.vector, "ROWS": plan.rows, "W": plan.width, "FOLDS": plan.folds,
        "LANES": order.lanes, "VECTOR": order.vector, "SHUFFLE": True, "PDL": True, **flags,
    }
    types = {name: TYPES[dtype] for name, dtype in dtypes.items()} | {"partial_ptr": "*fp32", "eps": "fp32"}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name.endswith("_ptr")}
    source = ASTSource(kernel, signature, constants, aligned)
    options = {"num_warps": plan.warps, "enable_fp_fusion": False}
    text = compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ttgir"]
    layouts = dict(re.findall(r"^(#blocked\\d*) = #ttg.blocked<{sizePerThread = \\[1, 1, (\\d+)\\]", text, re.M))
    tiles = re.findall(r"tt.load .*tensor<\\d+x\\d+x\\d+x!tt.ptr<\\w+>, (#blocked\\d*)>", text)
    assert tiles, text
    return sorted({int(layouts[tile]) for tile in tiles}), order.vector


found = {}
wide, narrow = torch.float32, torch.float16
for length in (96, 512, 4096):
    for short in (softmax_triton.SHORT, softmax_triton.SHORT_FEW) if length <= 512 else (None,):
        for x, out in (wide, narrow), (torch.bfloat16, wide), (narrow, torch.bfloat16):
            for kind in 0, 1:
                fast = kind == 0 and out != wide
                found[f"softmax {kind} {length} {short} {x} {out}"] = pieces(
                    softmax_triton._held_kernel, length, short, {"x_ptr": x, "out_ptr": out}, KIND=kind, FAST=fast,
                    ONCE=False,
                )
    found[f"rms_norm {length}"] = pieces(
        rows_triton._rms_norm_kernel, length, None, {"x_ptr": wide, "weight_ptr": narrow, "out_ptr": wide},
        HAS_WEIGHT=True, ROUND_FIRST=True, CHUNKS=1, CHUNK_LANES=32,
    )
print(json.dumps(found))
"""


def test_a_thread_holds_what_it_loads_of_a_row(tmp_path: Path) -> None:
    source = tmp_path / "compile_them.py"
    source.write_text(COMPILE)
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    run = subprocess.run([sys.executable, source], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout)
    assert len(found) > 20
    assert {case: pieces for case, (pieces, vector) in found.items() if pieces != [vector]} == {}
