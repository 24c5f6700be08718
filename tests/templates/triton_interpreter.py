"""Run the Triton tests on a GPU or, with TRITON_INTERPRET=1, in Triton's CPU interpreter.

test_triton_interpreter.py starts the second kind in a process of its own, since the variable must be set before any
kernel is defined. The interpreter's loops take ``int()`` of a one-element array, which numpy 2.4 refuses: hence the
patch. Its ``tl.dot`` has BLAS's order, and is wrong for bfloat16: here it takes float32 only, in the GPU's order.
"""

import ctypes
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.exhaustive import EXHAUSTIVE, exhaustive_unless

__all__ = [
    "DEVICE",
    "DOT_DTYPES",
    "INTERPRETED",
    "NEEDS_COMPILER",
    "NEEDS_GPU",
    "NEEDS_TRITON",
    "QUICK_DOT_DTYPES",
    "exhaustive_interpreted",
]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DOT_DTYPES = [torch.float32] if INTERPRETED else [torch.bfloat16, torch.float16, torch.float32]
QUICK_DOT_DTYPES = exhaustive_unless(lambda dtype: dtype is not torch.float16, DOT_DTYPES)  # bfloat16: the same code
NEEDS_COMPILER = pytest.mark.skipif(
    INTERPRETED, reason="needs Triton's compiler, and TRITON_INTERPRET=1 replaces it by the interpreter"
)
NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
NEEDS_TRITON = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (INTERPRETED or torch.cuda.is_available()),
        reason="needs a CUDA GPU (test_triton_interpreter.py runs it in Triton's interpreter)",
    ),
]


def exhaustive_interpreted(test: Callable[..., None]) -> Callable[..., None]:
    """Leave a test that takes seconds in the interpreter to the rotation; a GPU runs it always."""
    return EXHAUSTIVE(test) if INTERPRETED else test


if INTERPRETED:
    from triton import language
    from triton.runtime import interpreter

    _patch_lang_tensor = interpreter._patch_lang_tensor

    def _patch(tensor, scope):  # type: ignore[no-untyped-def]
        _patch_lang_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    _DOT = """
    #include <cmath>
    extern "C" void dot(const float *a_MK, const float *b_KN, float *acc_MN, long M, long N, long K) {
      for (long m = 0; m < M; m++)
        for (long k = 0; k < K; k++)
          for (long n = 0; n < N; n++)
            acc_MN[m * N + n] = std::fma(a_MK[m * K + k], b_KN[k * N + n], acc_MN[m * N + n]);
    }
    """

    def _compiled_dot() -> ctypes._CFuncPtr:
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder, "dot.so")
            command = [os.environ.get("CXX", "g++"), "-O3", "-march=native", "-ffp-contract=off", "-shared", "-fPIC"]
            subprocess.run([*command, "-x", "c++", "-", "-o", str(library)], input=_DOT, text=True, check=True)
            dot = ctypes.CDLL(str(library)).dot
        dot.argtypes, dot.restype = [ctypes.c_void_p] * 3 + [ctypes.c_long] * 3, None
        return dot

    _run_dot = _compiled_dot()

    def _dot(builder, a, b, d, input_precision, max_num_imprecise_acc):  # type: ignore[no-untyped-def]
        """Add one FMA per k, ascending, as the GPU does for float32 and as `Sequential` defines. Compiled for speed."""
        a, b = (np.ascontiguousarray(operand.data, dtype=np.float32) for operand in (a, b))
        acc = np.array(d.data, dtype=np.float32, order="C")
        for batch in np.ndindex(acc.shape[:-2]):
            _run_dot(*(part[batch].ctypes.data for part in (a, b, acc)), *acc.shape[-2:], a.shape[-1])
        return interpreter.TensorHandle(acc, d.dtype.scalar)

    _patch_lang, _patched = interpreter._patch_lang, set()

    def _patch_lang_once(fn):  # type: ignore[no-untyped-def]
        """Patch Triton's language once per kernel instead of at each call of a function."""
        langs = {id(value) for value in fn.__globals__.values() if value is language or value is language.core}
        if langs <= _patched:
            return interpreter._LangPatchScope()
        scope = _patch_lang(fn)
        if not _patched:  # the kernel's patch, the only one to restore
            restore = scope.restore
            scope.restore = lambda: (_patched.clear(), restore())
        _patched.update(langs)
        return scope

    interpreter._patch_lang = _patch_lang_once
    interpreter._patch_lang_tensor = _patch
    interpreter.InterpreterBuilder.create_dot = _dot
