"""The attention kernels for Hopper GPUs, compiled and assembled without one: their products stay asynchronous.

ptxas makes every product wait for the one before where it finds a register that a product in flight writes in another
instruction, and says so in its log; the bits are the same, the speed is not. This is the ptxas of the Triton that is
installed: 12.8 in Triton 3.6 and 3.7.
"""

from tests.templates.offline_compiler import OfflineCompiler
from tests.templates.triton_interpreter import NEEDS_COMPILER

pytestmark = NEEDS_COMPILER

COMPILE = """
import os
from triton.backends.compiler import GPUTarget
from triton.compiler import compile
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from detcompile.templates.attention.hopper import REGISTERS, hopper_attention_kernel
from detcompile.templates.attention.hopper_decode import hopper_decode_kernel, registers

os.environ["TRITON_DUMP_PTXAS_LOG"] = "1"
TYPES = {name: "*i32" for name in ("cu_ptr", "lens_ptr", "table_ptr")} | {"max_and_sum_ptr": "*fp32", "c": "fp32"}
STRIDES = ("q_batch", "q_token", "q_head", "block_rows", "batch_rows", "head_columns", "out_batch", "out_token")


def prefill(*block, CONSUMERS, **constants):
    assemble(hopper_attention_kernel, REGISTERS[CONSUMERS], *block, HEADS=4, CONSUMERS=CONSUMERS, **constants)


def decode(*block, STAGES, D, **constants):
    assemble(hopper_decode_kernel, registers(STAGES, D), *block, BM=8, STAGES=STAGES, D=D, **constants)


def assemble(kernel, maxnreg, *block, **constants):
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=len(block))
    described = f"tensordesc<bf16{list(block)},{layout!r}>"
    types = TYPES | {"k_desc": described, "v_desc": described}
    types["out_ptr"] = "*fp32" if constants["SPLIT"] else "*bf16"
    constants |= {"G": 4, "CHUNK": 512, "KV_HEADS": 8, "PDL": True}
    signature = {
        name: "constexpr" if name in constants else types.get(name, "*bf16" if name.endswith("_ptr") else "i32")
        for name in kernel.arg_names
    }
    aligned = [name for name in kernel.arg_names if name.endswith("_ptr") or name in STRIDES]
    attrs = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = GluonASTSource(kernel, signature, constexprs=constants, attrs=attrs)
    options = {"num_warps": 4, "maxnreg": maxnreg, "enable_fp_fusion": False}
    compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    print("=====")


whole, split = {"WINDOWED": False, "SPLIT": False}, {"WINDOWED": False, "SPLIT": True}
windowed = {"WINDOWED": True, "SPLIT": False}
prefill(64, 64, D=128, BLOCK_SIZE=0, CONSUMERS=2, STAGES=3, **whole)
prefill(64, 64, D=128, BLOCK_SIZE=64, CONSUMERS=2, STAGES=3, **windowed)
prefill(16, 64, D=64, BLOCK_SIZE=16, CONSUMERS=2, STAGES=3, **windowed)
prefill(64, 64, D=128, BLOCK_SIZE=64, CONSUMERS=1, STAGES=2, **split)
decode(2, 64, 64, D=128, BLOCK_SIZE=64, STAGES=3, **split)
decode(2, 64, 64, D=128, BLOCK_SIZE=64, STAGES=4, **whole)
decode(2, 64, 64, D=128, BLOCK_SIZE=64, STAGES=2, **whole)
decode(16, 64, D=128, BLOCK_SIZE=16, STAGES=3, **windowed)
decode(1, 64, 64, D=64, BLOCK_SIZE=64, STAGES=2, WINDOWED=True, SPLIT=True)
del os.environ["TRITON_DUMP_PTXAS_LOG"]
"""


def test_products_of_the_tensor_core_do_not_wait_for_each_other(offline_compiler: OfflineCompiler) -> None:
    *logs, _ = offline_compiler.run(COMPILE).split("=====")
    assert len(logs) == 9
    for log in logs:
        assert "registers" in log and "wgmma" not in log, log[-2000:]
