"""Bit-for-bit reproducible LLM inference by compilation."""

from torch._dynamo import register_backend

from detcompile.api import compile, load_model
from detcompile.config import pin_ptxas
from detcompile.errors import (
    ArchiveError,
    CompilerNotFound,
    DetcompileError,
    EngineError,
    InvalidInput,
    NumericsError,
    ScheduleError,
    StorageError,
    UncertifiedOp,
    UnsupportedModel,
    WorkerError,
)
from detcompile.exporting import export
from detcompile.models.compiled import CompiledModel
from detcompile.models.exported import ExportedModel, load
from detcompile.orders.numerics import Numerics
from detcompile.passes.backend import Backend, detcompile_backend
from detcompile.passes.calls import enter_calls
from detcompile.passes.proof.certificate import Certificate
from detcompile.runtime.engine import Engine
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.requests.outputs import CompletionOutput, Logprobs, RequestOutput
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.runtime.speculation.draft_tree import DraftTree
from detcompile.runtime.speculation.drafter import Drafter
from detcompile.runtime.speculation.medusa_drafter import MedusaDrafter
from detcompile.runtime.speculation.medusa_heads import MedusaHeads
from detcompile.runtime.speculation.mirror_drafter import MirrorDrafter
from detcompile.runtime.speculation.ngram_drafter import NGramDrafter
from detcompile.runtime.speculation.speculator import SpeculationConfig

__all__ = [
    "ArchiveError",
    "Backend",
    "Certificate",
    "CompiledModel",
    "CompilerNotFound",
    "CompletionOutput",
    "DetcompileError",
    "DraftTree",
    "Drafter",
    "Engine",
    "EngineConfig",
    "EngineError",
    "ExportedModel",
    "InvalidInput",
    "Logprobs",
    "MedusaDrafter",
    "MedusaHeads",
    "MirrorDrafter",
    "NGramDrafter",
    "Numerics",
    "NumericsError",
    "RequestOutput",
    "SamplingParams",
    "ScheduleError",
    "SpeculationConfig",
    "StorageError",
    "UncertifiedOp",
    "UnsupportedModel",
    "WorkerError",
    "compile",
    "export",
    "load",
    "load_model",
]

__version__ = "0.1.0"

register_backend(detcompile_backend, name="detcompile")  # torch.compile(model, backend="detcompile")
enter_calls()  # before torch.compile sees a backend of ours
pin_ptxas()  # at import: a kernel that Inductor compiles before it would have another assembler
