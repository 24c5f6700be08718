"""What the sampling kernel becomes on NVIDIA GPUs, compiled without one: single IEEE operations in float64."""

import re

import pytest

from tests.templates.offline_compiler import OfflineCompiler
from tests.templates.triton_interpreter import NEEDS_COMPILER

pytestmark = NEEDS_COMPILER

COMPILE = """
import sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from detcompile.templates.tokens.gumbel import _best_of_tile_kernel

types = ["*fp32", "*i64", "*fp64", "*i32", "i64", "constexpr", "constexpr", "constexpr"]
source = ASTSource(
    _best_of_tile_kernel,
    dict(zip(_best_of_tile_kernel.arg_names, types)),
    constexprs={"V": 151936, "TILES": 149, "W": 1024},
)
options = {"num_warps": 4, "enable_fp_fusion": False}
print(compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32), options=options).asm["ptx"])
"""
CONSTANTS = ["3FE6A09E667F3BCD", "3FE62E42FEE00000", "3DEA39EF35793C76", "3FE5555555555593", "3FC2F112DF3E5244"]


@pytest.mark.parametrize("capability", [80, 90])
def test_float64_is_single_ieee_operations(capability: int, offline_compiler: OfflineCompiler) -> None:
    ptx = offline_compiler.run(COMPILE, str(capability))
    operations = set(re.findall(r"\b([a-z]+(?:\.[a-z]+)*\.f64)\b", ptx))
    arithmetic = {op for op in operations if op.split(".")[0] in {"fma", "div", "mul", "add", "sub", "rcp", "mad"}}
    assert arithmetic == {"mul.rn.f64", "add.rn.f64", "sub.rn.f64", "div.rn.f64"}
    actual = set(re.findall(r"0d([0-9A-F]{16})", ptx))
    assert actual.issuperset(CONSTANTS), "a constant was rounded"
