"""The training kernels for Hopper GPUs, compiled and assembled without one: their products stay asynchronous.

See tests/templates/attention/test_hopper_ptxas.py.
"""

from tests.templates.offline_compiler import OfflineCompiler
from tests.templates.triton_interpreter import NEEDS_COMPILER

pytestmark = NEEDS_COMPILER

TOKEN_MATMUL = """
import os
from triton.backends.compiler import GPUTarget
from triton.compiler import compile
from triton.experimental.gluon._runtime import GluonASTSource
from detcompile.templates.training.token_hopper import REGISTERS, SHARED, hopper_token_matmul_kernel as kernel
from detcompile.templates.training.token_schedules import TokenProblem, candidates

os.environ["TRITON_DUMP_PTXAS_LOG"] = "1"
problem = TokenProblem(dtype="bfloat16", n=4096, k=4096, grid=-44, aligned=True, hopper=True)
for tiles in [tiles for tiles in candidates(problem) if tiles.hopper]:
    types = {"g_desc": f"tensordesc<bf16[{tiles.block_t}, 64],{SHARED!r}>", "leaves_ptr": "*i32", "out_ptr": "*fp64"}
    types["x_desc"] = f"tensordesc<bf16[{tiles.block_t}, {tiles.block_k}],{SHARED!r}>"
    constants = {"GRID": -44, "UPPER_BITS": 129 << 23 | 1 << 22, "LOWER_BITS": 106 << 23 | 1 << 22}
    constants |= {"GROUP": tiles.group, "BT": tiles.block_t, "STAGES": tiles.stages}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    attrs = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in ("leaves_ptr", "out_ptr", "N", "K")}
    source = GluonASTSource(kernel, signature, constexprs=constants, attrs=attrs)
    options = {"num_warps": 4, "maxnreg": REGISTERS, "enable_fp_fusion": False}
    print("shared", compile(source, target=GPUTarget("cuda", 90, 32), options=options).metadata.shared)
    print("=====")
del os.environ["TRITON_DUMP_PTXAS_LOG"]
"""

ATTENTION = """
import itertools, os
from triton.backends.compiler import GPUTarget
from triton.compiler import compile
from triton.experimental.gluon._runtime import GluonASTSource
from detcompile.templates.attention.hopper_blocks import TILE
from detcompile.templates.training.attention_hopper import REGISTERS, hopper_dkdv_kernel, hopper_dq_kernel
from detcompile.templates.training.attention_schedules import GradientProblem, candidates

os.environ["TRITON_DUMP_PTXAS_LOG"] = "1"
POINTERS = {"cu_ptr": "*i32", "dq_ptr": "*bf16", "dk_ptr": "*bf16", "dv_ptr": "*bf16"}
RULE = dict.fromkeys(("windowed", "chunked", "needs_scores", "capped", "alibi"), False)
for kernel, G, D in itertools.product((hopper_dq_kernel, hopper_dkdv_kernel), (1, 4), (64, 128)):
    of_keys = kernel is hopper_dkdv_kernel
    shape = {"heads": 8 * G, "kv_heads": 8, "d": D, "dv": D}
    problem = GradientProblem(of_keys=of_keys, dtype="bfloat16", hopper=True, **shape, **RULE)
    [tiles] = [tiles for tiles in candidates(problem) if tiles.hopper]
    types = POINTERS | dict.fromkeys(("c", "scale"), "fp32")
    types |= dict.fromkeys(("g_desc", "q_desc"), f"tensordesc<bf16[64, 64],{TILE!r}>")
    types |= dict.fromkeys(("k_desc", "v_desc"), f"tensordesc<bf16[{64 if of_keys else 128}, 64],{TILE!r}>")
    constants = {"G": G, "D": D, "STAGES": tiles.stages} | ({"KV_HEADS": 8} if of_keys else {})
    signature = {
        name: "constexpr" if name in constants else types.get(name, "*fp32" if name.endswith("_ptr") else "i32")
        for name in kernel.arg_names
    }
    aligned = [name for name in kernel.arg_names if name.endswith(("_ptr", "_columns"))]
    attrs = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = GluonASTSource(kernel, signature, constexprs=constants, attrs=attrs)
    options = {"num_warps": 4, "maxnreg": REGISTERS, "enable_fp_fusion": False}
    print("shared", compile(source, target=GPUTarget("cuda", 90, 32), options=options).metadata.shared)
    print("=====")
del os.environ["TRITON_DUMP_PTXAS_LOG"]
"""


def test_products_of_attentions_gradients_do_not_wait_for_each_other(offline_compiler: OfflineCompiler) -> None:
    *logs, _ = offline_compiler.run(ATTENTION).split("=====")
    assert len(logs) == 8
    for log in logs:
        assert "registers" in log and "wgmma" not in log, log[-2000:]
        assert int(log.split("shared ")[1]) <= 232_448  # of a program


def test_products_of_a_leaf_do_not_wait_for_each_other(offline_compiler: OfflineCompiler) -> None:
    *logs, _ = offline_compiler.run(TOKEN_MATMUL).split("=====")
    assert logs
    for log in logs:
        assert "0 bytes spill stores" in log and "wgmma" not in log, log[-2000:]
        assert int(log.split("shared ")[1]) <= 232_448  # of a program
