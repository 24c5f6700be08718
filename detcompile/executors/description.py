"""ModelDescription: certificate, orders and sizes of a compiled model, in this process or elsewhere."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import nn

from detcompile.orders.numerics import Numerics
from detcompile.passes.proof.certificate import Certificate
from detcompile.passes.warm.kept_program import StagePart
from detcompile.step import ModelFacts


class ParameterCount(NamedTuple):
    """Number of parameter elements in the checkpoint; tied parameters count once."""

    total: int
    embeddings: int

    @classmethod
    def of(cls, module: nn.Module) -> "ParameterCount":
        """Count the parameters of a whole module."""
        tables = {each.weight for each in module.modules() if isinstance(each, nn.Embedding)}
        return cls(sum(each.numel() for each in module.parameters()), sum(each.numel() for each in tables))


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """A compiled model, in this process or elsewhere.

    Attributes:
        module: the Hugging Face module. If it is not in this process, a namespace with its ``config``,
            ``generation_config`` and ``name_or_path``, and with ``tokenizer_folder`` if it came from an archive.
        numerics: the declared orders.
        certificate: the proof.
        program: digest of the certified graph, over the whole weights.
        facts: the model's sizes; those of the first rank if ranks share it.
        parameters: number of parameters of the whole model.
        stage: the pipeline stage that runs here, which ``facts`` then describe; None if all layers run here.
    """

    module: Any
    numerics: Numerics
    certificate: Certificate
    program: str
    facts: ModelFacts
    parameters: ParameterCount
    stage: StagePart | None = None

    def elsewhere(self) -> "ModelDescription":
        """Return the description without the module, for another process."""
        module = SimpleNamespace(
            config=self.module.config,
            generation_config=getattr(self.module, "generation_config", None),
            name_or_path=self.module.name_or_path,
        )
        return replace(self, module=module)
