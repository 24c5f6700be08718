"""Int4 weights in bfloat16, compiled for NVIDIA GPUs without one: ptxas accepts the assembly of each capability."""

import pytest

from tests.templates.offline_compiler import OfflineCompiler
from tests.templates.triton_interpreter import NEEDS_COMPILER

pytestmark = NEEDS_COMPILER

COMPILE = """
import sys
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime import driver
from detcompile.templates.quantized.dequantize import narrow_weights

@triton.jit
def weights(q_ptr, scale_ptr, out_ptr):
    i = tl.arange(0, 512)
    q, scale = tl.load(q_ptr + i), tl.load(scale_ptr + i)
    low, high = narrow_weights(q, scale, scale, scale, scale, tl.bfloat16)
    tl.store(out_ptr + i, low)
    tl.store(out_ptr + 512 + i, high)

class Driver:
    def get_current_target(self):
        return GPUTarget("cuda", int(sys.argv[1]), 32)

driver.set_active(Driver())
source = ASTSource(weights, {"q_ptr": "*u8", "scale_ptr": "*bf16", "out_ptr": "*bf16"})
print(compile(source, target=Driver().get_current_target(), options={"num_warps": 4}).asm["ptx"])
driver.set_active(None)
"""


@pytest.mark.parametrize(("capability", "instruction"), [(80, "fma"), (86, "fma"), (89, "fma"), (90, "sub")])
def test_ptxas_accepts_pairs_of_bfloat16(capability: int, instruction: str, offline_compiler: OfflineCompiler) -> None:
    ptx = offline_compiler.run(COMPILE, str(capability))
    assert f"{instruction}.rn.bf16x2" in ptx
    assert ("sub.rn.bf16x2" in ptx) == (capability >= 90)
