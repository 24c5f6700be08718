"""linear_recurrence: a matrix state per head that every token decays, corrects and adds to, and that a query reads.

Legend: T tokens, S sequences, H heads, G groups of H / G heads that share queries and keys, K keys, V values, B batch.

    S  <- a * S                                    a = exp(decay): per head, per key, or per key and value with rates
    u  =  v, or beta * (v - sum over K of k * S)   the delta rule, if there is a beta
    S  <- S + k u^T
    out = sum over K of q * S

Everything is float32. A sequence's tokens are processed one after the other, so the result does not depend on chunks of
a prompt or on the batch. state_order(K, device type) is the order of both sums. The state between steps is
[num_slots, H, K, V] float32 (templates.recurrences.states). decay is [T, H], [T, H, K], or [T, H, V] with rates
[H, K, V]: then a[k, v] = exp(decay[v] * rates[k, v]).

Mamba (Gu and Dao, arXiv:2312.00752) is one head of V channels with rates. Mamba-2 (Dao and Gu, arXiv:2405.21060) and
lightning attention (Qin et al., arXiv:2401.04658) decay per head. Gated delta nets (Yang et al., arXiv:2412.06464) have
a beta, and Kimi's (arXiv:2510.26692) also decay per key. The RG-LRU of Griffin (De et al., arXiv:2402.19427) has one
key.
"""

import torch
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.templates.recurrences.linear_gpu import linear_recurrence_cuda
from detcompile.templates.recurrences.states import STATE, STEPS, dense_steps, run_on_cpu
from detcompile.templates.registration import define

_OPERANDS = "Tensor q, Tensor k, Tensor v, Tensor decay, Tensor? beta, Tensor? rates"
PER_HEAD, PER_KEY, PER_VALUE = 0, 1, 2  # enum DecayKind of linear_recurrence.cpp


def linear_recurrence_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor | None,
    rates: Tensor | None,
    state: Tensor,
    *step: Tensor,
    isa: str | None = None,
) -> Tensor:
    """Run the op on the CPU: q and k [T, G, K], v [T, H, V], all float32 -> [T, H, V]; padding rows get zeros.

    Raises:
        InvalidInput: shapes of heads or decays do not match, or metadata points outside the state; nothing is written.
    """
    kind = _check(q, v, decay, rates)
    (T, H, V), (G, K) = v.shape, q.shape[1:]
    given = [None if value is None else value.contiguous() for value in (q, k, v, decay, beta, rates)]
    out = torch.empty((T, H, V), dtype=torch.float32, device="cpu")
    return run_on_cpu("linear_recurrence", given, state, step, out, [H, G, K, V, kind], isa)


def _linear_recurrence_cuda(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, rates: Tensor | None, *step: Tensor
) -> Tensor:
    return linear_recurrence_cuda(_check(q, v, decay, rates), q, k, v, decay, beta, rates, *step)


def _dense_linear_recurrence(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, rates: Tensor | None
) -> Tensor:
    """Run q and k [B, T, G, K], v [B, T, H, V] -> [B, T, H, V], each row of the batch a whole sequence."""
    B, T, H, V = v.shape
    state = v.new_empty((1, H, q.shape[3], V), dtype=torch.float32)
    packed = [None if value is None else value.flatten(0, 1) for value in (q, k, v, decay, beta)]
    steps = dense_steps(B, T, v.device)
    return torch.ops.detcompile.linear_recurrence(*packed, rates, state, *steps).view(B, T, H, V)


_PACKED = {
    "q": "float32 T G>0 K",
    "k": "float32 T G K",
    "v": "float32 T H V",
    "decay": "float32 T H *",
    "beta": "float32 T H",
    "rates": "float32 H K V",
}
_DENSE = {name: text if name == "rates" else text.replace(" T", " B T") for name, text in _PACKED.items()}
define(
    f"linear_recurrence({_OPERANDS}, {STATE}) -> Tensor",
    _PACKED | {"state": "contiguous float32 Slots H K V"} | STEPS,
    cpu=linear_recurrence_cpu,
    cuda=_linear_recurrence_cuda,
    fake=lambda q, k, v, *rest: v.new_empty(v.shape),
)
define(
    f"dense_linear_recurrence({_OPERANDS}) -> Tensor",
    _DENSE,
    cpu=_dense_linear_recurrence,
    cuda=_dense_linear_recurrence,
    fake=lambda q, k, v, *rest: v.new_empty(v.shape),
)


def reference_linear_recurrence(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, rates: Tensor | None
) -> Tensor:
    """Return the dense op's value in float64: [B, T, H, V]."""
    B, T, H, V = v.shape
    q, k = (states.double().repeat_interleave(H // q.shape[2], 2) for states in (q, k))
    state = v.new_zeros((B, H, q.shape[3], V), dtype=torch.float64)
    outs = []
    for t in range(T):
        rate = decay[:, t].double()
        if rates is not None:
            rate = rate[:, :, None] * rates.double()
        else:
            rate = rate[..., None] if decay.dim() == 4 else rate[..., None, None]
        state = state * rate.exp()
        update = v[:, t].double()
        if beta is not None:
            update = beta[:, t, :, None].double() * (update - (k[:, t, ..., None] * state).sum(2))
        state = state + k[:, t, ..., None] * update[:, :, None]
        outs.append((q[:, t, ..., None] * state).sum(2))
    return torch.stack(outs, 1)


def decay_kind(decay: Tensor, rates: Tensor | None) -> int:
    """Return PER_HEAD, PER_KEY or PER_VALUE, for decays of packed tokens."""
    return PER_VALUE if rates is not None else PER_KEY if decay.dim() == 3 else PER_HEAD


def _check(q: Tensor, v: Tensor, decay: Tensor, rates: Tensor | None) -> int:
    (T, H, V), (G, K) = v.shape, q.shape[1:]
    if H % G:
        raise InvalidInput(f"detcompile::linear_recurrence: {H} heads of v cannot share {G} groups of q and k evenly.")
    kind = decay_kind(decay, rates)
    expected = [(T, H), (T, H, K), (T, H, V)][kind]
    if tuple(decay.shape) != expected:
        raise InvalidInput(f"detcompile::linear_recurrence: decay {tuple(decay.shape)} must be {expected}.")
    return kind
