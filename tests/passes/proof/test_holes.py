"""One graph for each hole that the certificate once had, and for each harmless model that it once rejected."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from detcompile import Backend, Numerics, UncertifiedOp
from detcompile.passes.proof.context import Role
from detcompile.passes.tracing import cause


def offenders(function: Callable, role: Callable[[str, object], Role], *inputs: Tensor) -> tuple[str, ...]:
    """What the certificate refuses in ``function``; () if it certifies it."""
    torch._dynamo.reset()
    try:
        torch.compile(function, backend=Backend(Numerics(), role, certify_only=True), fullgraph=True)(*inputs)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        refused = cause(error)
        if not isinstance(refused, UncertifiedOp):
            raise
        return refused.offenders
    return ()


def dense(function: Callable[[Tensor], Tensor]) -> tuple[str, ...]:
    x = torch.randn(3, 5, 16)
    torch._dynamo.mark_dynamic(x, [0, 1])
    return offenders(function, lambda name, _: Role("rows", {0: "batch", 1: "tokens"} if name == "L_x_" else None), x)


def packed(function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> tuple[str, ...]:
    roles = {
        "L_lengths_": Role("layout"),
        "L_x_": Role("rows", {0: "tokens"}),
        "L_keep_": Role("rows", {0: "logits"}, final_gather=True),
    }
    inputs = torch.randn(5, 16), torch.arange(5), torch.zeros(3, dtype=torch.int32)
    for tensor in inputs:
        torch._dynamo.decorators.mark_unbacked(tensor, 0)
    return offenders(function, lambda name, _: roles.get(name, Role("weight")), *inputs)


def attend(q: Tensor) -> Tensor:
    return torch.ops.detcompile.dense_attention(q, q, q, 1.0, 0, 512)


def heads_first(x: Tensor) -> Tensor:
    """[B, T, 4 heads * 4] -> [B, 1, heads * T, 4]: a token's first head comes after every token of another."""
    return x.unflatten(-1, (4, 4)).transpose(1, 2).flatten(1, 2)[:, None]


def all_features_for_each(x: Tensor) -> Tensor:
    """[B, T, 16] -> [B, T, 256 T]: found by benchmarks/certificate_draws.py, seed 11303."""
    flat = x.flatten(1)
    return flat[:, None].expand(-1, flat.shape[1], -1).reshape(*x.shape[:2], -1)


FIRST = torch.zeros(1, 1, 4, dtype=torch.int64)
TABLE = torch.arange(160.0).view(10, 16)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = nn.Buffer(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.calls.add_(1)


HOLES = {
    "sort: a dimension by keyword": (lambda x: torch.sort(x, dim=1, stable=True).values, "an ordering over"),
    "slice: starts at a count": (lambda x: x.narrow(2, x.shape[1] % 4, 4), "a slice at a value computed from"),
    "pad: by a count, cut by it": (lambda x: F.pad(x, (x.shape[1], -x.shape[1])), "a token or batch count"),
    "pad: rows": (lambda x: F.pad(x, (0, 0, 1, -1)), "padding over"),
    "topk: as many as a count": (lambda x: x.topk(x.shape[1] % 8 + 1, -1).values, "a token or batch count"),
    "gather: an index with fewer rows": (lambda x: x.gather(2, FIRST), "do not make its extents"),
    "sum: integers as floats": (lambda x: x.int().sum(-1, dtype=torch.float32), "floating-point sum"),
    "sum: floats as integers": (lambda x: x.sum(-1, dtype=torch.int64), "floating-point sum"),
    "sum: of nothing": (lambda x: x[..., :0].sum(-1), "floating-point sum"),
    "softmax: of nothing": (lambda x: x[..., :0].softmax(-1), "test_holes.py"),
    "product: of integers": (lambda x: x.int() @ TABLE[:, :1].int().expand(10, 16).t(), "test_holes.py"),
    "product: of float64": (lambda x: x.double() @ TABLE.double().t(), "there is an order for float32"),
    "empty: memory nobody wrote": (lambda x: x + torch.empty_like(x), "uninitialized memory"),
    "attention: heads before tokens": (lambda x: attend(heads_first(x)), "out of place"),
    "attention: over the batch": (lambda x: attend(x.transpose(0, 1)[:, None]), "out of place"),
    "expand: to as many as all features of all tokens": (lambda x: all_features_for_each(x), "not a number of rows"),
    "expand: every token sees every other": (lambda x: x[:, None].expand(-1, x.shape[1], -1, -1), "every other"),
    "softmax: a tree nobody declared": (lambda x: torch.ops.detcompile.softmax(x, None, [2]), "declared is (2, 2, 2)"),
    "a buffer that counts calls": (Counter(), "writes rows into an input"),
}


@pytest.mark.parametrize(("function", "message"), HOLES.values(), ids=HOLES.keys())
def test_a_hole_once_found_stays_closed(function: Callable[[Tensor], Tensor], message: str) -> None:
    assert message in " ".join(dense(function))


def test_what_a_pass_of_torchs_added_is_named_by_the_line_that_reads_it() -> None:
    (refused,) = dense(lambda x: F.dropout(x, 0.5, training=True))
    assert " at test_holes.py:" in refused and "random numbers" in refused


PACKED_HOLES = {
    "the place of a row as a number": (lambda x, keep, lengths: x[keep] * keep[:, None], "holds the layout"),
    "the place of a row in a table": (lambda x, keep, lengths: x[keep] + F.embedding(keep, TABLE), "holds the layout"),
    "the place of a row as an index": (lambda x, keep, lengths: x[keep] + TABLE[keep], "rows are chosen from"),
    "a row chosen twice": (lambda x, keep, lengths: x[keep][keep], "rows are chosen from"),
    "features chosen": (lambda x, keep, lengths: x[:, keep], "rows are chosen from"),
    "chosen rows meet all rows": (lambda x, keep, lengths: x[keep][:, None] + x, "rows chosen by the caller meet"),
    "the length of a sequence": (lambda x, keep, lengths: x + lengths[0], "holds the layout"),
    "attention past its sequence": (lambda x, keep, lengths: attend(x[None, None])[0, 0][keep], "as one sequence"),
}


@pytest.mark.parametrize(("function", "message"), PACKED_HOLES.values(), ids=PACKED_HOLES.keys())
def test_a_packed_hole_once_found_stays_closed(function: Callable[..., Tensor], message: str) -> None:
    assert message in " ".join(packed(function))


HARMLESS = {
    "heads repeated": lambda x: x.unflatten(-1, (4, 4)).repeat(1, 1, 2, 1).flatten(2),
    "heads interleaved": lambda x: x.unflatten(-1, (4, 4)).transpose(1, 2).repeat_interleave(2, 1),
    "a gated unit": lambda x: F.glu(x, -1),
    "features written in place": lambda x: written(x),
    "tokens up to their own number": lambda x: x[:, : x.shape[1]],
    "rotary by halves": lambda x: torch.cat([-x.chunk(2, -1)[1], x.chunk(2, -1)[0]], -1) * x.cos(),
    "rotary interleaved": lambda x: torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2),
    "one norm for all heads": lambda x: F.rms_norm(x, (16,)).unflatten(-1, (4, 4)).transpose(1, 2),
    "features sorted, equal ones in any order": lambda x: torch.sort(x, -1).indices,
    "one of several, by a number": lambda x: x + F.one_hot(x.argmax(-1), 16),
    "logits capped": lambda x: 30 * torch.tanh(x / 30),
}


def written(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[..., ::2] = x[..., 1::2]
    return out


def widened(x: Tensor) -> Tensor:
    out = torch.zeros(*x.shape[:-1], 20)
    out[..., :16] = x
    return out[..., 4:]


@pytest.mark.parametrize("function", HARMLESS.values(), ids=HARMLESS.keys())
def test_a_habit_of_models_is_certified(function: Callable[[Tensor], Tensor]) -> None:
    assert dense(function) == ()


@pytest.mark.parametrize("function", [written, widened])
def test_features_are_written_into_zeros_for_a_number_of_rows_that_nobody_knows(function: Callable) -> None:
    """As compile() traces a model: torch's folding of constants asks how the rows of a part of the zeros lie."""
    assert packed(lambda x, keep, lengths: function(x[None])[0][keep]) == ()


def test_the_final_gather_is_certified_before_and_after_the_head() -> None:
    assert packed(lambda x, keep, lengths: (x[None][:, keep] * 2).squeeze(0)) == ()
    assert packed(lambda x, keep, lengths: (x * 2).index_select(0, keep)) == ()
