"""Bit-for-bit reproducible LLM inference by compilation.

Names are imported on first use, so importing the package takes no time.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from detcompile.config import pin_kernel_cache, pin_ptxas
from detcompile.releases import naming_releases

if TYPE_CHECKING:
    from detcompile.api import compile, load_model
    from detcompile.errors import (
        ArchiveError,
        CompilerNotFound,
        DetcompileError,
        EngineError,
        GenerationError,
        InvalidInput,
        NumericsError,
        ScheduleError,
        StorageError,
        TrainerMismatch,
        UncertifiedOp,
        UnservedAttribute,
        UnsupportedModel,
        UnsupportedRelease,
        WorkerError,
    )
    from detcompile.exporting import export
    from detcompile.models.compiled import CompiledModel
    from detcompile.models.exported import ExportedModel, load
    from detcompile.models.pooling import CompiledClassifier, CompiledEmbedder
    from detcompile.offline.llm import LLM, LoRARequest
    from detcompile.orders.numerics import Numerics
    from detcompile.passes.backend import Backend
    from detcompile.passes.proof.certificate import Certificate
    from detcompile.runtime.engine import Engine
    from detcompile.runtime.engine_config import EngineConfig
    from detcompile.runtime.grammars.grammar import Grammar
    from detcompile.runtime.requests.outputs import CompletionOutput, Logprobs, RequestOutput
    from detcompile.runtime.requests.sampling_params import SamplingParams
    from detcompile.runtime.speculation.draft_tree import DraftTree
    from detcompile.runtime.speculation.drafter import Drafter
    from detcompile.runtime.speculation.medusa_drafter import MedusaDrafter
    from detcompile.runtime.speculation.medusa_heads import MedusaHeads
    from detcompile.runtime.speculation.mirror_drafter import MirrorDrafter
    from detcompile.runtime.speculation.ngram_drafter import NGramDrafter
    from detcompile.runtime.speculation.speculator import SpeculationConfig
    from detcompile.training.gradient_norm import clip_grad_norm_
    from detcompile.training.loading import trainer
    from detcompile.training.optimizer import AdamW
    from detcompile.training.policy_loss import policy_loss
    from detcompile.training.trainer import Trainer

__all__ = [
    "AdamW",
    "ArchiveError",
    "Backend",
    "Certificate",
    "CompiledClassifier",
    "CompiledEmbedder",
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
    "GenerationError",
    "Grammar",
    "InvalidInput",
    "LLM",
    "LoRARequest",
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
    "Trainer",
    "TrainerMismatch",
    "UncertifiedOp",
    "UnservedAttribute",
    "UnsupportedModel",
    "UnsupportedRelease",
    "WorkerError",
    "clip_grad_norm_",
    "compile",
    "export",
    "load",
    "load_model",
    "policy_loss",
    "trainer",
]

__version__ = "0.1.0"

PLACES = {  # modules of the public names
    "AdamW": "detcompile.training.optimizer",
    "ArchiveError": "detcompile.errors",
    "Backend": "detcompile.passes.backend",
    "Certificate": "detcompile.passes.proof.certificate",
    "CompiledClassifier": "detcompile.models.pooling",
    "CompiledEmbedder": "detcompile.models.pooling",
    "CompiledModel": "detcompile.models.compiled",
    "CompilerNotFound": "detcompile.errors",
    "CompletionOutput": "detcompile.runtime.requests.outputs",
    "DetcompileError": "detcompile.errors",
    "DraftTree": "detcompile.runtime.speculation.draft_tree",
    "Drafter": "detcompile.runtime.speculation.drafter",
    "Engine": "detcompile.runtime.engine",
    "EngineConfig": "detcompile.runtime.engine_config",
    "EngineError": "detcompile.errors",
    "ExportedModel": "detcompile.models.exported",
    "GenerationError": "detcompile.errors",
    "Grammar": "detcompile.runtime.grammars.grammar",
    "InvalidInput": "detcompile.errors",
    "LLM": "detcompile.offline.llm",
    "LoRARequest": "detcompile.offline.llm",
    "Logprobs": "detcompile.runtime.requests.outputs",
    "MedusaDrafter": "detcompile.runtime.speculation.medusa_drafter",
    "MedusaHeads": "detcompile.runtime.speculation.medusa_heads",
    "MirrorDrafter": "detcompile.runtime.speculation.mirror_drafter",
    "NGramDrafter": "detcompile.runtime.speculation.ngram_drafter",
    "Numerics": "detcompile.orders.numerics",
    "NumericsError": "detcompile.errors",
    "RequestOutput": "detcompile.runtime.requests.outputs",
    "SamplingParams": "detcompile.runtime.requests.sampling_params",
    "ScheduleError": "detcompile.errors",
    "SpeculationConfig": "detcompile.runtime.speculation.speculator",
    "StorageError": "detcompile.errors",
    "TrainerMismatch": "detcompile.errors",
    "Trainer": "detcompile.training.trainer",
    "UncertifiedOp": "detcompile.errors",
    "UnservedAttribute": "detcompile.errors",
    "UnsupportedModel": "detcompile.errors",
    "UnsupportedRelease": "detcompile.errors",
    "WorkerError": "detcompile.errors",
    "clip_grad_norm_": "detcompile.training.gradient_norm",
    "compile": "detcompile.api",
    "export": "detcompile.exporting",
    "load": "detcompile.models.exported",
    "load_model": "detcompile.api",
    "policy_loss": "detcompile.training.policy_loss",
    "trainer": "detcompile.training.loading",
}


def __getattr__(name: str) -> Any:
    if name in PLACES:
        with naming_releases():
            value = getattr(importlib.import_module(PLACES[name]), name)
        globals()[name] = value
        return value
    if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is not None:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *PLACES})


# At import: Inductor sets both variables when it compiles or loads its first kernel.
pin_ptxas()
pin_kernel_cache()
