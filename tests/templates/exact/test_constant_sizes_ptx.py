"""Triton makes a size of 1 a constant: every kernel of exact-1 compiles for an NVIDIA GPU with such sizes."""

import pytest

from tests.templates.offline_compiler import OfflineCompiler
from tests.templates.triton_interpreter import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")

COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime import driver
from detcompile.templates.exact import attention_gpu, gpu

BYTES = {"digits_ptr", "w_ptr", "q_ptr", "k_ptr", "v_ptr"}
TYPES = dict.fromkeys(("eps", "unit", "factor", "softcap"), "fp32") | {"M": "i32", "table_ptr": "*i32"}
TYPES |= dict.fromkeys(("sequence_ptr", "position_ptr", "slot_ptr", "ids_ptr"), "*i64") | dict.fromkeys(BYTES, "*i8")
KERNELS = [
    (gpu._function_kernel, {"NAME": "silu", "BLOCK": 1024}),
    (gpu._divide_kernel, {"BLOCK": 1024}),
    (gpu._sum_kernel, {"BLOCK": 64}),
    (gpu._expert_kernel, {"x_ptr": "*i8", "DX": 2, "DW": 2, "HAS_BIAS": True, "BN": 64, "BK": 128}),
    (gpu._rms_norm_kernel, {"BLOCK": 1}),
    (gpu._layer_norm_kernel, {"BLOCK": 1}),
    (gpu._quantize_kernel, {"TWO": True, "BLOCK": 1}),
    (gpu._linear_kernel, {"x_ptr": "*i8", "DX": 2, "DW": 2, "HAS_BIAS": True, "BM": 16, "BN": 64, "BK": 128}),
    (attention_gpu._attention_kernel, {"HEADS": 1, "ROWS": 16, "D": 4, "DP": 32, "V": 4, "VP": 32, "DIGITS": 2}),
    (attention_gpu._write_kernel, {"WORDS": 1}),
]

class Driver:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

driver.set_active(Driver())
for kernel, given in KERNELS:
    types = TYPES | {"x_ptr": given.pop("x_ptr", "*fp32")}
    signature, constants = {}, {}
    for i, name in enumerate(kernel.arg_names):
        default = "*fp32" if name.endswith("_ptr") else "constexpr"
        signature[name] = types.get(name, default)
        if signature[name] == "constexpr":
            constants[i,] = given.get(name, 1)
    compiled = compile(
        ASTSource(kernel, signature, constants), target=Driver().get_current_target(), options={"num_warps": 4}
    )
    print(kernel.__name__, ".entry" in compiled.asm["ptx"])
driver.set_active(None)
"""


def test_kernels_compile_with_sizes_of_one(offline_compiler: OfflineCompiler) -> None:
    assert offline_compiler.run(COMPILE).count("True") == 10
