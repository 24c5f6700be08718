"""Where the Triton tests run: on a GPU, or, with TRITON_INTERPRET=1, in Triton's CPU interpreter.

test_triton_interpreter.py starts the second kind in a process of its own, since the variable must be set before any
kernel is defined. The interpreter's loops take ``int()`` of a one-element array, which numpy 2.4 refuses: hence the
patch. Its ``tl.dot`` has BLAS's order, and is wrong for bfloat16: here it takes float32 only, in the GPU's order.
"""

import os

import pytest
import torch

from detcompile.float32 import fma_float32

__all__ = ["DEVICE", "DOT_DTYPES", "INTERPRETED", "NEEDS_GPU", "NEEDS_TRITON"]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DOT_DTYPES = [torch.float32] if INTERPRETED else [torch.bfloat16, torch.float16, torch.float32]
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

if INTERPRETED:
    from triton.runtime import interpreter

    _patch_lang_tensor = interpreter._patch_lang_tensor

    def _patch(tensor, scope):  # type: ignore[no-untyped-def]
        _patch_lang_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def _dot(builder, a, b, d, input_precision, max_num_imprecise_acc):  # type: ignore[no-untyped-def]
        """One FMA a k, ascending: what the GPU does for float32, and what `Sequential` says."""
        acc = d.data
        for k in range(a.data.shape[1]):
            acc = fma_float32(a.data[:, k, None], b.data[None, k], acc)
        return interpreter.TensorHandle(acc, d.dtype.scalar)

    interpreter._patch_lang_tensor = _patch
    interpreter.InterpreterBuilder.create_dot = _dot
