"""The kernel of few tokens for Hopper GPUs, compiled and assembled without one: its products stay asynchronous.

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
from detcompile.templates.matmul.ring import _GATED_GROUP, _GROUP, ring_matmul_kernel as kernel

os.environ["TRITON_DUMP_PTXAS_LOG"] = "1"
for rows, stages, gated, bias in (64, 5, False, True), (32, 10, False, False), (32, 10, True, False):
    w = f"[4, {rows // 16}, 2, 8, 64],{_GATED_GROUP.value!r}" if gated else f"[4, {rows}, 64],{_GROUP.value!r}"
    types = {"w_desc": f"tensordesc<bf16{w}>", "x_desc": f"tensordesc<bf16[4, 8, 64],{_GROUP.value!r}>"}
    constants = {"HAS_BIAS": bias, "HAS_RESIDUAL": not gated, "SUB": 4, "ROWS": rows, "GATED": gated, "BM": 8}
    constants |= {"STAGES": stages, "PDL": True}
    signature = {
        name: "constexpr" if name in constants else types.get(name, "*bf16" if name.endswith("_ptr") else "i32")
        for name in kernel.arg_names
    }
    aligned = [name for name in kernel.arg_names if name.endswith("_ptr") or name in "NK"]
    attrs = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = GluonASTSource(kernel, signature, constexprs=constants, attrs=attrs)
    options = {"num_warps": 4, "maxnreg": 80, "enable_fp_fusion": False}
    print("shared", compile(source, target=GPUTarget("cuda", 90, 32), options=options).metadata.shared)
    print("=====")
del os.environ["TRITON_DUMP_PTXAS_LOG"]
"""


def test_ring_products_stay_asynchronous(offline_compiler: OfflineCompiler) -> None:
    *logs, _ = offline_compiler.run(COMPILE).split("=====")
    assert len(logs) == 3
    for log in logs:
        assert "0 bytes spill stores" in log and "wgmma" not in log, log[-2000:]
        assert int(log.split("shared ")[1]) <= 232_448  # of a program
