"""Packed attention on the CPU: paged_attention's bytes; gradients in Keys and Queries, blind to what else is packed."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.orders import Keys, Queries
from detcompile.orders.float32 import fma_float32
from detcompile.orders.matmul_orders import Blocked
from detcompile.orders.numerics import KEY_BLOCK, row_order
from detcompile.templates.attention.scores import AttentionRule
from detcompile.templates.training.attention import (
    Attended,
    packed_attention_backward_cpu,
    packed_attention_cpu,
    reference_packed_attention,
)
from tests.bits import assert_bitwise_equal
from tests.templates.cases import DTYPES, ISAS, PagedCache, normal
from tests.templates.training.cases import cu_seqlens_of, packings, split

OURS = torch.ops.detcompile
LENGTHS = [3, 129, 1, 200, 64]
SLOPES, SINKS = torch.tensor([0.5, 0.25, 0.125, 0.0625]), torch.tensor([0.5, -1.0, 2.0, 0.0])
RULES = {
    "plain": AttentionRule(0.25, 0, 64),
    "window": AttentionRule(0.25, 50, 64),
    "tokens in chunks": AttentionRule(0.25, 0, 64, attention_chunk=70),
    "softcap": AttentionRule(0.3, 0, 64, softcap=2.0),
    "sinks": AttentionRule(0.25, 0, 64, sinks=SINKS),
    "ALiBi": AttentionRule(0.25, 0, 64, alibi_slopes=SLOPES),
    "all": AttentionRule(-0.3, 140, 128, 3.0, SINKS, SLOPES),
}
GRADIENTS = ("dq", "dk", "dv", "sink rows")


def drawn(dtype: torch.dtype, D: int = 16, Dv: int = 16, heads: int = 4, lengths=LENGTHS) -> tuple[Tensor, ...]:
    """q, k, v and the gradient of the output."""
    T = sum(lengths)
    shapes = [(T, heads, D), (T, 2, D), (T, 2, Dv), (T, heads, Dv)]
    return tuple(normal(shape, dtype, seed) for seed, shape in enumerate(shapes))


def forward_and_backward(q, k, v, g, lengths, rule, isa=None):
    cu_seqlens = cu_seqlens_of(lengths)
    out, lse = packed_attention_cpu(q, k, v, cu_seqlens, rule, isa=isa)
    return out, lse, *packed_attention_backward_cpu(g, Attended(q, k, v, out, lse), cu_seqlens, rule, isa=isa)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RULES)
def test_the_forward_has_the_bytes_of_paged_attention(name, dtype):
    q, k, v, _ = drawn(dtype, 24, 40)
    out, lse = OURS.packed_attention(q, k, v, cu_seqlens_of(LENGTHS), *RULES[name])
    for item, q_, k_, v_ in zip(*(split(rows, LENGTHS) for rows in (out, q, k, v))):
        cache = PagedCache.poisoned(len(item), 16, 2, 24, 40, dtype)
        cuts = [len(item) - len(item) // 2, len(item) // 2] if len(item) > 1 else [1]
        assert_bitwise_equal(item, cache.attend(OURS.paged_attention, q_, k_, v_, cuts, *RULES[name]), name)
    assert lse.dtype == torch.float32 and bool(lse.isfinite().all())


@pytest.mark.parametrize("name", RULES)
def test_lse_is_the_logarithm_of_the_sum_of_exponentials(name):
    q, k, v, _ = drawn(torch.float32)
    rule = RULES[name]._replace(sinks=None)
    ones = torch.ones_like(v)
    _, lse = OURS.packed_attention(q, k, ones, cu_seqlens_of(LENGTHS), *rule)
    # a sink at the logarithm itself takes half of the weight of each row
    for head, row in itertools.product(range(4), (2, 131, 300)):
        sinks = torch.full((4,), float(lse[row, head]))
        out, _ = OURS.packed_attention(q, k, ones, cu_seqlens_of(LENGTHS), *rule._replace(sinks=sinks))
        assert abs(float(out[row, head, 0]) - 0.5) < 1e-6


def expected_gradients(q, k, v, g, out, lse, rule):
    """One sequence in numpy, in the orders; P and dS as the kernel's elementary functions have them up to exp2."""
    n, heads, group = len(q), q.shape[1], q.shape[1] // k.shape[1]
    dtype = q.dtype
    f = lambda rows, head: rows[:, head].float().numpy()  # noqa: E731
    log2_e = np.float32(math.log2(math.e))
    weights = {"p": [], "ds": []}
    for head in range(heads):
        shared = head // group
        scores = Blocked(q.shape[2]).evaluate(f(q, head), f(k, shared)) * np.float32(rule.scale)
        dp = Blocked(v.shape[2]).evaluate(f(g, head), f(v, shared))
        delta = row_order(v.shape[2], "cpu").evaluate(f(g, head) * f(out, head))
        p = exp2((scores - lse[:, head].numpy()[:, None]) * log2_e)
        ds = p * (dp - delta[:, None])
        seen = np.tril(np.ones((n, n), bool))
        if rule.sliding_window:
            seen &= ~np.tril(np.ones((n, n), bool), -rule.sliding_window)
        for name, values in (("p", p), ("ds", ds)):
            weights[name].append(rounded(np.where(seen, values, np.float32(0)), dtype))
    scale = np.float32(rule.scale)
    dq = [Keys(KEY_BLOCK).evaluate(weights["ds"][head], f(k, head // group)) * scale for head in range(heads)]
    dk, dv = [], []
    for shared in range(k.shape[1]):
        mine = range(shared * group, (shared + 1) * group)
        p, ds = (np.stack([weights[name][head] for head in mine]) for name in ("p", "ds"))
        dk.append(Queries(group).evaluate(ds, np.stack([f(q, head) for head in mine])) * scale)
        dv.append(Queries(group).evaluate(p, np.stack([f(g, head) for head in mine])))
    return [torch.from_numpy(np.stack(heads, 1)).to(dtype) for heads in (dq, dk, dv)]


def rounded(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    return torch.from_numpy(values).to(dtype).float().numpy()


def exp2(x: np.ndarray) -> np.ndarray:
    """elementary.h's, in numpy."""
    x = np.minimum(np.float32(129), np.maximum(np.float32(-151), x))
    magic = np.float32(1.5 * 2**23)
    n = (x + magic) - magic
    r = x - n
    p = np.float32(1.5252733804059841e-05)
    for term in (
        1.5403530393381608e-04, 1.3333558146428443e-03, 9.6181291076284772e-03, 5.5504108664821580e-02,
        2.4022650695910072e-01, 6.9314718055994531e-01, 1.0,
    ):  # fmt: skip
        p = fma_float32(p, r, np.float32(term))
    return np.ldexp(p.astype(np.float64), n.astype(np.int64)).astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "D", "Dv"), [("plain", 16, 16), ("window", 20, 33), ("plain", 160, 144)])
def test_gradients_have_the_bits_of_the_orders(name, D, Dv, dtype):
    q, k, v, g = drawn(dtype, D, Dv, lengths=[270])
    out, lse, *ours = forward_and_backward(q, k, v, g, [270], RULES[name])
    for what, actual, expected in zip(GRADIENTS, ours, expected_gradients(q, k, v, g, out, lse, RULES[name])):
        assert_bitwise_equal(actual, expected, what)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RULES)
def test_instruction_sets_and_threads_do_not_matter(name, dtype):
    drawn_ = drawn(dtype, 20, 24)
    expected = forward_and_backward(*drawn_, LENGTHS, RULES[name])
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    for isa in ISAS:
        for actual, value in zip(forward_and_backward(*drawn_, LENGTHS, RULES[name], isa), expected):
            assert_bitwise_equal(actual, value, isa)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", RULES)
def test_what_else_is_packed_does_not_matter(name):
    drawn_ = drawn(torch.bfloat16)
    rows = [split(rows, LENGTHS) for rows in drawn_]
    expected = [split(rows, LENGTHS) for rows in forward_and_backward(*drawn_, LENGTHS, RULES[name]) if len(rows)]
    for packing in packings(len(LENGTHS)).values():
        for mine in packing:
            lengths = [LENGTHS[number] for number in mine]
            given = [torch.cat([of[number] for number in mine]) for of in rows]
            actual = forward_and_backward(*given, lengths, RULES[name])
            for ours, whole in zip([split(rows, lengths) for rows in actual if len(rows)], expected):
                for number, item in zip(mine, ours):
                    assert_bitwise_equal(item, whole[number], f"{name}, sequence {number} of {mine}")


def test_padding_gets_zeros():
    q, k, v, g = drawn(torch.bfloat16)
    whole = forward_and_backward(*(rows[:200] for rows in (q, k, v, g)), [200], RULES["sinks"])
    for rows in (q, k, v, g):
        rows[200:] = math.nan
    for actual, item in zip(forward_and_backward(q, k, v, g, [200], RULES["sinks"]), whole):
        assert_bitwise_equal(actual[:200], item)
        assert not actual[200:].any()


@pytest.mark.parametrize("name", RULES)
def test_gradients_are_as_accurate_as_torchs(name):
    drawn_ = [rows.to(torch.bfloat16) for rows in drawn(torch.float32, 32, 32)]
    rule, cu_seqlens = RULES[name], cu_seqlens_of(LENGTHS)

    def gradients(dtype, attend):
        q, k, v, g = (rows.to(dtype) for rows in drawn_)
        leaves = [rows.requires_grad_() for rows in (q, k, v)]
        return torch.autograd.grad(attend(*leaves), leaves, g)

    reference = gradients(torch.float64, lambda *rows: reference_packed_attention(*rows, cu_seqlens, rule))
    ours = gradients(torch.bfloat16, lambda *rows: OURS.packed_attention(*rows, cu_seqlens, *rule)[0])
    theirs = gradients(torch.bfloat16, lambda *rows: _torch_attention(*rows, rule))
    for what, a, b, exact in zip(GRADIENTS, ours, theirs, reference):
        error, of_torch = ((actual.double() - exact).norm() / exact.norm() for actual in (a, b))
        assert error <= 1.05 * of_torch, f"{what}: {error:.2e}, torch's {of_torch:.2e}"


def _torch_attention(q, k, v, rule):
    """In torch, bfloat16 as a model's eager attention computes it."""
    parts = []
    for q_, k_, v_ in zip(*(split(rows, LENGTHS) for rows in (q, k, v))):
        q_, k_, v_ = (rows.transpose(0, 1).repeat_interleave(4 // rows.shape[1], 0) for rows in (q_, k_, v_))
        n = q_.shape[1]
        scores = (q_ @ k_.transpose(1, 2)) * rule.scale
        if rule.softcap:
            scores = rule.softcap * torch.tanh(scores / rule.softcap)
        position = torch.arange(n)
        distance = position[:, None] - position
        if rule.alibi_slopes is not None:
            scores = scores - rule.alibi_slopes[:, None, None].to(scores.dtype) * distance
        hidden = distance < 0
        if rule.sliding_window:
            hidden = hidden | (distance >= rule.sliding_window)
        if rule.attention_chunk:
            hidden = hidden | (position[:, None] // rule.attention_chunk != position // rule.attention_chunk)
        scores = scores.masked_fill(hidden, -math.inf)
        if rule.sinks is not None:
            scores = torch.cat([scores, rule.sinks.to(scores.dtype)[:, None, None].expand(-1, n, 1)], -1)
        weights = torch.softmax(scores.float(), -1).to(scores.dtype)[..., :n]
        parts.append((weights @ v_).transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("name", RULES)
def test_autograd_has_every_gradient(name):
    q, k, v, g = drawn(torch.float32)
    g = g / 64  # as of a loss that is divided by its tokens
    rule, cu_seqlens = RULES[name], cu_seqlens_of(LENGTHS)

    def gradients(dtype, attend):
        leaves = [rows.to(dtype).requires_grad_() for rows in (q, k, v)]
        sinks = None if rule.sinks is None else rule.sinks.to(dtype).requires_grad_()
        out = attend(*leaves, rule._replace(sinks=sinks))
        return torch.autograd.grad(out, leaves if sinks is None else [*leaves, sinks], g.to(dtype))

    reference = gradients(torch.float64, lambda q, k, v, rule: reference_packed_attention(q, k, v, cu_seqlens, rule))
    ours = gradients(torch.float32, lambda q, k, v, rule: OURS.packed_attention(q, k, v, cu_seqlens, *rule)[0])
    for what, actual, exact in zip(GRADIENTS, ours, reference, strict=False):
        assert (actual - exact).norm() < 1e-6 * exact.norm(), what


def test_the_operations_are_as_torch_wants_them():
    q, k, v, g = (rows.requires_grad_() for rows in drawn(torch.float32, lengths=[5, 3]))
    given = (q, k, v, cu_seqlens_of([5, 3]), *RULES["sinks"])
    torch.library.opcheck(OURS.packed_attention.default, given)
    out, lse = (rows.detach() for rows in OURS.packed_attention(*given))
    rows = [rows.detach() for rows in (g, q, k, v)]
    torch.library.opcheck(OURS.packed_attention_backward.default, (*rows, out, lse, *given[3:]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(8, 4)}, r"q is .* must be .* \[T, Hq(>0)?, D(>0)?\]"),
        ({"k": torch.zeros(8, 3, 16), "v": torch.zeros(8, 3, 16)}, "query heads cannot share 3 key heads"),
        ({"cu_seqlens": torch.zeros(0, dtype=torch.int32)}, r"must be torch\.int32 \[S\+1\]"),
        ({"cu_seqlens": torch.tensor([0, 8])}, r"cu_seqlens is torch.int64 \(2,\)"),
        ({"cu_seqlens": torch.tensor([0, 9], dtype=torch.int32)}, "at most T = 8; sequence 0 violates"),
        ({"cu_seqlens": torch.tensor([0, 5, 4], dtype=torch.int32)}, "sequence 1 violates"),
        ({"cu_seqlens": torch.tensor([1, 5], dtype=torch.int32)}, "sequence 0 violates"),
        ({"rule": RULES["plain"]._replace(kv_chunk=65)}, "multiple of 64"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    q, k, v, g = drawn(torch.float32, lengths=[8])
    given = {"q": q, "k": k, "v": v, "cu_seqlens": cu_seqlens_of([8]), "rule": RULES["plain"]} | change
    tensors, rule, ours = [given[name] for name in ("q", "k", "v")], given["rule"], torch.ops.detcompile
    with pytest.raises(InvalidInput, match=message):
        ours.packed_attention(*tensors, given["cu_seqlens"], *rule)
    with pytest.raises(InvalidInput, match=message):
        ours.packed_attention_backward(g, *tensors, g, torch.zeros(8, 4), given["cu_seqlens"], *rule)


def test_gradients_that_do_not_fit_are_refused():
    q, k, v, g = drawn(torch.float32, lengths=[8])
    lse, cu_seqlens = torch.zeros(8, 4), cu_seqlens_of([8])
    for bad, of in ((g[1:], lse), (g.bfloat16(), lse), (g, lse[1:])):
        with pytest.raises(InvalidInput, match=r"(q|lse) is .*; it must be"):
            torch.ops.detcompile.packed_attention_backward(bad, q, k, v, g, of, cu_seqlens, *RULES["plain"])
    biased = RULES["plain"]._replace(relative_bias=torch.zeros(8, 4, 3))
    with pytest.raises(InvalidInput, match="biases by distance have no gradient"):
        torch.ops.detcompile.packed_attention_backward(g, q, k, v, g, lse, cu_seqlens, *biased)
