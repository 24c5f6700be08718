"""token_matmul's kernel for Hopper GPUs, compiled and assembled without one: its products stay asynchronous.

See tests/templates/attention/test_hopper_ptxas.py.
"""

from tests.templates.offline_compiler import OfflineCompiler
from tests.templates.triton_interpreter import NEEDS_COMPILER

pytestmark = NEEDS_COMPILER

COMPILE = """
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


def test_products_of_a_leaf_do_not_wait_for_each_other(offline_compiler: OfflineCompiler) -> None:
    *logs, _ = offline_compiler.run(COMPILE).split("=====")
    assert logs
    for log in logs:
        assert "0 bytes spill stores" in log and "wgmma" not in log, log[-2000:]
        assert int(log.split("shared ")[1]) <= 232_448  # of a program
