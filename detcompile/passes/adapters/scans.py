"""Scans of transformers' modeling files by name, written around our recurrences.

Each takes the arguments of its namesake and returns the same result, up to rounding. Calls that pass or request a state
are refused: states belong to the step.
"""

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from detcompile.errors import UnsupportedModel
from detcompile.passes.adapters.modules import entry_of
from detcompile.passes.modules.recurrences import Recurrences, rebound

# Arguments of scans that a packed step does not support: external states, and other layouts of sequences.
STATES = ("initial_state", "initial_states", "output_final_state", "return_final_states", "seq_idx", "cu_seqlens")


def pin_recurrences(model: PreTrainedModel) -> Recurrences | None:
    """Replace the model's known scans, convolutions and linear attention with ours. Return None if there are none."""
    recurrences = Recurrences()
    replaced = False
    for module in model.modules():
        if not type(module).__module__.startswith("transformers.models."):
            continue
        mixer = entry_of(module, "MIXERS", {})
        if mixer is not None:
            methods: dict[str, Callable[..., Any]] = {"forward": recurrences.bind(mixer)}
        else:
            methods = _calling_scans(type(module), recurrences)
        for method, replacement in methods.items():
            setattr(module, method, types.MethodType(replacement, module))
        replaced |= bool(methods)
    if not replaced:
        return None
    unnumbered = [module for module in model.modules() if getattr(module, "layer_idx", 0) is None]
    for index, module in enumerate(unnumbered):  # attention that is shared by several layers
        module.layer_idx = index
    recurrences.follow(model)
    return recurrences


def _calling_scans(kind: type, recurrences: Recurrences) -> dict[str, Callable[..., Any]]:
    """Return the class's methods that call a scan, changed to call ours."""
    methods: dict[str, Callable[..., Any]] = {}
    for name, method in vars(kind).items():
        code = getattr(_unwrapped(method), "__code__", None)
        scans = SCANS.keys() & set(code.co_names) if code is not None else set()
        if scans:
            methods[name] = rebound(method, {scan: recurrences.bind(SCANS[scan]) for scan in sorted(scans)})
    return methods


def _unwrapped(method: Any) -> Any:
    while hasattr(method, "__wrapped__"):
        method = method.__wrapped__
    return method


def _causal_conv(
    recurrences: Recurrences,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    """hidden_states [B, C, T], weight [C, W] -> [B, C, T]."""
    _refuse_states(**kwargs)
    out = recurrences.convolve(hidden_states.transpose(1, 2).to(weight.dtype), weight, bias)
    out = out if activation is None else ACT2FN[activation](out)
    return out.to(hidden_states.dtype).transpose(1, 2)


def _mamba2(
    recurrences: Recurrences,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **kwargs: Any,
) -> Tensor:
    """hidden_states [B, T, H, V], dt [B, T, H], A [H], B and C [B, T, G, K] -> [B, T, H, V] float32."""
    assert z is None, "no model of transformers gates inside its scan"
    _refuse_states(**kwargs)
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = F.softplus(dt) if dt_softplus else dt
    dt = torch.clamp(dt, min=dt_limit[0], max=dt_limit[1]).float()
    x = hidden_states.float()
    out = recurrences.recur(C, B, x * dt[..., None], A.float() * dt)
    return out if D is None else out + D[..., None] * x


def _mamba(
    recurrences: Recurrences,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **kwargs: Any,
) -> Tensor:
    """hidden_states, dt and z [B, I, T], A [I, K], B and C [B, K, T] -> [B, I, T]; one head of I values."""
    _refuse_states(return_final_states=return_last_state, **kwargs)
    x, dt = hidden_states.transpose(1, 2), dt.transpose(1, 2)
    dt = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)
    dt = F.softplus(dt) if delta_softplus else dt
    B, C = (states.transpose(1, 2)[:, :, None] for states in (B, C))
    out = selective(recurrences, x[:, :, None], dt[:, :, None], A[None], B, C, D)
    out = out.squeeze(2).transpose(1, 2)
    return out if z is None else out * F.silu(z)


def _gated_delta(
    recurrences: Recurrences,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query and key [B, T, H, K], value [B, T, H, V], beta [B, T, H], g [B, T, H] or [B, T, H, K] -> [B, T, H, V]."""
    _refuse_states(**kwargs)
    dtype = query.dtype
    query, key = query.float(), key.float()
    if use_qk_l2norm_in_kernel:
        query, key = (x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6) for x in (query, key))
    out = recurrences.recur(query * query.shape[-1] ** -0.5, key, value, g, beta)
    return out.to(dtype), None


def selective(
    recurrences: Recurrences, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None
) -> Tensor:
    """Run Mamba's scan, in which each channel decays at its own rates, and add D's product.

    x and dt [B, T, H, P], B and C [B, T, H, K], A [H, P, K], D [H, P] -> [B, T, H, P] in x.dtype.
    """
    out = recurrences.recur(C, B, dt.float() * x.float(), dt, rates=A.transpose(1, 2)).to(x.dtype)
    return out if D is None else out + x * D


def _refuse_states(**kwargs: Any) -> None:
    given = [name for name in STATES if kwargs.get(name) is not None and kwargs[name] is not False]
    if given:
        raise UnsupportedModel(f"a scan is called with {', '.join(given)}, which has no meaning in a packed step")


SCANS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _causal_conv,
    "chunk_kimi_delta_attention": _gated_delta,
    "mamba2_chunk_scan": _mamba2,
    "mamba_selective_scan": _mamba,
    "torch_chunk_gated_delta_rule": _gated_delta,
}
