"""A backward with an undeclared or misdirected sum over tokens is rejected by name."""

import types
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch import fx

from detcompile.errors import UncertifiedOp
from detcompile.passes.proof import gradient_rules
from detcompile.passes.proof.provenance import Axis, Layout, Refusal, Rows, TokenSum
from detcompile.passes.training import regions
from detcompile.passes.training.autograd_ops import as_templates
from tests.training.cases import trained

aten, ours = torch.ops.aten, torch.ops.detcompile


def sums(graph: fx.Graph) -> list[fx.Node]:
    return graph.find_nodes(op="call_function", target=ours.token_matmul.default)


def leaves_of_another_step(graph: fx.Graph) -> None:
    (attention,) = graph.find_nodes(op="call_function", target=ours.packed_attention_backward.default)
    product = sums(graph)[0]
    product.args = (*product.args[:2], attention.args[6], *product.args[3:])  # cu_seqlens


def another_grid(graph: fx.Graph) -> None:
    product = sums(graph)[0]
    product.args = (*product.args[:3], 1, -40)


def heads_as_tokens(graph: fx.Graph) -> None:
    product = sums(graph)[0]
    product.args = (*product.args[:3], 4)


def product_over_tokens(graph: fx.Graph) -> None:
    product = sums(graph)[0]
    with graph.inserting_before(product):
        transposed = [graph.call_function(aten.permute.default, (arg, [1, 0])) for arg in product.args[:2]]
        for node, arg in zip(transposed, product.args, strict=False):
            node.meta["val"] = arg.meta["val"].t()
        plain = graph.call_function(ours.matmul.default, (*transposed, None, None, [], None))
    plain.meta["val"] = product.meta["val"].float()
    product.replace_all_uses_with(plain)


def sum_into_rows(graph: fx.Graph) -> None:
    product = sums(graph)[0]
    (output,) = graph.find_nodes(op="output")
    rows = output.args[0][0]
    with graph.inserting_before(output):
        meets = graph.call_function(aten.mul.Tensor, (rows, product))
    meets.meta["val"] = rows.meta["val"]
    output.args = ((meets, *output.args[0][1:]),)


def rows_for_a_weight(graph: fx.Graph) -> None:
    (output,) = graph.find_nodes(op="output")
    output.args = ((*output.args[0][:-1], output.args[0][0]),)


def plain_sum_over_tokens(graph: fx.Graph) -> None:
    summed = graph.find_nodes(op="call_function", target=ours.token_sum.default)[0]
    with graph.inserting_before(summed):
        plain = graph.call_function(aten.sum.dim_IntList, (summed.args[0], [0]))
    plain.meta["val"] = summed.meta["val"].float()
    summed.replace_all_uses_with(plain)


MUTANTS: dict[Callable[[fx.Graph], None], str] = {
    leaves_of_another_step: "leaves is not the step's",
    another_grid: r"on the grid 2\^-40, declared is 2\^-44",
    heads_as_tokens: "leaves of 4 rows a token",
    product_over_tokens: "the second matrix holds rows of tokens",
    sum_into_rows: "a sum over tokens, which is the gradient of a weight and nothing else",
    rows_for_a_weight: "belongs to a weight and is not a sum over tokens",
    plain_sum_over_tokens: "a floating-point sum whose order is not pinned",
}


def compile_layer() -> None:
    call = trained("llama").blocks[0].call
    (key, *_) = call.region.backwards
    call.region._compile(*key)


def test_what_autograd_made_is_certified():
    compile_layer()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_backward_that_sums_otherwise_is_refused(mutant: Callable[[fx.Graph], None], monkeypatch: pytest.MonkeyPatch):
    def changed(gm: fx.GraphModule) -> fx.GraphModule:
        as_templates(gm)
        if sums(gm.graph):
            mutant(gm.graph)
            gm.recompile()
        return gm

    monkeypatch.setattr(regions, "as_templates", changed)
    with pytest.raises(Exception, match=MUTANTS[mutant]) as raised:
        compile_layer()
    assert isinstance(raised.value, UncertifiedOp)


def test_a_forward_that_sums_otherwise_than_served_is_refused(monkeypatch: pytest.MonkeyPatch):
    def changed(gm: fx.GraphModule) -> fx.GraphModule:
        as_templates(gm)
        for node in gm.graph.find_nodes(op="call_function", target=ours.matmul.default):
            if node.args[4] and not sums(gm.graph):
                node.args = (*node.args[:4], [], *node.args[5:])
        return gm

    monkeypatch.setattr(regions, "as_templates", changed)
    with pytest.raises(UncertifiedOp, match="sums differently from the served one"):
        compile_layer()


TOKENS, HEADS, FEATURES = Axis(sympy.Symbol("s"), "tokens"), Axis(sympy.Integer(4)), Axis(sympy.Integer(20))
ROWS = {
    "tokens": (TOKENS,),
    "heads of tokens": (TOKENS, HEADS),
    "tokens of heads": (HEADS, TOKENS),
    "no tokens": (HEADS,),
    "pairs of tokens": (TOKENS, Axis(sympy.Symbol("s"), "others")),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_sum_whose_leaves_are_rows_takes_tokens_in_any_order_and_others_in_theirs(name: str):
    """gemma3 norms heads that tokens lie behind. A product over tokens has leaves of several, in their order."""
    g = Rows((ROWS[name], (FEATURES,)))
    context: Any = types.SimpleNamespace(rows=lambda value: value, states={None: Layout("leaves")})
    node: Any = None
    calls = {
        gradient_rules._token_sum: {"g": g},
        gradient_rules._token_matmul: {"g": g, "x": g, "leaves": None, "rows_a_token": 4 if HEADS in g.dims[0] else 1},
        gradient_rules._token_scatter: {"g": g, "ids": Rows((ROWS[name],))},
    }
    in_order = ("tokens", "heads of tokens")
    for rule, given in calls.items():
        if name in in_order or (rule is gradient_rules._token_sum and name == "tokens of heads"):
            assert rule(node, given, context) == TokenSum()
        else:
            with pytest.raises(Refusal, match="is not over the tokens"):
                rule(node, given, context)
