"""CertifiedModel: what every compiled model has, whatever its head: the proof, the fingerprint, and live weights."""

import contextlib
import weakref
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, Protocol, Union, runtime_checkable

from torch import Tensor, nn

from detcompile.digests import fingerprint
from detcompile.errors import InvalidInput
from detcompile.executors.executor import Executor
from detcompile.executors.live_weights import tensors_by_name
from detcompile.models.loading import tokenizer_of
from detcompile.models.model_object import ModelObject
from detcompile.runtime.engine import Engine
from detcompile.runtime.requests.turns import without_interrupts

__all__ = ["CertifiedModel", "WeightSource"]



@runtime_checkable
class ServesWeights(Protocol):
    """A trainer: what it holds is not what is served."""

    def serving_weights(self) -> Mapping[str, Tensor]:
        """Tensors by the names and in the dtypes of the model."""


WeightSource = Union[ServesWeights, nn.Module, Mapping[str, Tensor], Iterable[tuple[str, Tensor]], "CertifiedModel"]


class CertifiedModel(ModelObject):
    """A model whose bits are certified to depend on each row's own tokens.

    Args:
        executor: runs its steps, in this process or in others.

    Attributes:
        model: the Hugging Face module it was made from, whose row-parallel linears were replaced; what stands for one
            that is not in this process (executors.description).
        numerics: the declared orders.
        certificate: the proof; prints as a table.
        program: digest of the certified graph, over the whole weights.
        facts: the model's sizes.
        max_context: tokens a sequence may hold.
        vocab_size: one more than the largest id that a prompt may hold.
        dtype: dtype of the weights, the activations and the KV cache. device: where the first rank's weights live.
        ranks: the ranks with which this process shares the model, all of which have to make the same calls; None if
            with none.
    """

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        known, facts = executor.description, executor.description.facts
        self.model, self.numerics, self.certificate = known.module, known.numerics, known.certificate
        self.program, self.facts, self.ranks = known.program, facts, executor.ranks
        self.max_context, self.vocab_size = facts.max_context, facts.num_token_ids
        self.dtype, self.device = facts.dtype, facts.device
        self._engines: weakref.WeakSet[Engine] = weakref.WeakSet()

    @cached_property
    def tokenizer(self) -> Any | None:
        """The tokenizer of the model's folder, or of its commit on the Hub; None if there is none.

        Raises InvalidInput if it is damaged.
        """
        return tokenizer_of(self.model)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InvalidInput(
            "a compiled model is not copied or pickled, since its code holds the weights where they are: compile the"
            " module once more, or keep the model as a file by export()"
        )

    def update_weights(self, source: WeightSource) -> int:
        """New contents for weights, in place: compiled graphs stay, CUDA graphs too, and prefix caches forget.

        Some of the weights suffice. Nothing is written unless all fit.

        Args:
            source: a trainer, whose weights are rounded to the model's dtype, and gathered from ranks that share
                them, all of which call this; a module or compiled model of the same architecture; or tensors by the
                names that Hugging Face's model has for them, as a mapping or as pairs, on any device. Buffers may be
                among them.

        Returns:
            The version of the weights, which counts up.

        Raises:
            InvalidInput: a name, a shape or a dtype that is not the model's; requests are running on one of its
                engines; or ranks share the model.
        """
        held: object = source.model if isinstance(source, CertifiedModel) else source
        if isinstance(held, ServesWeights):
            held = held.serving_weights()
        given = tensors_by_name(held, type(source).__name__)
        with without_interrupts(), contextlib.ExitStack() as paused:
            for engine in list(self._engines):
                paused.enter_context(engine.idle())
            return self._write_weights(given)

    def _write_weights(self, given: Mapping[str, Tensor]) -> int:
        return self.executor.weights.update(given)

    @property
    def weights_version(self) -> int:
        """Counts the contents that the weights have had, by update_weights or by changes in place that were seen."""
        return self.executor.weights.version()

    def weight_digests(self) -> dict[str, str]:
        """The digest of every parameter and buffer as it is now, whole; raises as ``fingerprint_parts``."""
        return self.executor.weights.digests()

    @property
    def fingerprint_parts(self) -> dict[str, str]:
        """What the contract holds fixed, by name. Reads every weight, so that it follows changes in place.

        Raises:
            InvalidInput: a weight was given another storage since; or a rank's share of one was changed by something
                that did not tell what the whole is now.
        """
        return self.executor.fingerprint_parts()

    @property
    def fingerprint(self) -> str:
        """sha256 in hex: equal fingerprints give equal bits. Reads every weight, as ``fingerprint_parts``.

        It is the same at every tensor-parallel size; there the whole weights were read before the ranks took shares.
        """
        return fingerprint(self.fingerprint_parts)
