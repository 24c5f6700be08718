"""What the templates of a trainer do to rows: its attention keeps them apart; gradients belong into no forward."""

from typing import NoReturn

from torch import fx

from detcompile.passes.graphs import arguments_of
from detcompile.passes.proof.context import Context
from detcompile.passes.proof.provenance import Layout, Refusal, Rows
from detcompile.passes.proof.template_rules import require_heads_of_tokens, require_per_head

__all__ = ["gradient", "packed_attention"]


def packed_attention(node: fx.Node, ctx: Context) -> tuple[Rows, Rows]:
    """Row t reads the keys of its own sequence up to its own position, which are rows of the same step."""
    given = arguments_of(node)
    state = ctx.states[given["cu_seqlens"]]
    if not isinstance(state, Layout) or state.part != "cu_seqlens":
        raise Refusal("attention's cu_seqlens is not the step's own")
    require_per_head(given["sinks"], given["alibi_slopes"], ctx=ctx)
    heads = [ctx.rows(given[name]) for name in ("q", "k", "v")]
    biases = [] if given["relative_bias"] is None else [ctx.rows(given["relative_bias"])]
    for value in (*heads, *biases):
        require_heads_of_tokens(value)
    q, _, v = heads
    return Rows((q.dims[0], q.dims[1], v.dims[2])), Rows(q.dims[:2])


def gradient(node: fx.Node, ctx: Context) -> NoReturn:
    """Refuses: a gradient of weights sums over rows, and one of attention reads rows behind its own."""
    raise Refusal("a gradient in a forward: rows meet in it")
