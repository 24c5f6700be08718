"""What kernels that mix bfloat16 and float16 become on NVIDIA GPUs, compiled without one: LLVM shrinks no operation.

Unguarded it does: where that case fails, ``widened`` may go.
"""

import re

import pytest

from tests.templates.offline_compiler import OfflineCompiler

COMPILE = """
import sys
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from detcompile.templates.matmul.kernels import combine_kernel
from detcompile.templates.attention.rope_cache_gpu import _rope_cache_kernel
from detcompile.templates.rows.sums_and_norms_gpu import _rms_norm_kernel

@triton.jit
def unguarded(x_ptr, y_ptr, out_ptr):
    i = tl.arange(0, 128)
    y = tl.load(x_ptr + i).to(tl.float16).to(tl.float32) + tl.load(y_ptr + i).to(tl.float32)
    tl.store(out_ptr + i, y.to(tl.float16))

def ptx(kernel, types, **constants):
    signature = {name: types.get(name, "constexpr" if name in constants else "i32") for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constexprs=constants)
    options = {"num_warps": 4, "enable_fp_fusion": False}
    return compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]

if sys.argv[1] == "unguarded":
    print(ptx(unguarded, {"x_ptr": "*fp32", "y_ptr": "*bf16", "out_ptr": "*fp16"}))
elif sys.argv[1] == "residual":
    types = {"partial_ptr": "*fp32", "out_ptr": "*fp16", "bias_ptr": "*bf16", "residual_ptr": "*bf16"}
    levels = {"R0": 2, "R1": 1, "R2": 1, "R3": 1, "LEAVES": 2}
    print(ptx(combine_kernel, types, **levels, HAS_BIAS=True, HAS_RESIDUAL=True, BN=128, PDL=False))
elif sys.argv[1] == "heads":
    pointers = [name for name in _rope_cache_kernel.arg_names if name.endswith("_ptr")]
    types = {name: "*bf16" if "weight" in name else "*fp16" for name in pointers} | {"slots_ptr": "*i64", "eps": "fp32"}
    sizes = {"HQ": 8, "HK": 2, "D": 128, "DV": 128, "E": 128, "BLOCK_SIZE": 16, "COPIED": False, "UNIT": 8, "V_UNIT": 8}
    tile = {"ROWS": 16, "W": 128, "WV": 128, "LANES": 16, "VECTOR": 8, "SHUFFLE": True, "PDL": False}
    print(ptx(_rope_cache_kernel, types, **sizes, **tile, HAS_NORM=True, HAS_WEIGHT=True, ROUND_FIRST=True))
else:
    types = {"x_ptr": "*fp16", "partial_ptr": "*fp32", "weight_ptr": "*bf16", "out_ptr": "*fp16", "eps": "fp32"}
    tile = {"UNIT": 8, "CHUNKS": 1, "CHUNK_LANES": 32, "ROWS": 1, "W": 1024, "FOLDS": 1, "LANES": 128, "VECTOR": 8}
    flags = {"HAS_WEIGHT": True, "ROUND_FIRST": True, "SHUFFLE": True, "PDL": False}
    print(ptx(_rms_norm_kernel, types, R=1024, **tile, **flags))
"""


@pytest.mark.parametrize(("kernel", "shrinks"), [("unguarded", True), ("residual", False), ("weight", False)])
def test_operations_of_mixed_halves_stay_float32(kernel, shrinks, offline_compiler: OfflineCompiler):
    shrunk = re.findall(r"\b(?:add|mul|fma)(?:\.rn)?\.f16(?:x2)?\b", offline_compiler.run(COMPILE, kernel))
    assert bool(shrunk) == shrinks, shrunk


def test_weights_of_heads_are_widened_by_hand(offline_compiler: OfflineCompiler):
    """Their rotation is float16's own, so that a conversion of bfloat16 is what shows that LLVM knows."""
    assert "cvt.f32.bf16" not in offline_compiler.run(COMPILE, "heads")
