"""packed_attention and its gradients: causal attention of whole packed sequences, without a cache.

Legend: T tokens, S sequences, Hq Hkv query and key heads (Hkv divides Hq), D Dv head dims.

    out, lse = packed_attention(q, k, v, cu_seqlens, rule)
    dq, dk, dv, sink_rows = packed_attention_backward(g, q, k, v, out, lse, cu_seqlens, rule)

out [T, Hq, Dv] has the bytes of paged_attention, in the order KV; lse [T, Hq] is the log-sum-exp of each row's scores,
including a sink, float32. The gradients are float32 inside, and rounded once to the dtype of q:

    P  = e^(score - lse), and 0 where a key is not visible;    delta = sum of g * out, in row_order of Dv
    dS = P * (g v - delta), times 1 - tanh^2 with a soft cap
    dq = scale * (dS k), over keys in the order Keys;  dk = scale * (dS q), dv = P g, over queries in the order Queries

P and dS are rounded to the dtype of q before these products. sink_rows [T, Hq] float32 are -e^(sink - lse) * delta; a
sink's gradient is their token_sum. Without sinks sink_rows is [0, Hq]. ALiBi's slopes have no gradient.

A row of dq depends on its sequence up to its token, a row of dk and dv on its sequence from its token on. The other
packed sequences and the row's place have no effect. Rows past cu_seqlens[S] are padding and get zeros.
"""

import ctypes
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.templates.attention.op import CpuScores
from detcompile.templates.attention.scores import RULE, AttentionRule, rule_operands
from detcompile.templates.cpu import library as cpu_library
from detcompile.templates.registration import LIBRARY, define
from detcompile.templates.training.attention_gpu import packed_attention_backward_cuda, packed_attention_cuda


class Attended(NamedTuple):
    """Operands and results of a forward, as its backward takes them."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


def packed_attention_cpu(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, rule: AttentionRule, *, isa: str | None = None
) -> tuple[Tensor, Tensor]:
    """Run the op on the CPU: q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv], cu_seqlens [S + 1] int32 -> out, lse.

    Raises:
        InvalidInput: cu_seqlens is invalid.
    """
    q, k, v, cu_seqlens = (tensor.contiguous() for tensor in (q, k, v, cu_seqlens))
    out, lse = _like_forward(q, v)
    scores = CpuScores(rule)
    sizes = (*_sizes(q, v, cu_seqlens), rule.sliding_window, rule.kv_chunk, rule.attention_chunk)
    bad = cpu_library.library(isa).detcompile_packed_attention(
        q, k, v, cu_seqlens, out, lse, (ctypes.c_int64 * 9)(*sizes), *scores.operands, scores.extent,
        cpu_library.dtype_code(q), cpu_library.thread_count(),
    )  # fmt: skip
    _require_placed("packed_attention", bad, q.shape[0])
    return out, lse


def packed_attention_backward_cpu(
    g: Tensor, attended: Attended, cu_seqlens: Tensor, rule: AttentionRule, *, isa: str | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the op on the CPU: g [T, Hq, Dv] -> dq, dk and dv like q, k and v, and sink_rows [T or 0, Hq] float32.

    Raises:
        InvalidInput: cu_seqlens is invalid.
    """
    g, cu_seqlens = g.contiguous(), cu_seqlens.contiguous()
    q, k, v, out, lse = (tensor.contiguous() for tensor in attended)
    dq, dk, dv = (torch.zeros_like(tensor) for tensor in (q, k, v))
    sink_rows = torch.zeros((0 if rule.sinks is None else len(q), q.shape[1]), dtype=torch.float32, device="cpu")
    heads = (rule.alibi_slopes, rule.sinks)
    slopes, sinks = (None if values is None else values.float().contiguous() for values in heads)
    scalars = (ctypes.c_float * 4)(rule.pre_scale, rule.softcap, math.log2(math.e), rule.scale)
    sizes = (ctypes.c_int64 * 8)(*_sizes(q, v, cu_seqlens), rule.sliding_window, rule.attention_chunk)
    bad = cpu_library.library(isa).detcompile_packed_attention_backward(
        g, q, k, v, out, lse, cu_seqlens, dq, dk, dv, None if sinks is None else sink_rows, sizes, scalars, slopes,
        sinks, cpu_library.dtype_code(q), cpu_library.thread_count(),
    )  # fmt: skip
    _require_placed("packed_attention_backward", bad, q.shape[0])
    return dq, dk, dv, sink_rows


def _flat(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that takes an AttentionRule as the operation, whose arguments are flat, and check the heads."""

    def flat(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, *fields: Any) -> Any:
        rule = AttentionRule(*fields)
        rule.check("detcompile::packed_attention", q.shape[1], k.shape[1])
        return attend(q, k, v, cu_seqlens, rule)

    return flat


def _flat_backward(backward: Callable[..., Any]) -> Callable[..., Any]:
    def flat(g, q, k, v, out, lse, cu_seqlens, *fields):
        rule = AttentionRule(*fields)
        rule.check("detcompile::packed_attention_backward", q.shape[1], k.shape[1])
        if rule.relative_bias is not None:
            raise InvalidInput(
                "detcompile::packed_attention_backward: biases by distance have no gradient. Train a model without "
                "relative_bias."
            )
        return backward(g, Attended(q, k, v, out, lse), cu_seqlens, rule)

    return flat


def _backward_fake(g, q, k, v, out, lse, cu_seqlens, *rule):
    sinks = AttentionRule(*rule).sinks
    rows = lse.new_empty(lse.shape if sinks is not None else (0, q.shape[1]))
    return (*(tensor.new_empty(tensor.shape) for tensor in (q, k, v)), rows)


def _like_forward(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:2], v.shape[2])), q.new_empty(q.shape[:2], dtype=torch.float32)


define(
    f"packed_attention(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, {RULE}) -> (Tensor, Tensor)",
    {"q": "float T Hq>0 D>0", "k": "q T Hkv>0 D", "v": "q T Hkv Dv>0", "cu_seqlens": "int32 S+1"}
    | rule_operands("T Hq"),
    cpu=_flat(packed_attention_cpu),
    cuda=_flat(packed_attention_cuda),
    fake=lambda q, k, v, *rest: _like_forward(q, v),
)
define(
    "packed_attention_backward(Tensor g, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor cu_seqlens, "
    f"{RULE}) -> (Tensor, Tensor, Tensor, Tensor)",
    {
        "g": "float T Hq>0 Dv>0",
        "q": "g T Hq D>0",
        "k": "g T Hkv>0 D",
        "v": "g T Hkv Dv",
        "out": "g T Hq Dv",
        "lse": "float32 T Hq",
        "cu_seqlens": "int32 S+1",
    }
    | rule_operands("T Hq"),
    cpu=_flat_backward(packed_attention_backward_cpu),
    cuda=_flat_backward(packed_attention_backward_cuda),
    fake=_backward_fake,
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.window, ctx.chunk, ctx.cap, sinks, slopes, ctx.attention_chunk, bias = inputs
    ctx.save_for_backward(*tensors, *output, sinks, slopes, bias)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, g: Tensor, _lse: Tensor) -> tuple[Any, ...]:
    q, k, v, cu_seqlens, out, lse, sinks, slopes, bias = ctx.saved_tensors
    rule = AttentionRule(ctx.scale, ctx.window, ctx.chunk, ctx.cap, sinks, slopes, ctx.attention_chunk, bias)
    dq, dk, dv, rows = torch.ops.detcompile.packed_attention_backward(g, q, k, v, out, lse, cu_seqlens, *rule)
    d_sinks = None if sinks is None else torch.ops.detcompile.token_sum(rows).to(sinks.dtype)
    return dq, dk, dv, None, None, None, None, None, d_sinks, None, None, None


torch.library.register_autograd("detcompile::packed_attention", _backward, setup_context=_setup, lib=LIBRARY)


def reference_packed_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, rule: AttentionRule) -> Tensor:
    """Return ``out`` in float64, unrounded, with torch's gradients."""
    groups = q.shape[1] // k.shape[1]
    parts = []
    for start, end in zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:]):
        heads = (tensor[start:end].double().transpose(0, 1) for tensor in (q, k, v))
        q_, k_, v_ = (tensor.repeat_interleave(count, 0) for tensor, count in zip(heads, (1, groups, groups)))
        position = torch.arange(end - start, device=q.device)
        distance = position[:, None] - position
        hidden = distance < 0
        if rule.sliding_window:
            hidden = hidden | (distance >= rule.sliding_window)
        if rule.attention_chunk:
            hidden = hidden | (position[:, None] // rule.attention_chunk != position // rule.attention_chunk)
        scores = q_ @ k_.transpose(1, 2) * rule.scale
        if rule.softcap:
            scores = rule.softcap * torch.tanh(scores / rule.softcap)
        if rule.alibi_slopes is not None:
            scores = scores - rule.alibi_slopes.double()[:, None, None] * distance
        scores = scores.masked_fill(hidden, -math.inf)
        if rule.sinks is not None:
            scores = torch.cat([scores, rule.sinks.double()[:, None, None].expand(-1, end - start, 1)], -1)
        parts.append((torch.softmax(scores, -1)[..., : end - start] @ v_).transpose(0, 1))
    return torch.cat(parts)


def _sizes(q: Tensor, v: Tensor, cu_seqlens: Tensor) -> tuple[int, ...]:
    return (q.shape[0], len(cu_seqlens) - 1, q.shape[1], v.shape[1], q.shape[2], v.shape[2])


def _require_placed(op: str, bad: int, T: int) -> None:
    if bad >= 0:
        raise InvalidInput(
            f"detcompile::{op}: cu_seqlens must start at 0 and ascend to at most T = {T}; sequence {bad} violates this."
            " Use the result of training.packing.packed_step."
        )
