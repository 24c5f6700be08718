"""ModelDescription: what is known of a compiled model, wherever it runs."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import nn

from detcompile.facts import ModelFacts
from detcompile.orders.numerics import Numerics
from detcompile.passes.proof.certificate import Certificate
from detcompile.passes.stages import StagePart

__all__ = ["ModelDescription", "ParameterCount"]


class ParameterCount(NamedTuple):
    """Elements of a model's parameters, shared ones once, as its checkpoint stores them."""

    total: int
    embeddings: int

    @classmethod
    def of(cls, module: nn.Module) -> "ParameterCount":
        """The count of a whole module."""
        tables = {each.weight for each in module.modules() if isinstance(each, nn.Embedding)}
        return cls(sum(each.numel() for each in module.parameters()), sum(each.numel() for each in tables))


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """What is known of a compiled model, wherever it runs.

    Attributes:
        module: the Hugging Face module; where that is not in this process, what stands for it: its ``config``,
            ``generation_config`` and ``name_or_path``; and of an archive the ``tokenizer_folder``.
        numerics: the declared orders.
        certificate: the proof.
        program: digest of the certified graph, over the whole weights.
        facts: the model's sizes; where ranks share it, the first rank's.
        parameters: how many parameters the whole model has.
        stage: the part of the layers that is run here, of which ``facts`` are then; None where all are.
    """

    module: Any
    numerics: Numerics
    certificate: Certificate
    program: str
    facts: ModelFacts
    parameters: ParameterCount
    stage: StagePart | None = None

    def elsewhere(self) -> "ModelDescription":
        """The same for a process that does not hold the module."""
        module = SimpleNamespace(
            config=self.module.config,
            generation_config=getattr(self.module, "generation_config", None),
            name_or_path=self.module.name_or_path,
        )
        return replace(self, module=module)
