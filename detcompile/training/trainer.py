"""Trainer: a causal LM whose logits have the bytes of serving, and whose gradients are exact sums."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from detcompile.errors import InvalidInput, UnsupportedModel
from detcompile.models.compiled import CompiledModel
from detcompile.models.loading import tokenizer_of
from detcompile.models.padded_calls import UNTRACED, require_served, require_tensors
from detcompile.orders.numerics import Numerics
from detcompile.passes.proof.certificate import Certificate
from detcompile.runtime.dense.padded_batch import UnpaddedBatch, check_batch, repad, unpad
from detcompile.runtime.requests.plain_values import number
from detcompile.runtime.requests.sampling_params import LARGEST, MIN_TEMPERATURE, SamplingParams
from detcompile.templates.training.exactness import ExactnessGuard
from detcompile.templates.training.logprobs import scored_tokens
from detcompile.torch_internals.autograd import backward_keeps_graph
from detcompile.training.adapters import of_adapters, save_adapters
from detcompile.training.agreement import require_agreement, require_same_orders
from detcompile.training.blocks import Block, StepTensors, Weight, require_no_hooks, weights_of
from detcompile.training.construction import build
from detcompile.training.filtered_logprobs import filtered_logprobs
from detcompile.training.grad_accumulator import GradAccumulator
from detcompile.training.gradient_norm import clip_grad_norm_
from detcompile.training.packing import packed_step, padded, pieces, predicting_leaves, rows_at_once
from detcompile.training.policy_loss import label_loss
from detcompile.training.sharding import ExactSum, Unreplicated, mesh_of, shard_blocks, whole, whole_weights

SERVED = "input_ids, attention_mask, position_ids, labels and num_items_in_batch"


@dataclass(frozen=True)
class TrainingCertificate:
    """The certificates of a trainer; prints as two tables.

    Attributes:
        forward: each row of logits depends only on its own sequence, in the orders of serving.
        backward: gradients of rows keep sequences apart, and gradients of weights are exact sums over tokens.
    """

    forward: Certificate
    backward: Certificate

    def to_json(self) -> str:
        """Return one JSON object with both."""
        return json.dumps({way: json.loads(getattr(self, way).to_json()) for way in ("forward", "backward")})

    def summary(self) -> str:
        """Return two lines: the number of certified operations of each class."""
        return f"forward: {self.forward.summary()}\nbackward: {self.backward.summary()}"

    def __str__(self) -> str:
        return f"forward\n{self.forward}\n\nbackward\n{self.backward}"


class Trainer(Unreplicated):
    """A trainer of a causal LM, created by ``detcompile.trainer``.

    Its parameters have Hugging Face's names. Trained parameters are float32. The forward rounds them to the model's
    dtype and equals serving's: dropout is off. Gradients are exact sums over tokens, rounded once to float32. They
    depend only on the weights, the sequences and each token's weight in the loss.

    Attributes:
        config: the Hugging Face model's configuration.
        tokenizer: the tokenizer of the model's folder; None if there is none.
        numerics: the declared orders.
        max_context: maximum number of tokens of a sequence.
        vocab_size: one more than the largest token id.
        blocks: the layers, in order.
    """

    def __init__(self, model: PreTrainedModel, numerics: Numerics, max_context: int) -> None:
        super().__init__()
        if numerics.is_exact:
            raise InvalidInput(
                f"Numerics.arithmetic={numerics.arithmetic!r}: a trainer computes in floating point: leave it out"
            )
        self.config, self.numerics, self.max_context = model.config, numerics, max_context
        self.vocab_size = model.get_input_embeddings().weight.shape[0]
        self.tokenizer = tokenizer_of(model)
        self._adapters = dict(getattr(model, "peft_config", {}))
        self._built = build(model, numerics, max_context, self)
        prefixes = tuple(block.prefix for block in self.blocks)
        self._dtypes = self.blocks[0].dtypes
        self._unblocked = {name for call in self._built.calls for name in call.weights if not name.startswith(prefixes)}
        trained = {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}
        self._guard = ExactnessGuard(tuple(trained), numerics.token_grid)
        by_id = {id(parameter): GradAccumulator(parameter, name, self._guard) for name, parameter in trained.items()}
        every_name = self.named_parameters(remove_duplicate=False)
        self._accumulators = {name: by_id[id(parameter)] for name, parameter in every_name if id(parameter) in by_id}
        for block in self.blocks:
            of_block = {name: each for name, each in self._accumulators.items() if name.startswith(block.prefix)}
            block.accumulators = of_block
        self._trained, self._sums = list(trained.values()), list[ExactSum]()
        self._mesh: DeviceMesh | None = None
        self.certificate  # noqa: B018 - rejects a backward that cannot be proved before any training

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Return the blocks, in the order of the layers."""
        return self._built.blocks

    @property
    def device(self) -> torch.device:
        """Return the device of the weights."""
        return next(self.parameters()).device

    @property
    def certificate(self) -> TrainingCertificate:
        """The proof of the forward and the backward, for the parameters that are currently trained.

        Raises:
            UnsupportedModel: an operation without a gradient reads a trained weight.
            UncertifiedOp: the backward could mix rows.
        """
        named = self.named_parameters(remove_duplicate=False)
        trained = {name for name, parameter in named if parameter.requires_grad}
        calls = self._built.calls
        layers = [None, *range(len(self.blocks)), None]
        proofs = [(call.prepare(trained), layer) for call, layer in zip(calls, layers, strict=True)]
        return TrainingCertificate(self._built.certificate, _backward_of(proofs, self.numerics))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InvalidInput("a trainer cannot be copied or pickled: create another, and load this one's state_dict()")

    def shard(self, mesh: DeviceMesh | None = None) -> None:
        """Share the parameters among ranks with FSDP2, block by block; torch.distributed must be initialized.

        Every rank then reads its own sequences, in the same number of micro-batches, and optimizers take
        ``parameters()``, which are DTensors from now on. Losses are added over ranks, not averaged. If each token's
        weight in the loss is a function of the global batch, gradients, their norm and the weights do not depend on the
        number of ranks.

        Args:
            mesh: one dimension of ranks, or two, to replicate over the first; None for all ranks.

        Raises:
            UnsupportedModel: the forward's parameters have several dtypes, which one collective cannot gather.
            InvalidInput: there are no ranks, the mesh is unsuitable, or the parameters are already shared.
        """
        if self._mesh is not None:
            raise InvalidInput(f"the trainer is already sharded over {self._mesh}: create another one for other ranks")
        dtype, *others = set(self._dtypes.values())
        if others:
            raise UnsupportedModel(
                f"parameters of {dtype} and {others} cannot be sharded together: load the model in one dtype"
            )
        self._mesh = mesh_of(mesh, self.device.type)
        for accumulator in self._accumulators.values():
            accumulator.leave_to(self._mesh.size())
        self._sums = shard_blocks(self, self.blocks, dtype, self._mesh)
        register_fsdp_forward_method(self, "_scored")
        self._trained = [parameter for parameter in self.parameters() if parameter.requires_grad]

    def serving_weights(self) -> dict[str, Tensor]:
        """Return the parameters by name as the engine takes them: whole, and rounded to the model's dtype.

        Ranks that share them must all call this.
        """
        return whole_weights(self, self._dtypes)

    def save_adapters(self, folder: str | Path) -> None:
        """Write the model's PEFT adapters in float32, in the format of ``PeftModel.from_pretrained``.

        Ranks that share the parameters must all call this; the first one writes.

        Raises:
            InvalidInput: the model was loaded without adapters, or ``folder`` is a file.
            StorageError: the folder cannot be written.
        """
        if not self._adapters:
            raise InvalidInput("the model has no PEFT adapters: serving_weights() returns all of its weights")
        named = self.named_parameters()
        kept = {name: whole(parameter) for name, parameter in named if of_adapters(name) or parameter.requires_grad}
        if self._mesh is None or not any(self._mesh.get_coordinate() or ()):
            save_adapters(Path(folder), self._adapters, kept, self.config.name_or_path)

    def check(self, model: CompiledModel, seed: int = 0) -> None:
        """Compare log-probabilities of random sequences with those of an engine of ``model``, byte for byte.

        Ranks that share the parameters must all call this.

        Args:
            seed: seed of the random sequences.

        Raises:
            TrainerMismatch: names the first differing token, and the weights that differ, if any.
            InvalidInput: the model was compiled with other numerics or another context.
        """
        require_same_orders(self.numerics, self.max_context, model)
        with torch.no_grad():
            require_agreement(self.logprobs, self.serving_weights(), self.vocab_size, model, seed)

    @torch.compiler.disable  # callers may compile around this; the layers are already compiled
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **keywords: Any,
    ) -> CausalLMOutput:
        """Return logits of a padded batch, and the loss of its labels, as the Hugging Face model does.

        Args:
            input_ids, attention_mask, position_ids: [B, C], with padding on the left, the right or both.
            labels: [B, C], -100 for none; labels[:, t] is the token at t, scored by the logits at t - 1.
            num_items_in_batch: divisor of the loss. None takes the number of labels of this call; the gradient then
                depends on the split into micro-batches.
            **keywords: Hugging Face keywords without effect, such as use_cache.

        Returns:
            logits [B, C, V] in the model's dtype, zeros at padding, and loss, float32, with labels.

        Raises:
            InvalidInput: shapes, ids, masks or keywords are not supported, or there is no label at all.
        """
        require_served(keywords, SERVED)
        batch = self._batch(input_ids, attention_mask, position_ids, labels)
        step = packed_step(batch, self.numerics.token_leaf, self.device)
        weights = self._weights()
        logits = self._logits(self._rows(step, weights), step, weights)
        loss = None if labels is None else label_loss(logits, labels, batch, num_items_in_batch)
        return CausalLMOutput(loss=loss, logits=repad(logits, batch.mask))

    @torch.compiler.disable
    def logprobs(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        temperature: float = 1.0,
        position_ids: Tensor | None = None,
        *,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
    ) -> Tensor:
        """Return log-probabilities [B, C - 1] of all tokens but the first, float32 with a gradient, zeros at padding.

        They have the bytes of an engine's ``logprobs`` at temperature 1, and with any temperature and filters those of
        its ``sampling_logprobs``. The tensor's attribute ``entropy`` has the same shape: the entropy of the
        distribution of each token before filters. Logits are computed for some rows at a time, and again in the
        backward.

        Args:
            input_ids, attention_mask, position_ids: as in ``forward``.
            temperature: divisor of the logits, from 1e-5 to float32's largest number.
            top_k, top_p, min_p: filters, as in ``SamplingParams``. A token that they exclude has -inf. Which ones they
                exclude follows from the current logits, without a gradient; the entropy then has none, either.

        Raises:
            InvalidInput: as ``forward``, or the temperature or a filter is out of range.
        """
        temperature = number(temperature, "temperature")
        if not MIN_TEMPERATURE <= temperature <= LARGEST:
            raise InvalidInput(f"temperature={temperature} must be at least {MIN_TEMPERATURE}, and finite in float32")
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        logprobs, entropy = self._scored(self._batch(input_ids, attention_mask, position_ids, None), params)
        logprobs.entropy = entropy  # type: ignore[attr-defined]
        return logprobs

    def _scored(self, batch: UnpaddedBatch, params: SamplingParams) -> tuple[Tensor, Tensor]:
        """Return (log-probabilities, entropies): both as results, because FSDP unshards for the backward of results."""
        step = packed_step(batch, self.numerics.token_leaf, self.device)
        last = batch.lengths.cumsum() - 1
        predicted = np.flatnonzero(batch.mask[:, 1:] & batch.mask[:, :-1])
        leaves = predicting_leaves(batch, self.numerics.token_leaf)
        # Before the forward, because a copy to a GPU waits for all earlier kernels.
        kept = torch.as_tensor(np.delete(np.arange(len(batch.token_ids)), last), device=self.device)
        places = torch.as_tensor(predicted, device=self.device)
        of_rows = step._replace(table=torch.tensor(leaves, dtype=torch.int32, device=self.device))
        weights = self._weights()
        rows = self._rows(step, weights)
        targets = step.leaves[0][0, kept + 1]
        logprobs, entropy = self._chunked(rows[:, kept], targets, leaves, params, of_rows, weights)
        size, columns = batch.mask.shape
        return padded(logprobs, places, (size, columns - 1)), padded(entropy, places, (size, columns - 1))

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Run ``detcompile.clip_grad_norm_`` on all parameters, after checking that their gradients are exact sums.

        Raises:
            NumericsError: names a parameter whose gradient may be inexact, and what to do.
        """
        bounds = self._guard.bounds(self.device)
        for group in [] if self._mesh is None else self._mesh.get_all_groups():
            dist.all_reduce(bounds, group=group)
        self._guard.require(bounds)
        return clip_grad_norm_(self.parameters(), max_norm)

    @property
    def __jit_ignored_attributes__(self) -> NoReturn:  # the first attribute that torch.jit reads of a module
        raise InvalidInput(UNTRACED)

    def _batch(self, *tensors: Tensor | None) -> UnpaddedBatch:
        batch = unpad(*require_tensors(*tensors))
        check_batch(batch, self.vocab_size, self.max_context)
        return batch

    def _weights(self) -> dict[str, Weight]:
        """Return the parameters that belong to no layer, at the start of a forward."""
        require_no_hooks(self)
        if all(parameter.grad is None for parameter in self._trained):
            self._guard.clear()
            for exact in self._sums:
                exact.clear()
        unblocked = {name: attrgetter(name)(self) for name in self._unblocked}
        return weights_of(unblocked, self._accumulators, self._dtypes)

    def _rows(self, step: StepTensors, weights: Mapping[str, Weight]) -> Tensor:
        """Return the last layer's output, [1, T, H]."""
        rows, *shared = self._built.first(None, (), step, weights)
        others = MappingProxyType(weights)  # FSDP looks into dicts, and would turn their gradients into zeros
        for block in self.blocks:
            rows = block(rows, shared, step, others)
        return rows

    def _logits(self, rows: Tensor, step: StepTensors, weights: Mapping[str, Weight]) -> Tensor:
        """Return logits [R, V] of rows [1, R, H], with a hook for the start of a backward."""
        logits: Tensor = self._built.last(rows, (), step, weights)[0]
        if logits.requires_grad:
            logits.register_hook(self._begin_backward)
        return logits

    def _begin_backward(self, gradient: Tensor) -> None:
        if backward_keeps_graph():
            raise InvalidInput(
                "retain_graph=True or create_graph=True: a trainer's backward runs once and cannot be differentiated."
                " Add the losses of one forward and call backward() on their sum, or run the forward again."
            )
        self._guard.add_loss(gradient)

    def _chunked(
        self,
        rows: Tensor,
        targets: Tensor,
        leaves: list[int],
        params: SamplingParams,
        step: StepTensors,
        weights: Mapping[str, Weight],
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities of ``targets`` and entropies [R], from ``rows`` [1, R, H], in pieces of leaves."""

        def of_piece(rows: Tensor, targets: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
            logits = self._logits(rows, step._replace(table=table), weights)
            if params.filtered:
                _, entropy = torch.ops.detcompile.token_logprobs(logits.detach(), targets, params.temperature)
                return filtered_logprobs(logits, targets, params), entropy
            return scored_tokens(logits, targets, params.temperature)

        if len(leaves) == 1:  # sequences of one token, so nothing is predicted
            handles = [weights[name].handle for name in self._built.last.weights]
            nothing = rows.float().sum(-1).flatten()
            for handle in handles:  # zero gradients instead of None: ranks must reduce the same parameters
                if handle is not None:
                    nothing = nothing + (handle.sum() * 0).float()
            return nothing, nothing
        tables = pieces(leaves, rows_at_once(self.vocab_size * rows.element_size(), rows.device))
        if len(tables) == 1:
            return of_piece(rows, targets, step.table)
        results, at = [], 0
        for table in tables:
            piece = slice(at, at := at + table[-1])
            inputs = rows[:, piece], targets[piece], torch.tensor(table, dtype=torch.int32, device=self.device)
            results.append(checkpoint(of_piece, *inputs, use_reentrant=False))
        logprobs, entropies = zip(*results, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)


def _backward_of(regions: Iterable[tuple[Certificate | None, int | None]], numerics: Numerics) -> Certificate:
    """Merge the proofs of all regions' backwards; layers of one structure share a proof, which names all of them.

    Args:
        regions: for each region, in running order, the proof of its backward (None without one), and its layer number
            (None if it is not a layer).
    """
    layers: dict[int, list[int]] = {}
    proofs: dict[int, Certificate] = {}
    for proof, layer in regions:
        if proof is None:
            continue
        proofs[id(proof)] = proof
        layers.setdefault(id(proof), []).extend([] if layer is None else [layer])
    entries = tuple(
        replace(entry, holds_for=tuple(layers[key]))
        for key, proof in reversed(proofs.items())
        for entry in proof.entries
    )
    sums = dict.fromkeys(order for proof in proofs.values() for order in proof.sums)
    return Certificate(entries, numerics, tuple(sums))
