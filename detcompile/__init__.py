"""Bit-for-bit reproducible LLM inference by compilation.

Names are imported on first use, so importing the package takes no time.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from detcompile.config import pin_kernel_cache, pin_ptxas
from detcompile.gc_pause import without_collections
from detcompile.releases import naming_releases

if TYPE_CHECKING:
    from detcompile.api import compile as compile
    from detcompile.api import load_model as load_model
    from detcompile.errors import ArchiveError as ArchiveError
    from detcompile.errors import CompilerNotFound as CompilerNotFound
    from detcompile.errors import DetcompileError as DetcompileError
    from detcompile.errors import EngineError as EngineError
    from detcompile.errors import GenerationError as GenerationError
    from detcompile.errors import InvalidInput as InvalidInput
    from detcompile.errors import NumericsError as NumericsError
    from detcompile.errors import ScheduleError as ScheduleError
    from detcompile.errors import StorageError as StorageError
    from detcompile.errors import TrainerMismatch as TrainerMismatch
    from detcompile.errors import UncertifiedOp as UncertifiedOp
    from detcompile.errors import UnservedAttribute as UnservedAttribute
    from detcompile.errors import UnsupportedModel as UnsupportedModel
    from detcompile.errors import UnsupportedRelease as UnsupportedRelease
    from detcompile.errors import WorkerError as WorkerError
    from detcompile.exporting import export as export
    from detcompile.models.compiled import CompiledModel as CompiledModel
    from detcompile.models.exported import ExportedModel as ExportedModel
    from detcompile.models.exported import load as load
    from detcompile.models.pooling import CompiledClassifier as CompiledClassifier
    from detcompile.models.pooling import CompiledEmbedder as CompiledEmbedder
    from detcompile.offline.llm import LLM as LLM
    from detcompile.offline.llm import LoRARequest as LoRARequest
    from detcompile.orders.numerics import Numerics as Numerics
    from detcompile.passes.backend import Backend as Backend
    from detcompile.passes.proof.certificate import Certificate as Certificate
    from detcompile.runtime.engine import Engine as Engine
    from detcompile.runtime.engine_config import EngineConfig as EngineConfig
    from detcompile.runtime.grammars.grammar import Grammar as Grammar
    from detcompile.runtime.requests.outputs import CompletionOutput as CompletionOutput
    from detcompile.runtime.requests.outputs import Logprobs as Logprobs
    from detcompile.runtime.requests.outputs import RequestOutput as RequestOutput
    from detcompile.runtime.requests.sampling_params import SamplingParams as SamplingParams
    from detcompile.runtime.speculation.draft_tree import DraftTree as DraftTree
    from detcompile.runtime.speculation.drafter import Drafter as Drafter
    from detcompile.runtime.speculation.medusa_drafter import MedusaDrafter as MedusaDrafter
    from detcompile.runtime.speculation.medusa_heads import MedusaHeads as MedusaHeads
    from detcompile.runtime.speculation.mirror_drafter import MirrorDrafter as MirrorDrafter
    from detcompile.runtime.speculation.ngram_drafter import NGramDrafter as NGramDrafter
    from detcompile.runtime.speculation.speculator import SpeculationConfig as SpeculationConfig
    from detcompile.training.gradient_norm import clip_grad_norm_ as clip_grad_norm_
    from detcompile.training.loading import trainer as trainer
    from detcompile.training.optimizer import AdamW as AdamW
    from detcompile.training.policy_loss import policy_loss as policy_loss
    from detcompile.training.trainer import Trainer as Trainer

PUBLIC = {  # names by module
    "api": "compile load_model",
    "errors": (
        "ArchiveError CompilerNotFound DetcompileError EngineError GenerationError InvalidInput NumericsError "
        "ScheduleError StorageError TrainerMismatch UncertifiedOp UnservedAttribute UnsupportedModel "
        "UnsupportedRelease WorkerError"
    ),
    "exporting": "export",
    "models.compiled": "CompiledModel",
    "models.exported": "ExportedModel load",
    "models.pooling": "CompiledClassifier CompiledEmbedder",
    "offline.llm": "LLM LoRARequest",
    "orders.numerics": "Numerics",
    "passes.backend": "Backend",
    "passes.proof.certificate": "Certificate",
    "runtime.engine": "Engine",
    "runtime.engine_config": "EngineConfig",
    "runtime.grammars.grammar": "Grammar",
    "runtime.requests.outputs": "CompletionOutput Logprobs RequestOutput",
    "runtime.requests.sampling_params": "SamplingParams",
    "runtime.speculation.draft_tree": "DraftTree",
    "runtime.speculation.drafter": "Drafter",
    "runtime.speculation.medusa_drafter": "MedusaDrafter",
    "runtime.speculation.medusa_heads": "MedusaHeads",
    "runtime.speculation.mirror_drafter": "MirrorDrafter",
    "runtime.speculation.ngram_drafter": "NGramDrafter",
    "runtime.speculation.speculator": "SpeculationConfig",
    "training.gradient_norm": "clip_grad_norm_",
    "training.loading": "trainer",
    "training.optimizer": "AdamW",
    "training.policy_loss": "policy_loss",
    "training.trainer": "Trainer",
}
PLACES = {name: f"detcompile.{module}" for module, names in PUBLIC.items() for name in names.split()}

__all__ = sorted(PLACES)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in PLACES:
        with naming_releases(), without_collections():  # each would visit all of torch
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
