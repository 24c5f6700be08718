"""Bit-for-bit reproducible LLM inference by compilation."""

from torch._dynamo import register_backend

from detcompile.api import compile, load_model
from detcompile.compiled import CompiledModel
from detcompile.errors import (
    CompilerNotFound,
    DetcompileError,
    InvalidInput,
    NumericsError,
    ScheduleError,
    UncertifiedOp,
    UnsupportedModel,
)
from detcompile.numerics import Numerics
from detcompile.passes.backend import Backend, detcompile_backend
from detcompile.passes.certificate import Certificate
from detcompile.runtime.sampling import SamplingParams

__all__ = [
    "Backend",
    "Certificate",
    "CompiledModel",
    "CompilerNotFound",
    "DetcompileError",
    "InvalidInput",
    "Numerics",
    "NumericsError",
    "SamplingParams",
    "ScheduleError",
    "UncertifiedOp",
    "UnsupportedModel",
    "compile",
    "load_model",
]

__version__ = "0.1.0"

register_backend(detcompile_backend, name="detcompile")  # torch.compile(model, backend="detcompile")
