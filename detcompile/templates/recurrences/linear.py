"""linear_recurrence: a matrix state a head, decayed, corrected and added to at every token, and read by a query.

Legend: T tokens, S sequences, H heads, G groups of H / G heads that share queries and keys, K keys, V values, B batch.

    S  <- a * S                                    a = exp(decay): of a head, of a key, or of key and value by rates
    u  =  v, or beta * (v - sum over K of k * S)   the delta rule, where there is a beta
    S  <- S + k u^T
    out = sum over K of q * S

Everything is float32; the tokens of a sequence are taken one after the other, so that no chunk of a prompt and no batch
can be seen in the result. state_order(K, device type) is the order of both sums. The state between steps is
[num_slots, H, K, V] float32 (templates.recurrences.states). decay is [T, H], [T, H, K], or [T, H, V] with rates
[H, K, V]: then a[k, v] = exp(decay[v] * rates[k, v]).

Mamba (Gu and Dao, arXiv:2312.00752) is one head of V channels with rates; Mamba-2 (Dao and Gu, arXiv:2405.21060) and
lightning attention (Qin et al., arXiv:2401.04658) decay a head; gated delta nets (Yang et al., arXiv:2412.06464) have
a beta, and Kimi's (arXiv:2510.26692) also decay each key; the RG-LRU of Griffin (De et al., arXiv:2402.19427) has one
key.
"""

import torch
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.templates.recurrences.linear_gpu import linear_recurrence_cuda
from detcompile.templates.recurrences.states import check_state_steps, dense_steps, run_on_cpu

__all__ = ["decay_kind", "linear_recurrence_cpu", "reference_linear_recurrence"]

_LIBRARY = torch.library.Library("detcompile", "FRAGMENT")
_OPERANDS = "Tensor q, Tensor k, Tensor v, Tensor decay, Tensor? beta, Tensor? rates"
_LIBRARY.define(
    f"linear_recurrence({_OPERANDS}, Tensor(a!) state, Tensor state_slots, Tensor cu_seqlens, Tensor seq_lens) "
    "-> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define(f"dense_linear_recurrence({_OPERANDS}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))

PER_HEAD, PER_KEY, PER_VALUE = 0, 1, 2  # enum DecayKind of linear_recurrence.cpp


def linear_recurrence_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor | None,
    rates: Tensor | None,
    state: Tensor,
    state_slots: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    *,
    isa: str | None = None,
) -> Tensor:
    """The op on the CPU: q and k [T, G, K], v [T, H, V], all float32 -> [T, H, V]; rows past cu_seqlens[S] get zeros.

    Raises:
        InvalidInput: tensors that do not fit together, or metadata that points outside the state; nothing is written.
    """
    kind = _check(q, k, v, decay, beta, rates, state, state_slots, cu_seqlens, seq_lens)
    (T, H, V), (G, K) = v.shape, q.shape[1:]
    given = [None if value is None else value.contiguous() for value in (q, k, v, decay, beta, rates)]
    out, steps = torch.empty((T, H, V), dtype=torch.float32, device="cpu"), (state_slots, cu_seqlens, seq_lens)
    return run_on_cpu("linear_recurrence", given, state, steps, out, [H, G, K, V, kind], isa)


def _linear_recurrence_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor | None,
    rates: Tensor | None,
    state: Tensor,
    state_slots: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
) -> Tensor:
    kind = _check(q, k, v, decay, beta, rates, state, state_slots, cu_seqlens, seq_lens)
    return linear_recurrence_cuda(kind, q, k, v, decay, beta, rates, state, state_slots, cu_seqlens, seq_lens)


def _dense_linear_recurrence(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, rates: Tensor | None
) -> Tensor:
    """q and k [B, T, G, K], v [B, T, H, V] -> [B, T, H, V], each row of the batch a whole sequence."""
    B, T, H, V = v.shape
    state = v.new_empty((1, H, q.shape[3], V), dtype=torch.float32)
    packed = [None if value is None else value.flatten(0, 1) for value in (q, k, v, decay, beta)]
    steps = dense_steps(B, T, v.device)
    return torch.ops.detcompile.linear_recurrence(*packed, rates, state, *steps).view(B, T, H, V)


_LIBRARY.impl("linear_recurrence", linear_recurrence_cpu, "CPU")
_LIBRARY.impl("linear_recurrence", _linear_recurrence_cuda, "CUDA")
_LIBRARY.impl("dense_linear_recurrence", _dense_linear_recurrence, "CPU")
_LIBRARY.impl("dense_linear_recurrence", _dense_linear_recurrence, "CUDA")


@torch.library.register_fake("detcompile::linear_recurrence", lib=_LIBRARY)
def _(q, k, v, decay, beta, rates, state, state_slots, cu_seqlens, seq_lens):
    return v.new_empty(v.shape)


@torch.library.register_fake("detcompile::dense_linear_recurrence", lib=_LIBRARY)
def _(q, k, v, decay, beta, rates):
    return v.new_empty(v.shape)


def reference_linear_recurrence(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, rates: Tensor | None
) -> Tensor:
    """The dense op's value in float64: [B, T, H, V]."""
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
    """PER_HEAD, PER_KEY or PER_VALUE, for decays of packed tokens."""
    return PER_VALUE if rates is not None else PER_KEY if decay.dim() == 3 else PER_HEAD


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor | None,
    rates: Tensor | None,
    state: Tensor,
    *steps: Tensor,
) -> int:
    fits = q.dim() == v.dim() == 3 and q.shape == k.shape and q.shape[0] == v.shape[0]
    if not fits or v.shape[1] % max(q.shape[1], 1):
        raise InvalidInput(
            f"detcompile::linear_recurrence: q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} must be "
            "[T, G, K], [T, G, K] and [T, H, V], with H a multiple of G."
        )
    (T, H, V), K = v.shape, q.shape[2]
    kind = decay_kind(decay, rates)
    expected = [(T, H), (T, H, K), (T, H, V)][kind]
    for name, value, shape in (("decay", decay, expected), ("beta", beta, (T, H)), ("rates", rates, (H, K, V))):
        if value is not None and tuple(value.shape) != shape:
            raise InvalidInput(f"detcompile::linear_recurrence: {name} {tuple(value.shape)} must be {shape}.")
    for name, value in (("q", q), ("k", k), ("v", v), ("decay", decay), ("beta", beta), ("rates", rates)):
        if value is not None and value.dtype != torch.float32:
            raise InvalidInput(f"detcompile::linear_recurrence: {name} is {value.dtype}. Convert it to float32.")
    check_state_steps("linear_recurrence", state, (H, K, V), torch.float32, *steps)
    return kind
