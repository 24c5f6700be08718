"""trainer(): a causal LM to train, from a name or a Hugging Face module."""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from detcompile.api import context_of, numerics_of
from detcompile.errors import UnsupportedModel
from detcompile.models.compiled import CompiledModel
from detcompile.models.loading import Load, LoadOptions, find, loaded_before
from detcompile.orders.numerics import Numerics
from detcompile.passes.capture import require_ready
from detcompile.progress import shown, stage
from detcompile.training.adapters import require_no_dropout
from detcompile.training.agreement import require_same_orders
from detcompile.training.trainer import Trainer
from detcompile.weights import copy_mapped_weights

__all__ = ["trainer"]


def trainer(
    model: PreTrainedModel | str | Path,
    *,
    numerics: Numerics | None = None,
    max_context: int | None = None,
    progress: bool | None = None,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    trust_remote_code: bool = False,
    checkpoint: bool = False,
    check: CompiledModel | None = None,
) -> Trainer:
    """A causal LM to train: its logits are the bytes that ``compile`` serves, and its gradients are exact sums.

    A gradient's bits depend on the weights, and on the sequences of the batch with the weight of each token in the
    loss: not on micro-batches, packing, padding, the order of sequences, or data-parallel ranks (docs/training.md).

    Args:
        model: a name, or a Hugging Face causal LM in eval mode, as for ``compile``; a module is changed in place and is
            of no use afterwards. Parameters with ``requires_grad=False`` are frozen: no gradient of them is computed.
            PEFT's model, with LoRA of linears, is taken like one without: its adapters are trained.
        numerics: the declared orders; those of the engine that generates with these weights.
        max_context: tokens a sequence may hold; default: the config's max_position_embeddings. An engine's has to be
            the same where rotary tables look at it.
        checkpoint: keep the rows that enter each layer for the backward, and compute all else again then: the same
            bits in less memory.
        check: a compiled model with these weights, whose engine the trainer has to agree with (``Trainer.check``).
        progress, dtype, device, revision, token, trust_remote_code: what ``compile`` takes them for.

    Raises:
        UnsupportedModel: the model cannot be captured, an operation of it has no gradient, or its adapters are another
            kind than LoRA without dropout.
        UncertifiedOp: an operation could make rows meet; the message names it.
        NumericsError: the model does not fit the numerics.
        TrainerMismatch: log-probabilities are not those of ``check``.
        InvalidInput: an argument is off.
    """
    how: LoadOptions = {"dtype": dtype, "device": device, "revision": revision, "token": token}
    how |= {"trust_remote_code": trust_remote_code, "task": None}
    with shown(progress):
        given = find(model, **how) if isinstance(model, (str, Path)) else loaded_before(model, **how)
        module = given.on(given.device) if isinstance(given, Load) else given
        require_ready(module)
        require_no_dropout(module)
        if module.get_output_embeddings() is None:
            raise UnsupportedModel(f"{type(module).__name__} has no language-model head: causal LMs are trained")
        orders, context = numerics_of(numerics), context_of(module, max_context)
        if check is not None:
            require_same_orders(orders, context, check)
        copy_mapped_weights(module)
        with stage(f"trace, prove and compile {type(module).__name__} forward and backward"):
            made = Trainer(module, orders, context)
        for block in made.blocks:
            block.recompute = checkpoint
        if check is not None:
            with stage("compare with the engine"):
                made.check(check)
    return made
