"""How tiles of rows and heads are laid out on NVIDIA GPUs, compiled without one: by the load of the rows, whatever else
is loaded or stored beside. The tree of the lanes follows the layout (row_sums)."""

import json

from tests.templates.offline_compiler import OfflineCompiler
from tests.templates.triton_interpreter import NEEDS_COMPILER

pytestmark = NEEDS_COMPILER

COMPILE = """
import json
import re
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from detcompile.orders.numerics import row_order
from detcompile.templates.attention.rope_cache_gpu import _rope_cache_kernel
from detcompile.templates.rows.tiles import row_plan
from detcompile.templates.rows.sums_and_norms_gpu import _rms_norm_kernel, _row_sum_kernel
from detcompile.templates.rows.softmax_gpu import SHORT, SHORT_FEW, SHORT_LOG, _held_kernel

TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}


def pieces(kernel, length, dtype, short=None, others={}, **flags):
    '''Elements that a thread holds side by side in the tiles of that kernel; the vector of the rows' order.

    dtype: of every pointer but others.'''
    order = row_order(length, "cuda", (), dtype)
    plan = row_plan(order, short=short)
    flags |= {"R": length, "D": length, "UNIT": order.vector, "ROWS": plan.rows, "W": plan.width, "FOLDS": plan.folds}
    flags |= {"LANES": order.lanes, "VECTOR": order.vector, "SHUFFLE": True, "PDL": True}
    constants = {name: value for name, value in flags.items() if name in kernel.arg_names}
    pointers = {name: TYPES[dtype] for name in kernel.arg_names if name.endswith("_ptr")}
    types = pointers | others | dict.fromkeys(constants, "constexpr") | {"eps": "fp32"}
    signature = {name: types.get(name, "i32") for name in kernel.arg_names}
    aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in pointers}
    source = ASTSource(kernel, signature, constants, aligned)
    options = {"num_warps": plan.warps, "enable_fp_fusion": False}
    text = compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ttgir"]
    layouts = dict(re.findall(r"^(#blocked\\d*) = #ttg.blocked<{sizePerThread = .(?:1, )+(\\d+)]", text, re.M))
    shape = [plan.rows, plan.width]
    if "FOLDS" in constants:
        shape[1:] = [plan.folds, plan.width // plan.folds]
    shape = "x".join(map(str, shape))
    tiles = re.findall(rf"tt.load .*tensor<{shape}x!tt.ptr<\\w+>, (#blocked\\d*)>", text)
    assert tiles, text
    return sorted({int(layouts[tile]) for tile in tiles}), order.vector


found = {}
wide, narrow = torch.float32, torch.float16
for length in (96, 512, 4096):
    for short in (SHORT, SHORT_FEW, SHORT_LOG) if length <= 512 else (None,):
        for x, out in (wide, narrow), (torch.bfloat16, wide), (narrow, torch.bfloat16):
            for kind in (0, 1) if out != wide else (0, 1, 3):
                found[f"softmax {kind} {length} {short} {x} {out}"] = pieces(
                    _held_kernel, length, x, short, {"out_ptr": TYPES[out]}, KIND=kind, ONCE=False,
                    FAST=kind == 0 and out != wide,
                )
    others = dict.fromkeys(["normalizer_ptr", "partial_ptr", "out_ptr"], "*fp32")
    for x in wide, narrow:
        found[f"sum of p log p {length} {x}"] = pieces(
            _row_sum_kernel, length, x, None, others, TERM=3, CHUNKS=1, CHUNK_LANES=32
        )
    found[f"rms_norm {length}"] = pieces(
        _rms_norm_kernel, length, wide, None, {"weight_ptr": "*fp16"}, HAS_WEIGHT=True, ROUND_FIRST=True, CHUNKS=1,
        CHUNK_LANES=32,
    )
for features, rotated in (128, 128), (100, 32), (36, 32), (33, 32):
    found[f"rope {features} {rotated}"] = pieces(
        _rope_cache_kernel, features, narrow, None, {"slots_ptr": "*i64"}, HQ=8, HK=2, DV=32, E=rotated, BLOCK_SIZE=16,
        HAS_NORM=True, HAS_WEIGHT=True, ROUND_FIRST=True, COPIED=False, V_UNIT=8, WV=32,
    )
print(json.dumps(found))
"""


def test_thread_keeps_its_part_of_a_row(offline_compiler: OfflineCompiler) -> None:
    actual = json.loads(offline_compiler.run(COMPILE))
    assert len(actual) > 30
    assert {case: pieces for case, (pieces, vector) in actual.items() if pieces != [vector]} == {}
