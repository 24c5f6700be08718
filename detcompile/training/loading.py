"""trainer(): create a Trainer from a model's name or a Hugging Face module."""

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


@torch.inference_mode(False)  # inference tensors cannot be trained
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
    """Create a trainer for a causal LM: its logits have the bytes that ``compile`` serves, and its gradients are exact.

    A gradient's bits depend only on the weights, the sequences of the batch, and each token's weight in the loss; not
    on micro-batches, packing, padding, the order of sequences, or data-parallel ranks (docs/training.md).

    Args:
        model: a name, or a Hugging Face causal LM in eval mode, as for ``compile``; a module is changed in place and
            unusable afterwards. Parameters with ``requires_grad=False`` are frozen: their gradients are not computed.
            In a PEFT model with LoRA of linears the adapters are trained.
        numerics: the declared orders; the same as of the engine that generates with these weights.
        max_context: maximum number of tokens of a sequence; default: the config's max_position_embeddings. It must be
            the engine's if rotary tables depend on it.
        checkpoint: keep only each layer's input rows for the backward and recompute the rest: the same bits in less
            memory.
        check: a compiled model with these weights, whose engine must agree with the trainer (``Trainer.check``).
        progress, dtype, device, revision, token, trust_remote_code: as in ``compile``.

    Raises:
        UnsupportedModel: the model cannot be captured, an operation has no gradient, or its adapters are not LoRA
            without dropout.
        UnsupportedRelease: the installed torch, transformers or triton is untested and fails a probe.
        UncertifiedOp: names an operation that could mix rows.
        NumericsError: the model does not fit the numerics.
        TrainerMismatch: log-probabilities differ from those of ``check``.
        InvalidInput: an argument is invalid.
    """
    how: LoadOptions = {"dtype": dtype, "device": device, "revision": revision, "token": token}
    how |= {"trust_remote_code": trust_remote_code, "task": None}
    with shown(progress):
        source = find(model, **how) if isinstance(model, (str, Path)) else loaded_before(model, **how)
        module = source.on(source.device) if isinstance(source, Load) else source
        require_ready(module)
        require_no_dropout(module)
        if module.get_output_embeddings() is None:
            raise UnsupportedModel(f"{type(module).__name__} has no language-model head: only causal LMs are trained")
        orders, context = numerics_of(numerics), context_of(module, max_context)
        if check is not None:
            require_same_orders(orders, context, check)
        copy_mapped_weights(module)
        with stage(f"trace, prove and compile {type(module).__name__} forward and backward"):
            result = Trainer(module, orders, context)
        for block in result.blocks:
            block.recompute = checkpoint
        if check is not None:
            with stage("compare with the engine"):
                result.check(check)
    return result
