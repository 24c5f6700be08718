"""What the merge of attention's chunks becomes on a Hopper GPU, compiled without one: the arithmetic of the merge that
it replaces, operation by operation."""

import re

from tests.templates.offline_compiler import OfflineCompiler
from tests.templates.triton_interpreter import NEEDS_COMPILER

pytestmark = NEEDS_COMPILER

COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.experimental.gluon._runtime import GluonASTSource
from detcompile.templates.attention.merge import marked_merge_kernel, merge_kernel

TYPES = {"out_ptr": "*bf16", "cu_ptr": "*i32", "lens_ptr": "*i32", "c": "fp32", "pre_scale": "fp32"}


def ptx(source, kernel, **constants):
    types = {
        name: "constexpr" if name in constants else TYPES.get(name, "*fp32" if name.endswith("_ptr") else "i32")
        for name in kernel.arg_names
    }
    options = {"num_warps": 1, "enable_fp_fusion": False}
    found = compile(source(kernel, types, constexprs=constants), target=GPUTarget("cuda", 90, 32), options=options)
    print(found.asm["ptx"], end="=====")


for d, columns, batch, buffers, eager in (64, 32, 8, 2, False), (128, 128, 4, 1, True):
    variant = {"D": d, "W": columns, "BATCH": batch, "BUFFERS": buffers, "EAGER": eager, "PDL": True}
    ptx(GluonASTSource, marked_merge_kernel, **variant)
kind = dict.fromkeys(("WINDOWED", "CHUNKED", "NEEDS_SCORES", "SINKS"), False)
ptx(ASTSource, merge_kernel, DV=128, DVP=128, CHUNK=512, AHEAD=4, PDL=True, **kind)
"""


def test_merges_are_made_of_the_same_operations(offline_compiler: OfflineCompiler) -> None:
    *marked, by_lengths = (
        set(re.findall(r"\b((?:fma|mad|mul|add|sub|div|rcp|ex2|max|min)(?:\.[a-z]+)*\.f32)\b", text))
        for text in offline_compiler.run(COMPILE).split("=====")[:-1]
    )
    assert marked == [by_lengths, by_lengths]
    assert {op.split(".")[0] for op in by_lengths} == {"mul", "add", "sub", "div", "ex2", "max"}
