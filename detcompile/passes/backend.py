"""The torch.compile backend: rewrite, certify, then lower through Inductor.

torch.compile(model, backend="detcompile")              any module, or
torch.compile(model, backend=Backend(numerics))         to keep the certificate
"""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner

from detcompile.errors import DetcompileError, InvalidInput, UncertifiedOp, UnsupportedModel
from detcompile.orders.numerics import Numerics
from detcompile.passes.calls import GRAPH_BREAKS, Call, current_call, reporting
from detcompile.passes.graphs import sympy_size
from detcompile.passes.pipeline import ROUNDING, GraphPass, decompositions, pinned_codegen, rewrite
from detcompile.passes.programs.canonical_form import program_digest
from detcompile.passes.programs.direct_calls import call_directly
from detcompile.passes.programs.plain import run_plainly
from detcompile.passes.proof.certificate import Certificate, Role, certify
from detcompile.passes.rewrites.collectives import pin_collectives
from detcompile.passes.rewrites.composites import take_apart
from detcompile.passes.rewrites.gates import fuse_gated_products
from detcompile.passes.rewrites.merged_linears import fuse_siblings, joined, lift_weights
from detcompile.passes.traced_call import TracedCall
from detcompile.templates.cpp_dispatch import direct_ops
from detcompile.templates.cpu.fp_mode import in_float_mode

__all__ = ["Backend", "Program", "cause", "detcompile_backend"]

COMPARISONS = (operator.eq, operator.ge, operator.gt, operator.le, operator.lt, operator.ne)
Compiled = Callable[..., Any]


class Program(NamedTuple):
    """A compiled graph, with the fake value and the traced argument of each of its inputs."""

    run: Compiled  # the graph's inputs in order, with `joined` in place of those at its positions -> its outputs
    values: list[Any]  # fake tensors and SymInts
    inputs: list[Any]  # the very tensors of the traced call; parameters and buffers are the model's own
    roles: list[Role]
    joined: Mapping[int, torch.Tensor]  # by position: the concatenations that stand in for single weights
    checked: frozenset[int] = frozenset()  # positions of extents that are compared with numbers, and read by nobody


class Backend:
    """Compiles Dynamo graphs and keeps the certificate of each.

    Args:
        numerics: the declared orders.
        roles_of: the Role of a tensor input from its name and fake value in Dynamo's graph. Default: what the caller
            gives holds a batch in its first dimension, which is made symbolic, and rows in every other symbolic one;
            what the compiled module holds are weights; and every output has the batch in its first dimension.
        expected_attention: attention calls a causal LM makes; None for any other module.
        certify_only: run the certified graph as it is, without Inductor (to trace, not to serve).
        lower: what compiles the certified graph.
        expected_recurrences: its calls that carry a state from token to token.
        join_weights: linears of one input share a product: their weights become views of one tensor, and have to
            stay so.
        graph_breaks: "raise", or "warn" where torch did not make one graph of a whole call.
    """

    def __init__(
        self,
        numerics: Numerics,
        roles_of: Callable[[str, torch.Tensor], Role] | None = None,
        expected_attention: int | None = None,
        certify_only: bool = False,
        join_weights: bool = False,
        lower: Callable[..., Compiled] = compile_fx_inner,
        expected_recurrences: int = 0,
        graph_breaks: str = "raise",
    ) -> None:
        if graph_breaks not in GRAPH_BREAKS:
            raise InvalidInput(f"graph_breaks={graph_breaks!r}: it is one of {', '.join(map(repr, GRAPH_BREAKS))}")
        self.numerics = numerics
        self.roles_of = roles_of
        self.expected_attention = expected_attention
        self.expected_recurrences = expected_recurrences
        self.certify_only = certify_only
        self.join_weights = join_weights
        self.lower = lower
        self.certificates: list[Certificate] = []
        self.programs: list[Program] = []
        self.name_inputs: Callable[[Sequence[Any]], list[str]] | None = None  # then each graph's digest is kept
        self.digests: list[str] = []
        self.graph_breaks = graph_breaks
        self.backend_ctx_ctor = self.around_calls({})  # where torch._dynamo.optimize is called with this object itself

    def around_calls(self, options: Mapping[str, Any]) -> Callable[[], Call]:
        """What torch.compile enters around each call."""
        return functools.partial(Call, self.graph_breaks, self.roles_of is None)

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Compiled:
        if torch.is_grad_enabled() and any(getattr(given, "requires_grad", False) for given in example_inputs):
            raise UnsupportedModel("the templates have no gradient: call the compiled module under torch.no_grad()")
        traced = TracedCall(call.owner if (call := current_call()) is not None else None)
        _refuse(traced.left_behind(), "the module keeps state from call to call, so that a row follows earlier batches")
        if self.roles_of is None:
            _refuse(traced.identified(), "the module looks at more of its arguments than their values")
        roles = [self._role(node, traced) for node in gm.graph.find_nodes(op="placeholder")]
        if self.roles_of is None:
            _join_batches(gm, roles)
        checked = _only_checked(gm)
        take_apart(gm, self.numerics.kv_chunk)
        named: dict[str, Role] = {}
        settings = {
            **ROUNDING,
            "joint_custom_pre_pass": GraphPass(functools.partial(self._rewrite, example_inputs), repr(self.numerics)),
            "post_grad_custom_post_pass": self._post_grad(named, example_inputs),
        }

        groups: list[tuple[int, ...]] = []

        def inner(graph_module: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Compiled:
            named.update(_named(graph_module, roles))
            if self.join_weights:
                weights = {i for i, role in enumerate(roles) if role.kind == "weight"}
                groups.extend(lift_weights(fuse_gated_products(fuse_siblings(graph_module)), weights))
                inputs = _with_joined(graph_module, inputs, groups)
            if self.roles_of is None:
                _refuse(traced.splits(), "the module looks at the number of rows")  # torch's decompositions may too
            # Here and again after Inductor's own rewrites: on a hit of its cache only this one runs.
            self.certificates.append(self._certify(graph_module, named))
            if self.certify_only:
                return run_plainly(graph_module)
            return self.lower(graph_module, inputs, **kwargs)

        with pinned_codegen(), functorch_config.patch(enable_autograd_cache=False):
            run = compile_fx(
                gm, list(example_inputs), inner_compile=inner, config_patches=settings, decompositions=decompositions()
            )
        values = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
        wide = {positions[0]: joined([example_inputs[i] for i in positions]) for positions in groups}
        run = _in_float_mode(run, example_inputs)
        self.programs.append(Program(run, values, list(example_inputs), roles, wide, checked))
        return reporting(_fed(run, wide))

    def _role(self, node: fx.Node, traced: TracedCall) -> Role:
        value = node.meta.get("example_value")
        if not isinstance(value, torch.Tensor):
            return Role("weight")
        return self.roles_of(str(node.target), value) if self.roles_of else role_by_source(node, value, traced)

    def _post_grad(self, named: Mapping[str, Role], inputs: Sequence[Any]) -> GraphPass:
        """What runs behind Inductor's own rewrites, unless its cache has the graph; that then finds what it calls."""
        devices = {given.device.type for given in inputs if isinstance(given, torch.Tensor)}
        # torch's proxy executor calls the operations of a package, and knows these by their first names
        direct = direct_ops() if self.lower is compile_fx_inner and devices == {"cpu"} else {}

        def finish(gm: fx.GraphModule) -> None:
            self._certify(gm, named)
            call_directly(gm, direct)

        return GraphPass(finish, f"{self.numerics!r}, {len(direct)} direct")

    def _rewrite(self, inputs: Sequence[Any], gm: fx.GraphModule) -> fx.GraphModule:
        if self.name_inputs is not None:
            self.digests.append(program_digest(gm, self.name_inputs(inputs)))
        return rewrite(pin_collectives(gm, self.numerics))

    def _certify(self, gm: fx.GraphModule, named: Mapping[str, Role]) -> Certificate:
        expected = (self.expected_attention, self.expected_recurrences)
        return certify(gm.graph, named, self.numerics, *expected, leading="batch" if self.roles_of is None else None)


def _only_checked(gm: fx.GraphModule) -> frozenset[int]:
    return frozenset(
        position
        for position, node in enumerate(gm.graph.find_nodes(op="placeholder"))
        if all(user.target in COMPARISONS for user in node.users)
    )


def _named(gm: fx.GraphModule, roles: Sequence[Role]) -> dict[str, Role]:
    inputs = gm.graph.find_nodes(op="placeholder")
    assert len(inputs) == len(roles), f"{len(roles)} inputs were traced, the graph has {len(inputs)}"
    return {node.name: role for node, role in zip(inputs, roles, strict=True)}


def _with_joined(gm: fx.GraphModule, inputs: Sequence[Any], groups: Sequence[tuple[int, ...]]) -> list[Any]:
    """The fake inputs of the graph, with the concatenations among them."""
    values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    wide = {positions[0] for positions in groups}
    return [values[i] if i in wide else given for i, given in enumerate(inputs)]


def _fed(run: Compiled, weights: Mapping[int, torch.Tensor]) -> Compiled:
    """``run`` with these tensors in place of its inputs at these positions."""
    if not weights:
        return run

    def fed(*given: Any) -> Any:
        return run(*(weights.get(i, value) for i, value in enumerate(given)))

    return fed


def _in_float_mode(run: Compiled, inputs: Sequence[Any]) -> Compiled:
    """``run`` in the standard mode, in all threads that its kernels were compiled for."""
    devices = {given.device for given in inputs if isinstance(given, torch.Tensor)}
    if any(device.type != "cpu" for device in devices):
        return run
    return in_float_mode(run, torch.device("cpu"), torch.get_num_threads())


def role_by_source(node: fx.Node, value: torch.Tensor, traced: TracedCall) -> Role:
    """What the compiled module holds are weights; of an argument the first and every symbolic dimension holds rows.

    Raises:
        UncertifiedOp: an argument whose first dimension is a number, where a count would be seen as a constant.
    """
    given = node.meta.get("grapharg")
    source = getattr(given, "source", None)
    name = source.name if source is not None else str(node.target)
    is_argument = traced.is_argument(source) if source is not None else None
    call = current_call()
    if is_argument is None:
        _refuse([f"{name}: neither an argument of the call nor held by the module"], "an input of unknown origin")
    if not is_argument:
        if call is not None and any(given.example is argument for argument in call.arguments):
            _refuse([f"{name}: held by the module, and an argument of the call"], "an input of two origins")
        return Role("weight")
    rows = {d: f"dim {d}" for d, size in enumerate(value.shape) if sympy_size(size).free_symbols}
    names = {0: "batch", 1: "tokens"}
    if value.dim() and 0 not in rows:
        if call is not None and call.graph_breaks == "warn" and value.shape[0] > 1:  # a later part of a broken graph
            return Role("rows", {0: "batch"} | {d: names.get(d, name) for d, name in rows.items()})
        _refuse(
            [*traced.splits(), f"{name} has {int(value.shape[0])} rows in every call of this graph"],
            "the number of rows is fixed, so that a value may follow it. Where no code of the module looks at it, "
            "torch._dynamo.decorators.mark_unbacked(tensor, 0) before the call makes it unknown to torch's own code "
            "too; tensors inside objects other than lists, tuples and dicts have to be marked in any case",
        )
    return Role("rows", {d: names.get(d, name) for d, name in rows.items()})


def _join_batches(gm: fx.GraphModule, roles: Sequence[Role]) -> None:
    """Guard that arguments with as many rows as each other always have: they hold one batch, a mask and its tokens."""
    sizes: dict[int, torch.SymInt] = {}  # by the number of rows
    for node, role in zip(gm.graph.find_nodes(op="placeholder"), roles, strict=True):
        if (role.rows or {}).get(0) == "batch" and node.meta["example_value"].shape[0].node.hint is not None:
            size = node.meta["example_value"].shape[0]
            assert sizes.setdefault(size.node.hint, size) == size  # asked of a symbol, this becomes the guard


def _refuse(lines: Sequence[str], why: str) -> None:
    if lines:
        listed = "\n  ".join(lines)
        raise UncertifiedOp(f"{why}:\n  {listed}\nNothing was compiled.", tuple(lines))


class NamedBackend:
    """The backend by name: ``options`` may hold "numerics" and "graph_breaks", as Backend takes them."""

    __name__ = "detcompile"

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Compiled:
        return _with_options(kwargs.get("options") or {})(gm, example_inputs)

    def around_calls(self, options: Mapping[str, Any]) -> Callable[[], Call]:
        return _with_options(options).around_calls({})


def _with_options(options: Mapping[str, Any]) -> Backend:
    unknown = options.keys() - {"numerics", "graph_breaks"}
    if unknown:
        raise InvalidInput(f"options={dict(options)!r}: {', '.join(sorted(unknown))} is none of numerics, graph_breaks")
    return Backend(**{"numerics": Numerics(), **options})


detcompile_backend = NamedBackend()


def cause(error: BaseException) -> DetcompileError | None:
    """The error of ours inside the exceptions that Dynamo and Inductor wrap around it."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, DetcompileError):
            return seen
        seen = getattr(seen, "inner_exception", None) or seen.__cause__ or seen.__context__
    return None
