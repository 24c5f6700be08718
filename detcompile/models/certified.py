"""CertifiedModel: the base of every compiled model: certificate, fingerprint, and live weights."""

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


@runtime_checkable
class ServesWeights(Protocol):
    """A trainer, whose weights differ from the served ones."""

    def serving_weights(self) -> Mapping[str, Tensor]:
        """Return tensors by the model's names and in its dtypes."""


WeightSource = Union[ServesWeights, nn.Module, Mapping[str, Tensor], Iterable[tuple[str, Tensor]], "CertifiedModel"]


class CertifiedModel(ModelObject):
    """A model whose bits are certified to depend only on each row's tokens.

    Args:
        executor: runs its steps, in this process or in others.

    Attributes:
        model: the Hugging Face module it was made from, with row-parallel linears replaced; a stand-in if the module is
            not in this process (executors.description).
        numerics: the declared orders.
        certificate: the proof; prints as a table.
        program: digest of the certified graph, over the whole weights.
        facts: the model's sizes.
        max_context: maximum number of tokens of a sequence.
        vocab_size: one more than the largest token id of a prompt.
        dtype: dtype of the weights, activations and KV cache. device: device of the first rank's weights.
        ranks: the ranks with which this process shares the model, all of which must make the same calls; None if it
            shares with none.
    """

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        description, facts = executor.description, executor.description.facts
        self.model, self.numerics, self.certificate = description.module, description.numerics, description.certificate
        self.program, self.facts, self.ranks = description.program, facts, executor.ranks
        self.max_context, self.vocab_size = facts.max_context, facts.num_token_ids
        self.dtype, self.device = facts.dtype, facts.device
        self._engines: weakref.WeakSet[Engine] = weakref.WeakSet()

    @cached_property
    def tokenizer(self) -> Any | None:
        """The tokenizer of the model's folder, or of its commit on the Hub; None if there is none.

        Raises:
            InvalidInput: the tokenizer is damaged.
        """
        return tokenizer_of(self.model)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InvalidInput(
            "a compiled model cannot be copied or pickled, because its code holds pointers to the weights: compile the"
            " module again, or save the model with export()"
        )

    def update_weights(self, source: WeightSource) -> int:
        """Write new contents into the weights, in place.

        Compiled graphs and CUDA graphs stay valid; prefix caches are emptied. A subset of the weights is allowed,
        except where ranks share the model, and in exact arithmetic, which quantizes them as compile() does. Nothing is
        written unless all of them fit.

        Args:
            source: a trainer, whose weights are rounded to the model's dtype and gathered from the ranks that share
                them (all of which must call this); a module or compiled model of the same architecture; or tensors by
                the names of Hugging Face's model, as a mapping or as pairs, on any device. Buffers are allowed.

        Returns:
            The version of the weights, which counts up.

        Raises:
            InvalidInput: a name, shape or dtype differs from the model's, or one is missing; or requests are running
                on one of its engines.
        """
        weights: object = source.model if isinstance(source, CertifiedModel) else source
        if isinstance(weights, ServesWeights):
            weights = weights.serving_weights()
        tensors = tensors_by_name(weights, type(source).__name__)
        with without_interrupts(), contextlib.ExitStack() as paused:
            for engine in list(self._engines):
                paused.enter_context(engine.idle())
            return self._write_weights(tensors)

    def _write_weights(self, tensors: Mapping[str, Tensor]) -> int:
        return self.executor.weights.update(tensors)

    @property
    def weights_version(self) -> int:
        """The number of weight versions so far, from update_weights or from detected changes in place."""
        return self.executor.weights.version()

    def weight_digests(self) -> dict[str, str]:
        """Return the current digest of every whole parameter and buffer; raises as ``fingerprint_parts``."""
        return self.executor.weights.digests()

    @property
    def fingerprint_parts(self) -> dict[str, str]:
        """The parts of the fingerprint, by name. Reads every weight, so it reflects changes in place.

        Raises:
            InvalidInput: a weight has a new storage; or a rank's share was changed without reporting the digest of the
                whole weight.
        """
        return self.executor.fingerprint_parts()

    @property
    def fingerprint(self) -> str:
        """SHA-256 in hex: equal fingerprints give equal bits. Reads every weight, as ``fingerprint_parts``.

        It is the same at every tensor-parallel size, because it covers the whole weights.
        """
        return fingerprint(self.fingerprint_parts)
