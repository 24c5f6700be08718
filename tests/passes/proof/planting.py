"""Graphs of tiny models, and a Planter that adds operations to a copy of one."""

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from detcompile import Numerics, UncertifiedOp
from detcompile.parallel import TensorParallel
from detcompile.passes import backend, lowering, program_source
from detcompile.passes.graphs import shape_of
from detcompile.passes.pipeline import rewrite
from detcompile.passes.proof.certificate import certify
from detcompile.passes.proof.context import Role
from tests.model_cases import random_model

__all__ = ["MODELS", "Captured", "Planter", "candidates", "capture", "copied", "offenders_of"]

aten = torch.ops.aten
NUMERICS = Numerics(tp_sizes=(1, 2), kv_chunk=64)
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 48}
# A learned table and fused weights, two KV groups and a soft cap, experts, norms of heads, slopes, a rank's share.
MODELS: dict[str, Mapping[str, Any]] = {
    "llama": {},
    "gpt2": {},
    "gemma2": {},
    "mixtral": EXPERTS,
    "qwen3": {},
    "bloom": {},
    "llama of two ranks": {"num_key_value_heads": 4},
}


class Captured(NamedTuple):
    """A packed graph before and after the passes, with the certificate's arguments about its inputs."""

    before: fx.GraphModule
    after: fx.GraphModule
    roles: tuple[Role, ...]
    num_attention: int


class _Seen(Exception):
    """Raised to end a compilation once its graph was captured."""


@functools.cache
def capture(name: str) -> Captured:
    """Return the packed graph of a model of MODELS in float32, once per process, without certifying or compiling it.

    If ranks share the model, it is the graph of a rank's share, not that of the whole model, which is traced first for
    its digest.
    """
    seen: list[fx.GraphModule] = []
    certified: list[tuple[Any, ...]] = []

    def rewrite_seen(gm: fx.GraphModule) -> fx.GraphModule:
        seen.append(copied(gm))
        return rewrite(gm)

    def stop(self: backend.Backend, gm: fx.GraphModule, roles: Any) -> None:
        certified.append((self, gm, roles))
        raise _Seen

    model_type, _, shared = name.partition(" of ")
    with (
        mock.patch.object(program_source, "find_repeats", return_value=None),  # the whole model's graph
        _two_ranks() if shared else contextlib.nullcontext() as ranks,
        mock.patch.object(program_source, "certify_batches"),
        mock.patch.object(program_source.ProgramSource, "digest", return_value=("", {})),
        mock.patch.object(TensorParallel, "require_equal"),
        mock.patch.object(backend, "rewrite", rewrite_seen),
        mock.patch.object(backend.Backend, "_certify", stop),
    ):
        try:
            lowering.lower(random_model(model_type, torch.float32, **MODELS[name]), NUMERICS, 256, ranks)
        except Exception as error:
            if not certified:
                raise error
    (before,), ((chosen, after, roles),) = seen, certified
    in_order = tuple(roles[node.name] for node in after.graph.find_nodes(op="placeholder"))
    return Captured(before, after, in_order, chosen.expects.attention)


@contextlib.contextmanager
def _two_ranks() -> Iterator[TensorParallel]:
    """Return the first of two ranks; its collectives return without moving data."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield TensorParallel(size=2, rank=0, group=dist.group.WORLD.group_name)
    finally:
        dist.destroy_process_group()


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy whose nodes may be changed; their values stay shared."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return fx.GraphModule(gm, graph)


def offenders_of(gm: fx.GraphModule, captured: Captured) -> tuple[str, ...]:
    """Return the operations that the certificate refuses; () if it certifies the graph."""
    inputs = gm.graph.find_nodes(op="placeholder")
    roles = {node.name: role for node, role in zip(inputs, captured.roles, strict=True)}
    try:
        certify(gm.graph, roles, NUMERICS, captured.num_attention)
    except UncertifiedOp as refused:
        return refused.offenders
    return ()


def candidates(gm: fx.GraphModule) -> list[fx.Node]:
    """Return values [..., rows, ..., F] with a reader: rows of tokens or of logits, and 4 or more features last."""
    return [node for node in gm.graph.nodes if _holds_rows(node)]


def _holds_rows(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, torch.Tensor) or not node.users:
        return False
    *sizes, features = shape_of(node)
    symbols = [size for size in sizes if size.free_symbols]
    static = not features.free_symbols and int(features) >= 4 and int(features) % 4 == 0
    return value.dtype is torch.float32 and static and len(symbols) == 1 and symbols[0].is_Symbol


class Planter:
    """Adds operations after a value of a graph, then makes all readers of the value read the last of them.

    Attributes:
        x: the value. rows: its dimension of rows. count: the number of these rows, a node.
    """

    def __init__(self, gm: fx.GraphModule, at: fx.Node, name: str) -> None:
        self.graph, self.x, self.name = gm.graph, at, name
        self._next = at.next
        self._readers = list(at.users)
        (self.rows,) = (dim for dim, size in enumerate(shape_of(at)) if size.free_symbols)
        self.features = int(shape_of(at)[-1])
        self.mode: FakeTensorMode = at.meta["val"].fake_mode
        self.count = self.add(aten.sym_size.int, at, self.rows, value=at.meta["val"].shape[self.rows])

    def add(self, target: Callable[..., Any], *args: Any, value: Any = None, **kwargs: Any) -> fx.Node:
        """Append an operation; ``value`` is its fake result if computing it would need data."""
        with self.graph.inserting_before(self._next):
            node = self.graph.call_function(target, args, kwargs)
        if value is None:
            given = fx.map_arg((args, kwargs), lambda arg: arg.meta["val"])
            # An operation's checks of its operands must not fix an extent of the captured graph.
            with self.mode, mock.patch.object(self.mode.shape_env, "_set_replacement"):
                value = target(*given[0], **given[1])
        node.meta = {"val": value, "stack_trace": f'  File "planted.py", line 1, in {self.name}\n    x\n'}
        return node

    def part(self, node: fx.Node, place: int) -> fx.Node:
        """Return one result of several."""
        return self.add(operator.getitem, node, place)

    def finish(self, result: fx.Node) -> None:
        """Make all readers of ``x`` read x + result, if they have one shape, or the broadcast."""
        if result is not self.x:
            total = self.add(aten.add.Tensor, self.x, result)
            assert shape_of(total) == shape_of(self.x), (shape_of(total), shape_of(self.x))
            for reader in self._readers:
                reader.replace_input_with(self.x, total)
