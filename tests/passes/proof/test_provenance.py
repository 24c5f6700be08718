"""The axis algebra names the row that each element reads, as checked by values."""

import itertools
import math
from collections.abc import Callable

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from detcompile.passes.proof.context import Context, require_arguments
from detcompile.passes.proof.movement_rules import INDEXING, MOVEMENT
from detcompile.passes.proof.pointwise import pointwise
from detcompile.passes.proof.provenance import (
    Axis,
    Refusal,
    Rows,
    choose_rows,
    created,
    index,
    join,
    require_apart,
    view,
)

aten = torch.ops.aten
B, T = sympy.symbols("B T", integer=True, positive=True)
BATCH, TOKENS = Axis(B, "batch"), Axis(T, "tokens")


def feature(size: int) -> tuple[Axis, ...]:
    return (Axis(sympy.Integer(size)),)


HIDDEN = Rows(((BATCH,), (TOKENS,), feature(12)))


@pytest.mark.parametrize(
    ("sizes", "dims"),
    [
        ((B, T, 3, 4), ((BATCH,), (TOKENS,), feature(3), feature(4))),
        ((B * T, 12), ((BATCH, TOKENS), feature(12))),
        ((B, 12 * T), ((BATCH,), (TOKENS, *feature(12)))),
        ((B, 1, T * 3, 2, 2), ((BATCH,), (), (TOKENS, *feature(3)), feature(2), feature(2))),
    ],
)
def test_a_view_that_follows_the_axes(sizes: tuple, dims: tuple) -> None:
    assert view(HIDDEN, [sympy.sympify(size) for size in sizes]) == Rows(dims)
    assert view(Rows(dims), [B, T, sympy.Integer(12)]) == HIDDEN


@pytest.mark.parametrize(
    "sizes", [(T, B, 12), (B, 12, T), (B, 3, T, 4), (2 * B, T, 6), (B, T, 5), (B, T), (B, T, 12, 2)]
)
def test_a_view_that_cuts_rows_is_refused(sizes: tuple) -> None:
    with pytest.raises(Refusal):
        view(HIDDEN, [sympy.sympify(size) for size in sizes])


def test_rows_meet_only_their_own() -> None:
    assert join([HIDDEN, Rows((feature(12),))], 3) == HIDDEN
    for other in (((TOKENS,), (BATCH,), ()), (feature(3), (TOKENS,), ()), ((Axis(B, "tokens"),), (TOKENS,), ())):
        with pytest.raises(Refusal, match="meet elements of"):
            join([HIDDEN, Rows(other)], 3)


def test_every_row_meeting_every_other_is_refused() -> None:
    with pytest.raises(Refusal, match="every row of tokens meets every other"):
        require_apart(Rows(((TOKENS,), (TOKENS,))), (T, T), ())
    with pytest.raises(Refusal, match="chosen by the caller meet"):
        require_apart(Rows(((TOKENS,), (Axis(B, "logits"),))), (T, B), ("logits",))
    with pytest.raises(Refusal, match="do not make its extents"):
        require_apart(HIDDEN, (sympy.Integer(1), T, sympy.Integer(12)), ())


def test_an_extent_of_a_row_space_is_that_space_and_no_other() -> None:
    sizes = (T, sympy.Integer(1), sympy.Integer(4), 2 * T)
    assert created(sizes, {T: "tokens"}) == Rows(((TOKENS,), (), feature(4), (Axis(2 * T),)))


def test_rows_are_chosen_once_and_from_the_only_rows() -> None:
    packed, keep = Rows(((), (TOKENS,), feature(12))), Axis(B, "logits")
    assert choose_rows(packed, 1, keep) == Rows(((), (keep,), feature(12)))
    for value, dim in ((HIDDEN, 1), (packed, 2), (Rows(((TOKENS, *feature(2)),)), 0)):
        with pytest.raises(Refusal, match="rows are chosen from"):
            choose_rows(value, dim, keep)


def test_a_table_is_read_by_rows_and_rows_by_no_row() -> None:
    ids, table = Rows(((BATCH,), (TOKENS,))), Rows((feature(7), feature(12)))
    assert index(table, [ids]) == HIDDEN
    with pytest.raises(Refusal, match="rows index into rows"):
        index(HIDDEN, [None, None, ids])
    with pytest.raises(Refusal, match="indexing over"):
        index(HIDDEN, [None, Rows((feature(3),))])


NUM_BATCH, NUM_TOKENS, FEATURES = 4, 6, (6, 4)  # extents that divide and repeat each other, so that wrong views fit


class Chain:
    """Operations over a tensor whose elements hold the number of the row they came from."""

    def __init__(self) -> None:
        self.graph, self.context = fx.Graph(), Context({}, {}, packed=False)
        x = self.graph.placeholder("x")
        rows = torch.arange(NUM_BATCH * NUM_TOKENS).view(NUM_BATCH, NUM_TOKENS, 1, 1)
        x.meta["val"] = rows.expand(-1, -1, *FEATURES).contiguous()
        batch, tokens = Axis(sympy.Integer(NUM_BATCH), "batch"), Axis(sympy.Integer(NUM_TOKENS), "tokens")
        self.context.states[x] = Rows(((batch,), (tokens,), *(feature(size) for size in FEATURES)))
        self.values = [x]

    @property
    def shape(self) -> list[int]:
        return list(self.values[-1].meta["val"].shape)

    def apply(self, target: Callable, *args: object) -> None:
        """Append an operation if its rule accepts it, and check by value what the rule says of it."""
        node = self.graph.call_function(target, args)
        node.meta["val"] = target(*fx.map_arg(args, lambda arg: arg.meta["val"]))
        rule = {**MOVEMENT, **INDEXING}.get(target, pointwise)
        try:
            require_arguments(node, self.context)
            state = rule(node, self.context)
            require_apart(state, tuple(map(sympy.Integer, node.meta["val"].shape)), ())
        except Refusal:
            return
        self.context.states[node] = state
        self.values.append(node)
        assert torch.equal(claimed(state, node.meta["val"].shape), node.meta["val"]), (target, args, state)


def claimed(state: Rows, shape: torch.Size) -> Tensor:
    """The row that each element reads, from the state alone."""
    axes = [axis for dim in state.dims for axis in dim]
    grids = torch.meshgrid(*(torch.arange(int(axis.size)) for axis in axes), indexing="ij")
    place = {axis.row: grid for axis, grid in zip(axes, grids, strict=True) if axis.row}
    return (place["batch"] * NUM_TOKENS + place["tokens"]).reshape(shape)


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def draw_view(draw: Callable, chain: Chain) -> None:
    sizes, rest = [], math.prod(chain.shape)
    while rest > 1 and len(sizes) < 4:
        sizes.append(draw(st.sampled_from(divisors(rest))))
        rest //= sizes[-1]
    chain.apply(aten.reshape.default, chain.values[-1], [*sizes, rest])


def draw_regroup(draw: Callable, chain: Chain) -> None:
    """Join two dimensions, and cut the result somewhere."""
    shape = chain.shape
    if len(shape) < 2:
        return
    dim = draw(st.integers(0, len(shape) - 2))
    both = shape[dim] * shape[dim + 1]
    first = draw(st.sampled_from([both, shape[dim], *divisors(both)]))
    chain.apply(aten.reshape.default, chain.values[-1], [*shape[:dim], first, both // first, *shape[dim + 2 :]])


def draw_move(draw: Callable, chain: Chain) -> None:
    """One operation along one dimension, which may be counted from the end."""
    x, rank = chain.values[-1], len(chain.shape)
    dim = draw(st.integers(-rank, rank - 1))
    size = chain.shape[dim]
    start, step = draw(st.integers(-size, size - 1)), draw(st.integers(1, 2))
    ids = draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=4))
    move = draw(st.sampled_from(["unsqueeze", "select", "slice", "flip", "cat", "pad", "take", "repeat", "squeeze"]))
    if move == "unsqueeze":
        chain.apply(aten.unsqueeze.default, x, draw(st.integers(-rank - 1, rank)))
    elif move == "select" and rank > 2:
        chain.apply(aten.select.int, x, dim, start)
    elif move == "slice":
        end = draw(st.sampled_from([2**63 - 1, size, -1, max(start % size + 1, 1)]))
        if end != -1 or start % size < size - 1:
            chain.apply(aten.slice.Tensor, x, dim, start, end, step)
    elif move == "flip":
        chain.apply(aten.flip.default, x, [dim])
    elif move == "cat":
        others = [value for value in chain.values if value.meta["val"].shape == x.meta["val"].shape]
        chain.apply(aten.cat.default, [x, draw(st.sampled_from(others))], dim)
    elif move == "pad" and size > 1:
        chain.apply(aten.constant_pad_nd.default, x, [0, 0] * ((rank - 1) - dim % rank) + [-1, 0])
    elif move == "take":
        picked = chain.graph.placeholder("ids")
        picked.meta["val"] = torch.tensor(ids)
        chain.context.states[picked] = Rows((feature(len(ids)) if len(ids) > 1 else (),))
        chain.apply(aten.index.Tensor, x, [None] * (dim % rank) + [picked])
    elif move == "repeat":
        chain.apply(aten.repeat.default, x, [1] * (dim % rank) + [step] + [1] * (rank - 1 - dim % rank))
    elif move == "squeeze":
        chain.apply(aten.squeeze.dim, x, dim)


def draw_permute(draw: Callable, chain: Chain) -> None:
    order = draw(st.permutations(range(len(chain.shape))))
    signs = draw(st.sampled_from([0, len(order)]))
    chain.apply(aten.permute.default, chain.values[-1], [d - signs for d in order])


def draw_expand(draw: Callable, chain: Chain) -> None:
    ones = [i for i, size in enumerate(chain.shape) if size == 1]
    sizes = [draw(st.sampled_from([1, 2, NUM_TOKENS])) if i in ones else -1 for i in range(len(chain.shape))]
    chain.apply(aten.expand.default, chain.values[-1], [*draw(st.sampled_from([[], [2], [1]])), *sizes])


def draw_meeting(draw: Callable, chain: Chain) -> None:
    """Elementwise with an earlier value, one side turned: accepted only where equal rows meet."""
    shape = chain.shape
    if len(shape) <= 5:
        turns = [turn for turn in itertools.permutations(range(len(shape))) if [shape[i] for i in turn] == shape]
        chain.apply(aten.permute.default, chain.values[-1], list(draw(st.sampled_from(turns))))
    a, b = chain.values[-1], draw(st.sampled_from(chain.values))
    try:
        torch.broadcast_shapes(a.meta["val"].shape, b.meta["val"].shape)
    except RuntimeError:
        return
    chain.apply(aten.maximum.default, a, b)
    if chain.values[-1].args == (a, b):
        assert torch.equal(*torch.broadcast_tensors(a.meta["val"], b.meta["val"]))


DRAWS = (draw_view, draw_regroup, draw_regroup, draw_permute, draw_move, draw_move, draw_expand, draw_meeting)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_state_says_which_row_each_element_reads(data: st.DataObject) -> None:
    chain = Chain()
    for _ in range(data.draw(st.integers(1, 10))):
        if math.prod(chain.shape) <= 4096:
            data.draw(st.sampled_from(DRAWS))(data.draw, chain)


def test_an_argument_by_keyword_and_a_write_are_refused() -> None:
    chain = Chain()
    for target, args, kwargs, message in [
        (aten.flip.default, (chain.values[0],), {"dims": [0]}, "by keyword"),
        (aten.mul_.Tensor, (chain.values[0], 2), {}, "writes into its arguments"),
    ]:
        with pytest.raises(Refusal, match=message):
            require_arguments(chain.graph.call_function(target, args, kwargs), chain.context)
