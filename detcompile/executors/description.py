"""ModelDescription: what is known of a compiled model, wherever it runs."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from detcompile.facts import ModelFacts
from detcompile.orders.numerics import Numerics
from detcompile.passes.proof.certificate import Certificate

__all__ = ["ModelDescription"]


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """What is known of a compiled model, wherever it runs.

    Attributes:
        module: the Hugging Face module; where that is not in this process, what stands for it: its
            ``generation_config`` and ``name_or_path``, and its ``config`` unless it came from an archive.
        numerics: the declared orders.
        certificate: the proof.
        program: digest of the certified graph, over the whole weights.
        facts: the model's sizes; where ranks share it, the first rank's.
    """

    module: Any
    numerics: Numerics
    certificate: Certificate
    program: str
    facts: ModelFacts

    def elsewhere(self) -> "ModelDescription":
        """The same for a process that does not hold the module."""
        module = SimpleNamespace(
            config=getattr(self.module, "config", None),
            generation_config=getattr(self.module, "generation_config", None),
            name_or_path=self.module.name_or_path,
        )
        return replace(self, module=module)
