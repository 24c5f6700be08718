"""token_logprobs and its gradient: the target's log-probability and the entropy of each row of logits, float32.

Legend: M rows, V vocabulary size.

    x = logits / temperature (float32; not divided if that is 1), m its maximum, s = sum of exp(x - m)
    logprob = (x[target] - m) - log(s):  the bytes of log_softmax, which are the engine's logprobs
    entropy = -sum of p * log p, with p = exp(log p)

    dlogits = round(((onehot - p) * g - p * (log p + entropy) * g_entropy) / temperature)

Sums are in row_order(V, device type, radices), except an entropy's on a GPU, whose order has no radices. Rows are
independent, so they may be computed in pieces; a GPU uses pieces of ELEMENTS_AT_ONCE logits. The log-probabilities of
all tokens are never stored: m and log(s) are, and are subtracted in that order where log p is needed, which gives the
same bits.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.templates.cpu import library as cpu_library
from detcompile.templates.device.launcher import on_device
from detcompile.templates.registration import LIBRARY, define
from detcompile.templates.rows.softmax_gpu import log_normalizer_cuda
from detcompile.templates.rows.sums_and_norms_gpu import P_LOG_P, row_sum_cuda
from detcompile.templates.training.row_gradients_gpu import logit_gradients

ELEMENTS_AT_ONCE = 1 << 27  # bounds the memory of logits divided by a temperature, or copied for alignment


def scored_tokens(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Run token_logprobs. On a GPU, at temperature 1, the gradient uses the forward's normalizers."""
    normalizers = None
    if logits.is_cuda and logits.requires_grad and len(logits) and temperature == 1.0:  # others need divided logits
        with on_device(logits.device):
            rows = logits.detach()
            normalizers = torch.cat([log_normalizer_cuda(rows[piece], ()) for piece in _pieces(rows)])
    result: tuple[Tensor, Tensor] = torch.ops.detcompile.token_logprobs(logits, targets, temperature, (), normalizers)
    return result


def token_logprobs_cpu(
    logits: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    radices: Sequence[int] = (),
    normalizers: Tensor | None = None,
    isa: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the op on the CPU, logits [M, V], targets [M] integers -> logprobs and entropies [M] float32.

    Args:
        normalizers: not read; a CPU computes them at little cost.

    Raises:
        InvalidInput: a target is outside the vocabulary, or the temperature is not positive.
    """
    _check_temperature("token_logprobs", temperature)
    logits, targets = logits.contiguous(), _in_vocabulary(targets, logits.shape[1])
    logprobs, entropies = (torch.empty(len(logits), dtype=torch.float32, device="cpu") for _ in range(2))
    cpu_library.library(isa).detcompile_token_logprobs(
        logits, targets, logprobs, entropies, temperature, *logits.shape, cpu_library.radices_array(tuple(radices)),
        len(radices), cpu_library.dtype_code(logits), cpu_library.thread_count(),
    )  # fmt: skip
    return logprobs, entropies


def token_logprobs_backward_cpu(
    g: Tensor,
    g_entropy: Tensor | None,
    logits: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    radices: Sequence[int] = (),
    normalizers: Tensor | None = None,
    isa: str | None = None,
) -> Tensor:
    """Run the op on the CPU: gradients [M] float32 of logprobs and entropies -> dlogits [M, V] of the logits' dtype.

    Args:
        normalizers: as token_logprobs_cpu.

    Raises:
        InvalidInput: as token_logprobs_cpu.
    """
    _check_temperature("token_logprobs_backward", temperature)
    logits, targets, g = logits.contiguous(), _in_vocabulary(targets, logits.shape[1]), g.contiguous()
    g_entropy = None if g_entropy is None else g_entropy.contiguous()
    out = torch.empty(logits.shape, dtype=logits.dtype, device="cpu")
    cpu_library.library(isa).detcompile_token_logprobs_backward(
        g, g_entropy, logits, targets, out, temperature, *logits.shape, cpu_library.radices_array(tuple(radices)),
        len(radices), cpu_library.dtype_code(logits), cpu_library.thread_count(),
    )  # fmt: skip
    return out


def token_logprobs_cuda(
    logits: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    radices: Sequence[int] = (),
    normalizers: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the op on the GPU, which does not check targets.

    Args:
        normalizers: [M, 2] float32, m and log(s) of each row; None computes them.
    """
    _check_temperature("token_logprobs", temperature)
    logprobs, entropies = (logits.new_empty(len(logits), dtype=torch.float32) for _ in range(2))
    for rows in _pieces(logits):
        x, normalizer = _normalized(logits, rows, temperature, radices, normalizers)
        chosen = x.gather(1, targets[rows, None].long()).squeeze(1).float()
        logprobs[rows] = chosen - normalizer[:, 0] - normalizer[:, 1]
        entropies[rows] = _entropies(x, normalizer)
    return logprobs, entropies


def token_logprobs_backward_cuda(
    g: Tensor,
    g_entropy: Tensor | None,
    logits: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    radices: Sequence[int] = (),
    normalizers: Tensor | None = None,
) -> Tensor:
    """Run the op on the GPU, which does not check targets. normalizers: as in token_logprobs_cuda."""
    _check_temperature("token_logprobs_backward", temperature)
    logits, g, targets = logits.contiguous(), g.contiguous(), targets.contiguous()
    out = torch.empty_like(logits)
    for rows in _pieces(logits):
        x, normalizer = _normalized(logits, rows, temperature, radices, normalizers)
        surprise = None if g_entropy is None else (_entropies(x, normalizer), g_entropy.contiguous()[rows])
        logit_gradients(x, normalizer, targets[rows], g[rows], surprise, temperature, out[rows])
    return out


def _pieces(logits: Tensor) -> list[slice]:
    """Return slices of rows with at most ELEMENTS_AT_ONCE logits each."""
    step = max(1, ELEMENTS_AT_ONCE // logits.shape[1])
    return [slice(start, start + step) for start in range(0, len(logits), step)]


def _normalized(
    logits: Tensor, rows: slice, temperature: float, radices: Sequence[int], normalizers: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return some rows of logits divided by the temperature [rows, V], and each row's m and log(s) [rows, 2]."""
    x = logits[rows]
    if temperature != 1.0:  # divides by a tensor, because CUDA turns a division by a scalar into a product
        x = x.float() / x.new_full((), temperature, dtype=torch.float32)
    return x, log_normalizer_cuda(x, radices) if normalizers is None else normalizers[rows].contiguous()


def _entropies(x: Tensor, normalizer: Tensor) -> Tensor:
    return -row_sum_cuda(x, torch.float32, term=P_LOG_P, normalizer=normalizer)


define(
    "token_logprobs(Tensor logits, Tensor targets, float temperature=1.0, int[] radices=[], "
    "Tensor? normalizers=None) -> (Tensor, Tensor)",
    {"logits": "float M V>0", "targets": "integer M", "normalizers": "float32 M 2"},
    cpu=token_logprobs_cpu,
    cuda=token_logprobs_cuda,
    fake=lambda logits, *rest: tuple(logits.new_empty(logits.shape[:1], dtype=torch.float32) for _ in range(2)),
)
define(
    "token_logprobs_backward(Tensor g, Tensor? g_entropy, Tensor logits, Tensor targets, float temperature=1.0, "
    "int[] radices=[], Tensor? normalizers=None) -> Tensor",
    {
        "g": "float32 M",
        "g_entropy": "float32 M",
        "logits": "float M V>0",
        "targets": "integer M",
        "normalizers": "float32 M 2",
    },
    cpu=token_logprobs_backward_cpu,
    cuda=token_logprobs_backward_cuda,
    fake=lambda g, g_entropy, logits, *rest: logits.new_empty(logits.shape),
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, targets, ctx.temperature, ctx.radices, normalizers = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, targets, normalizers)


def _backward(ctx: Any, g: Tensor | None, g_entropy: Tensor | None) -> tuple[Any, ...]:
    logits, targets, normalizers = ctx.saved_tensors
    if g is None:
        if g_entropy is None:
            return None, None, None, None, None
        g = torch.zeros_like(g_entropy)
    ours = torch.ops.detcompile.token_logprobs_backward
    dlogits = ours(g, g_entropy, logits, targets, ctx.temperature, ctx.radices, normalizers)
    return dlogits, None, None, None, None


torch.library.register_autograd("detcompile::token_logprobs", _backward, setup_context=_setup, lib=LIBRARY)


def reference_token_logprobs(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return the op's values in float64, with torch's gradients."""
    logprobs = torch.log_softmax(logits.double() / temperature, -1)
    return logprobs.gather(1, targets[:, None]).squeeze(1), -(logprobs.exp() * logprobs).sum(-1)


def _check_temperature(op: str, temperature: float) -> None:
    if not temperature > 0:
        raise InvalidInput(f"detcompile::{op}: temperature={temperature} must be positive; 1.0 changes nothing.")


def _in_vocabulary(targets: Tensor, size: int) -> Tensor:
    targets = targets.to(torch.int64).contiguous()
    if len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < size:
        bad = int(((targets < 0) | (targets >= size)).nonzero()[0])
        raise InvalidInput(
            f"detcompile::token_logprobs: target {int(targets[bad])} of row {bad} is outside the vocabulary [0, "
            f"{size}). Leave out rows without a target."
        )
    return targets
