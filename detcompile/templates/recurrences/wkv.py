"""wkv: each channel's average of the values so far, weighted by exponentials of the keys, which fade token by token.

Legend: T tokens, S sequences, C channels, B batch.

    out[t] = (sum over i < t of e^(k[i] + (t - 1 - i) decay) v[i]  +  e^(k[t] + bonus) v[t]) / the same sum without v

The WKV operator of RWKV-4 (Peng et al., arXiv:2305.13048). Everything is float32; numerator and denominator
are kept divided by e^m, where m is the greatest exponent so far, so that no key overflows:

    top = max(m, k + bonus)    out = (e^(m - top) num + e^(k + bonus - top) v) / (e^(m - top) den + e^(k + bonus - top))
    top = max(m + decay, k)    num, den <- e^(m + decay - top) (num, den) + e^(k - top) (v, 1)    m <- top

The tokens of a sequence are taken one after the other, each operation rounded, so that no chunk of a prompt and no
batch can be seen in the result. The state between steps is [num_slots, 3, C] float32 (templates.recurrences.states):
num, den, m.
"""

import torch
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.templates.recurrences.states import check_state_steps, dense_steps, run_on_cpu
from detcompile.templates.recurrences.wkv_gpu import wkv_cuda

__all__ = ["reference_wkv", "wkv_cpu"]

_LIBRARY = torch.library.Library("detcompile", "FRAGMENT")
_OPERANDS = "Tensor k, Tensor v, Tensor decay, Tensor bonus"
_LIBRARY.define(
    f"wkv({_OPERANDS}, Tensor(a!) state, Tensor state_slots, Tensor cu_seqlens, Tensor seq_lens) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define(f"dense_wkv({_OPERANDS}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def wkv_cpu(
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    bonus: Tensor,
    state: Tensor,
    state_slots: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    *,
    isa: str | None = None,
) -> Tensor:
    """The op on the CPU: k and v [T, C], decay and bonus [C], float32 -> [T, C]; rows past cu_seqlens[S] get zeros.

    Raises:
        InvalidInput: tensors that do not fit together, or metadata that points outside the state; nothing is written.
    """
    _check(k, v, decay, bonus, state, state_slots, cu_seqlens, seq_lens)
    T, C = v.shape
    given = [value.contiguous() for value in (k, v, decay, bonus)]
    out, steps = torch.empty((T, C), dtype=torch.float32, device="cpu"), (state_slots, cu_seqlens, seq_lens)
    return run_on_cpu("wkv", given, state, steps, out, [C], isa)


def _wkv_cuda(
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    bonus: Tensor,
    state: Tensor,
    state_slots: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
) -> Tensor:
    _check(k, v, decay, bonus, state, state_slots, cu_seqlens, seq_lens)
    return wkv_cuda(k, v, decay, bonus, state, state_slots, cu_seqlens, seq_lens)


def _dense_wkv(k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor) -> Tensor:
    """k and v [B, T, C] -> [B, T, C], each row of the batch a whole sequence."""
    B, T, C = v.shape
    state = v.new_empty((1, 3, C), dtype=torch.float32)
    steps = dense_steps(B, T, v.device)
    return torch.ops.detcompile.wkv(k.flatten(0, 1), v.flatten(0, 1), decay, bonus, state, *steps).view(B, T, C)


_LIBRARY.impl("wkv", wkv_cpu, "CPU")
_LIBRARY.impl("wkv", _wkv_cuda, "CUDA")
_LIBRARY.impl("dense_wkv", _dense_wkv, "CPU")
_LIBRARY.impl("dense_wkv", _dense_wkv, "CUDA")


@torch.library.register_fake("detcompile::wkv", lib=_LIBRARY)
def _(k, v, decay, bonus, state, state_slots, cu_seqlens, seq_lens):
    return v.new_empty(v.shape)


@torch.library.register_fake("detcompile::dense_wkv", lib=_LIBRARY)
def _(k, v, decay, bonus):
    return v.new_empty(v.shape)


def reference_wkv(k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor) -> Tensor:
    """The dense op's value in float64, by the first formula above: [B, T, C]."""
    k, v, decay, bonus = (value.double() for value in (k, v, decay, bonus))
    outs = []
    for t in range(v.shape[1]):
        ages = torch.arange(t - 1, -1, -1, dtype=torch.float64, device=v.device)[:, None]
        exponents = torch.cat([k[:, :t] + ages * decay, k[:, t : t + 1] + bonus], 1)
        outs.append((torch.softmax(exponents, 1) * v[:, : t + 1]).sum(1))
    return torch.stack(outs, 1)


def _check(k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor, state: Tensor, *steps: Tensor) -> None:
    fits = k.dim() == 2 and k.shape == v.shape and tuple(decay.shape) == tuple(bonus.shape) == (k.shape[1],)
    if not fits:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in zip("kv", (k, v)))
        raise InvalidInput(
            f"detcompile::wkv: {shapes}, decay {tuple(decay.shape)} and bonus {tuple(bonus.shape)} must be [T, C], "
            "[T, C], [C] and [C]."
        )
    for name, value in (("k", k), ("v", v), ("decay", decay), ("bonus", bonus)):
        if value.dtype != torch.float32:
            raise InvalidInput(f"detcompile::wkv: {name} is {value.dtype}. Convert it to float32.")
    check_state_steps("wkv", state, (3, k.shape[1]), torch.float32, *steps)
