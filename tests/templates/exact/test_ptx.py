"""The Triton kernels of exact-1, compiled for an NVIDIA GPU: their float instructions round once, and nothing else.

Sizes of 1 are among the arguments, because Triton makes them constants. ptxas fuses no product with an explicit
rounding, so contraction is visible in PTX.
"""

import json
import re

import pytest

from detcompile.templates.exact.rows import FUNCTIONS
from tests.templates.offline_compiler import OfflineCompiler
from tests.templates.triton_interpreter import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")

COMPILE = """
import json, re, sys
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime import driver
from detcompile.templates.exact import attention_gpu, attention_hopper, cache_gpu, gpu, hopper

BYTES = {"digits_ptr", "w_ptr", "k_ptr", "v_ptr", "k_cache_ptr", "v_cache_ptr"}
TYPES = dict.fromkeys(("eps", "unit", "factor", "softcap"), "fp32") | {"M": "i32"}
TYPES |= dict.fromkeys(("slot_ptr", "ids_ptr", "parts_ptr"), "*i64") | dict.fromkeys(BYTES, "*i8")
TYPES |= dict.fromkeys(("cu_ptr", "lens_ptr", "table_ptr"), "*i32")
INTEGERS = dict.fromkeys("T S M N K share splits max_blocks units k_block v_block window chunk".split(), "i32")
ATTENTION = {"G": 4, "HEADS": 4, "D": 64, "DIGITS": 2, "SIZE": 32, "SINKS": True, "UNIT": 0, "PDL": True}
ATTENTION |= {"K_SLOT": 72, "K_HEAD": 36, "V_SLOT": 72, "V_HEAD": 36, "maxnreg": 255}
PRODUCT = {"DX": 2, "DW": 2, "HAS_BIAS": True, "RESIDUAL": 2}
TILES = PRODUCT | {"BN": 128, "BK": 128, "GROUP": 16, "STAGES": 2, "PDL": True}
HEADS = {"k_ptr": "*fp32", "v_ptr": "*fp32", "HQ": 8, "HK": 8, "HEADS": 8, "D": 4, "W": 4, "V": 4, "WV": 4, "E": 4}
DESCRIBED = {
    f"{name}_desc": f"tensordesc<i8[{rows}, 128],{hopper._SHARED!r}>" for name, rows in (("x", 64), ("w", 128))
}

@triton.jit
def _planted(x_ptr, out_ptr, FAULT: tl.constexpr):
    i = tl.arange(0, 32)
    x = tl.load(x_ptr + i)
    if FAULT == "quotient":
        y = x / (x + 3.0)
    elif FAULT == "root":
        y = tl.sqrt(x)
    elif FAULT == "ceil":
        y = tl.math.ceil(x)
    elif FAULT == "exp":
        y = tl.exp(x)
    else:
        y = x * x + 3.0
    tl.store(out_ptr + i, y)

LINEAR = {"x_ptr": "*i8", "BM": 16, "BN": 64, "BK": 128} | PRODUCT
PLAIN = {"HEADS": 1, "ROWS": 16, "D": 4, "DP": 32, "V": 4, "VP": 32, "DIGITS": 2}
KERNELS = [(gpu._function_kernel, {"NAME": name, "BLOCK": 1024}) for name in sys.argv[1].split()] + [
    (gpu._divide_kernel, {"BLOCK": 1024}),
    (gpu._sum_kernel, {"BLOCK": 64}),
    (gpu._expert_kernel, {"x_ptr": "*i8", "DX": 2, "DW": 2, "HAS_BIAS": True, "BN": 64, "BK": 128}),
    (gpu._rms_norm_kernel, {"BLOCK": 1}),
    (gpu._layer_norm_kernel, {"BLOCK": 1}),
    (gpu._quantize_kernel, {"TWO": True, "BLOCK": 1, "GATE": "silu"}),
    (gpu._linear_kernel, LINEAR),
    (gpu._linear_kernel, LINEAR | {"NAME": "_linear_kernel in bfloat16", "INT8": False}),
    (attention_gpu._attention_kernel, PLAIN),
    (attention_gpu._attention_kernel, PLAIN | {"NAME": "_attention_kernel in bfloat16", "INT8": False}),
    (attention_gpu._merge_kernel, {"V": 4, "VP": 32}),
    (cache_gpu.heads_kernel, HEADS),
    (hopper._add_kernel, {"RESIDUAL": 2, "BN": 512}),
    (hopper.hopper_exact_kernel, TILES | {"CONSUMERS": 2, "maxnreg": 168}),
    (attention_hopper.hopper_exact_attention_kernel, ATTENTION),
    (attention_hopper.hopper_exact_decode_kernel, ATTENTION | {"maxnreg": 128}),
] + [(_planted, {"FAULT": fault}) for fault in ("quotient", "root", "ceil", "exp", "contraction")]

class Driver:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

driver.set_active(Driver())
for kernel, given in KERNELS:
    name = given.get("NAME") or given.get("FAULT") or kernel.__name__
    fused = given.get("FAULT") == "contraction"
    types = TYPES | {"x_ptr": "*fp32"} | {arg: kind for arg, kind in given.items() if str(kind).startswith("*")}
    if gluon := kernel.is_gluon():
        types |= INTEGERS | DESCRIBED
    signature, constants = {}, {}
    for i, arg in enumerate(kernel.arg_names):
        default = "*fp32" if arg.endswith("_ptr") else "constexpr"
        signature[arg] = types.get(arg, default)
        if signature[arg] == "constexpr":
            constants[i,] = given.get(arg, 1)
    options = {"num_warps": 4, "enable_fp_fusion": fused} | ({"maxnreg": given["maxnreg"]} if gluon else {})
    sixteens = [i for i, arg in enumerate(kernel.arg_names) if arg.endswith(("_ptr", "_block"))]
    aligned = {(i,): [["tt.divisibility", 16]] for i in sixteens}
    source = (GluonASTSource if gluon else ASTSource)(kernel, signature, constants, aligned if gluon else None)
    compiled = compile(source, target=Driver().get_current_target(), options=options)
    instructions = re.findall(r"^\\s*(?:@%?!?\\w+ )?([a-z]\\w*(?:[.:]+\\w+)*)", compiled.asm["ptx"], flags=re.M)
    print(json.dumps([name, ".entry" in compiled.asm["ptx"], sorted({*instructions})]))
driver.set_active(None)
"""
PLANTED = ("quotient", "root", "ceil", "exp", "contraction")
ATTENTION = {"_attention_kernel", "_merge_kernel", "hopper_exact_attention_kernel", "hopper_exact_decode_kernel"}
IN_BFLOAT16 = {"_linear_kernel in bfloat16", "_attention_kernel in bfloat16"}
WITH_FMA = {"_quantize_kernel", "heads_kernel", "_attention_kernel in bfloat16", *ATTENTION, *FUNCTIONS}
# One rounding, a comparison, a selection or a conversion; without .ftz, .approx, .full and .sat.
DEFINED = re.compile(
    r"(add|sub|mul|div|sqrt)\.rn\.f(32|64)|(abs|neg|min|max|selp)\.f(32|64)|setp\.[a-z]+\.f(32|64)"
    r"|cvt\.rn\.f(32|64)\.[su]\d+|cvt\.f64\.f32|cvt\.rn\.f32\.f64|cvt\.rzi\.s(32|64)\.f(32|64)"
)
OF_DIGITS = re.compile(r"sub\.bf16x2|cvt\.rn\.bf16(x2)?\.f32|(wg)?mma\.\S*\.bf16\.bf16(\.f32)?")  # exact for digits
FLOATS = re.compile(r"\.(f|bf)(16|32|64)|approx|ftz")


def undefined(instructions: list[str], has_fma: bool) -> list[str]:
    """Return the float instructions that exact-1 does not define."""
    floats = [name for name in instructions if FLOATS.search(name) and not re.match(r"(ld|st|mov)\.", name)]
    return [name for name in floats if not (DEFINED.fullmatch(name) or (has_fma and name == "fma.rn.f32"))]


@pytest.fixture(scope="module")
def kernels(offline_compiler: OfflineCompiler) -> dict[str, list[str]]:
    """Return the instructions of each kernel."""
    compiled = [json.loads(line) for line in offline_compiler.run(COMPILE, " ".join(FUNCTIONS)).splitlines()]
    assert len(compiled) == len(FUNCTIONS) + 16 + len(PLANTED) and all(has_entry for _, has_entry, _ in compiled)
    return {name: instructions for name, _, instructions in compiled}


def test_kernels_use_only_defined_instructions(kernels: dict[str, list[str]]) -> None:
    for name, instructions in kernels.items():
        if name not in PLANTED:
            others = [each for each in instructions if name not in IN_BFLOAT16 or not OF_DIGITS.fullmatch(each)]
            assert undefined(others, name in WITH_FMA) == [], name
            assert (others != instructions) == (name in IN_BFLOAT16), name
    assert any("mma" in name for name in kernels["_linear_kernel"])
    assert all(any("wgmma" in name for name in kernels[hopper]) for hopper in kernels if hopper.startswith("hopper"))


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_fault_is_detected(kernels: dict[str, list[str]], fault: str) -> None:
    assert undefined(kernels[fault], has_fma=False), kernels[fault]
