"""The torch.compile backend: rewrite, certify, then lower through Inductor.

torch.compile(model, backend=Backend(numerics)) keeps the certificate; torch.compile(model, backend="detcompile") is the
same by name, for any module.
"""

import contextlib
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from detcompile.errors import InvalidInput, UnsupportedModel
from detcompile.orders.numerics import Numerics
from detcompile.passes.calls import GRAPH_BREAKS, Call, current_call, reporting
from detcompile.passes.layers.compilation import Layered, compile_layers, inputs_of_all_layers
from detcompile.passes.layers.program import LayeredCode, LayerInputs, Run, of_one_graph
from detcompile.passes.layers.regions import Region, take_marks
from detcompile.passes.pipeline import ROUNDING, GraphPass, decompositions, pinned_codegen, read_extents, rewrite
from detcompile.passes.programs.aot import call_directly, run_plainly
from detcompile.passes.programs.binding import CompiledGraph
from detcompile.passes.programs.canonical_form import never_run, program_digest
from detcompile.passes.programs.exact_form import exact_program_digest
from detcompile.passes.proof.certificate import Certificate, certify
from detcompile.passes.proof.context import Role
from detcompile.passes.proof.exact import require_exact_code
from detcompile.passes.release_probe import require_release
from detcompile.passes.rewrites.collectives import order_collectives, pin_collectives
from detcompile.passes.rewrites.composites import take_apart
from detcompile.passes.rewrites.exact_functions import pin_exact_functions
from detcompile.passes.rewrites.exact_fusion import fuse_exact_linears
from detcompile.passes.rewrites.matmuls import fuse_gated_products
from detcompile.passes.rewrites.merged_linears import fed, joined, lift_weights, merge_linears
from detcompile.passes.roles import join_batches, refuse, role_by_source
from detcompile.templates.cpp_dispatch import direct_ops
from detcompile.templates.cpu.fp_mode import in_float_mode
from detcompile.torch_internals.compiled_calls import enter_around_calls
from detcompile.torch_internals.dynamo import register_backend
from detcompile.torch_internals.graph_nodes import traced_value
from detcompile.torch_internals.inductor import compile_fx, compile_fx_inner, functorch_config, observing_operations
from detcompile.torch_internals.inductor_settings import inductor_config
from detcompile.torch_internals.traced_call import TracedCall

COMPARISONS = (operator.eq, operator.ge, operator.gt, operator.le, operator.lt, operator.ne)
Compiled = Callable[..., Any]


class Expected(NamedTuple):
    """Calls that the graph of a causal LM holds, as a run of the model has shown."""

    attention: int
    recurrences: int = 0  # calls that carry a state from token to token


class Backend:
    """Compile Dynamo graphs and keep the certificate of each.

    Args:
        numerics: the declared orders.
        roles_of: returns the Role of a tensor input from its name and fake value in Dynamo's graph. Default: arguments
            of the call hold a batch in their first dimension, which becomes symbolic, and rows in every other symbolic
            dimension. Tensors of the compiled module are weights. The first dimension of every output is the batch.
        expects: calls that a causal LM makes; None for any other module.
        compile_graph: compiles the certified graph, with Inductor's signature. Default: Inductor.
        certify_only: run the certified graph without Inductor, as ``compile_graph=run_plainly`` does.
        join_weights: linears with the same input share a product. Their weights become views of one tensor, and must
            stay views.
        name_inputs: returns names of a graph's traced inputs. If given, the digest of each graph is kept.
        graph_breaks: "raise" or "warn" if torch does not make one graph of a whole call.
        layers: the graph holds a model's first layers, marked by `mark_layers`, and the program runs all layers.
        compile_region: compiles a certified region of such a graph; called by `compile_layers`.

    Attributes:
        certificates, programs: one per compiled graph.
        digests: one per graph, if ``name_inputs`` is given.
    """

    def __init__(
        self,
        numerics: Numerics,
        roles_of: Callable[[str, torch.Tensor], Role] | None = None,
        *,
        expects: Expected | None = None,
        compile_graph: Callable[..., Compiled] = compile_fx_inner,
        certify_only: bool = False,
        join_weights: bool = False,
        name_inputs: Callable[[Sequence[Any]], list[str]] | None = None,
        graph_breaks: str = "raise",
        layers: LayerInputs | None = None,
        compile_region: Callable[[Region, Mapping[str, Role], Certificate], Run] | None = None,
    ) -> None:
        if graph_breaks not in GRAPH_BREAKS:
            raise InvalidInput(f"graph_breaks={graph_breaks!r}: give one of {', '.join(map(repr, GRAPH_BREAKS))}")
        self.numerics = numerics
        self.roles_of = roles_of
        self.expects = expects
        self.compile_graph = run_plainly if certify_only else compile_graph
        self.join_weights = join_weights
        self.name_inputs = name_inputs
        self.graph_breaks = graph_breaks
        self.layers = layers
        self.compile_region = compile_region
        self.certificates: list[Certificate] = []
        self.programs: list[CompiledGraph] = []
        self.digests: list[str] = []
        self.backend_ctx_ctor = self.around_calls({})  # for torch._dynamo.optimize(this object)

    def around_calls(self, options: Mapping[str, Any]) -> Callable[[], Call]:
        """Return the context that torch.compile enters around each call."""
        return functools.partial(Call, self.graph_breaks, self.roles_of is None)

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Compiled:
        if self.roles_of is None:  # torch.compile; capture has checked it for models
            require_release()
        if torch.is_grad_enabled() and any(getattr(given, "requires_grad", False) for given in example_inputs):
            raise UnsupportedModel("the templates have no gradient: call the compiled module under torch.no_grad()")
        for given in example_inputs:  # torch.compile traces again if a plain tensor becomes a negated view
            if isinstance(given, torch.Tensor) and given.is_neg():
                raise UnsupportedModel(
                    f"a tensor {list(given.shape)} is a negated view, such as z.conj().imag, and Inductor's code would"
                    " read it without the sign: use its resolve_neg()"
                )
        if inductor_config.freezing:
            raise UnsupportedModel(
                "torch._inductor.config.freezing (TORCHINDUCTOR_FREEZING=1) makes constants of weights, which have to "
                "stay inputs of the graph: set it to False"
            )
        traced = TracedCall(None) if (call := current_call()) is None else TracedCall(call.owner, call.given)
        roles = self._roles(gm, traced)
        checked = _only_checked(gm)
        take_apart(gm, self.numerics.kv_chunk)
        compilation = _Compilation(self, traced, roles, list(example_inputs))
        checked_code = observing_operations(require_exact_code) if self.numerics.is_exact else contextlib.nullcontext()
        with pinned_codegen(), checked_code, functorch_config.patch(enable_autograd_cache=False):
            run = compile_fx(
                gm,
                list(example_inputs),
                inner_compile=compilation.lower,
                config_patches=compilation.settings(),
                decompositions=decompositions(),
            )
        values = [traced_value(node) for node in gm.graph.find_nodes(op="placeholder")]
        if compilation.layered is not None:
            self.programs.append(compilation.over_all_layers(values, checked))
            return run
        code = compilation.code()
        wide = {position: joined(parts) for position, parts in code.parts.items()}
        run = _in_float_mode(run, example_inputs)
        self.programs.append(CompiledGraph(run, values, list(example_inputs), roles, wide, checked, code))
        return reporting(fed(run, wide), _held(roles, example_inputs))

    def _roles(self, gm: fx.GraphModule, traced: TracedCall) -> list[Role]:
        """Return roles of the graph's inputs, in order. Refuse state that outlives the call, and identity checks."""
        refuse(traced.left_behind(), "the module keeps state from call to call, so that a row follows earlier batches")
        if self.roles_of is None:
            refuse(traced.identified(), "the module looks at more of its arguments than their values")
        roles = [self._role(node, traced) for node in gm.graph.find_nodes(op="placeholder")]
        if self.roles_of is None:
            refuse(
                traced.numbers(),
                "numbers among the arguments: rows would meet through a number that was made of the batch. Give a "
                "tensor with a value for each row, or one without dimensions if all rows share it; or have the "
                "compiled callable hold the number, in a closure or an attribute",
            )
            join_batches(gm, roles)
        return roles

    def _role(self, node: fx.Node, traced: TracedCall) -> Role:
        value = traced_value(node)
        if not isinstance(value, torch.Tensor):
            return Role("weight")
        return self.roles_of(str(node.target), value) if self.roles_of else role_by_source(node, value, traced)

    def _certify(
        self, gm: fx.GraphModule, named: Mapping[str, Role], states: dict[fx.Node, Any] | None = None
    ) -> Certificate:
        attention, recurrences = (None, 0) if self.expects is None else self.expects
        leading = "batch" if self.roles_of is None else None
        return certify(gm.graph, named, self.numerics, attention, recurrences, leading, states)


class _Compilation:
    """One graph on its way through compile_fx, which calls these methods in order.

    rewrite     runs our passes on the ATen graph, before Inductor's rewrites
    lower       joins products, certifies the graph, then calls ``compile_graph``
    finish      certifies the graph again after Inductor's rewrites, unless Inductor's cache has the code
    """

    def __init__(self, backend: Backend, traced: TracedCall, roles: list[Role], inputs: list[Any]) -> None:
        self._backend = backend
        self._traced = traced
        self._roles = roles
        self._inputs = inputs
        self._named: dict[str, Role] = {}  # by input names of the lowered graph
        self._groups: list[tuple[int, ...]] = []  # positions of weights that were joined
        self.layered: Layered | None = None
        self._graph: Any = None  # its code, if it is not layered

    def settings(self) -> dict[str, Any]:
        """Return Inductor's settings: rounding, and our hooks."""
        numerics, direct = repr(self._backend.numerics), self._direct_ops()
        finish = functools.partial(self.finish, direct)
        return {
            **ROUNDING,
            "joint_custom_pre_pass": GraphPass(self.rewrite, numerics),
            "post_grad_custom_post_pass": GraphPass(finish, f"{numerics}, {len(direct)} direct"),
        }

    def rewrite(self, gm: fx.GraphModule) -> fx.GraphModule:
        backend = self._backend
        repeats = None if backend.layers is None else backend.layers.repeats
        if backend.numerics.is_exact:
            order_collectives(pin_exact_functions(gm, backend.numerics.arithmetic))
        if backend.name_inputs is not None:
            digest = exact_program_digest if backend.numerics.is_exact else program_digest
            backend.digests.append(digest(gm, backend.name_inputs(self._inputs), repeats))
        return rewrite(pin_collectives(gm, backend.numerics))

    def lower(self, gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Compiled:
        backend = self._backend
        self._named.update(_named(gm, self._roles))
        if backend.join_weights:
            weights = {i for i, role in enumerate(self._roles) if role.kind == "weight"}
            self._groups.extend(lift_weights(fuse_gated_products(merge_linears(gm)), weights))
            inputs = _with_joined(gm, inputs, self._groups)
        if backend.numerics.is_exact:
            fuse_exact_linears(gm)
        if backend.roles_of is None:
            refuse(self._traced.splits(), "the module looks at the number of rows")  # torch's decompositions may too
        if backend.layers is not None:
            self.layered = self._lower_layers(gm, backend.layers, kwargs)
            backend.certificates.append(self.layered.certificate)
            return never_run()
        # Certified here and again after Inductor's rewrites. On a hit in its cache, only this one runs.
        backend.certificates.append(backend._certify(gm, self._named))
        self._graph = backend.compile_graph(gm, inputs, **kwargs)
        return self._graph

    def _lower_layers(self, gm: fx.GraphModule, owners: LayerInputs, settings: Mapping[str, Any]) -> Layered:
        backend, direct, rows = self._backend, self._direct_ops(), take_marks(gm)
        owners.require_joinable([[self._inputs[position] for position in positions] for positions in self._groups])
        states: dict[fx.Node, Any] = {}
        proved = backend._certify(gm, self._named, states), states
        static = {*settings.get("static_input_idxs", ())}

        def compile_region(region: Region, roles: Mapping[str, Role], certificate: Certificate) -> Compiled:
            counts = certificate.counts
            expected = Expected(counts.get("attention", 0), counts.get("recurrence", 0))
            nodes = region.gm.graph.find_nodes(op="placeholder")
            first = len(nodes) - len(region.given)
            kept = [first + place for place, position in enumerate(region.given) if position in static]

            def finish(gm: fx.GraphModule) -> None:
                certify(gm.graph, roles, backend.numerics, *expected)
                read_extents(call_directly(gm, direct))

            fakes = [node.meta["val"] for node in nodes]
            key = f"{backend.numerics!r}, {len(direct)} direct, {expected}"
            with inductor_config.patch(post_grad_custom_post_pass=GraphPass(finish, key)):
                return backend.compile_graph(region.gm, fakes, **{**settings, "static_input_idxs": kept})

        make = backend.compile_region or compile_region
        return compile_layers(gm, rows, self._inputs, owners, self._named, proved, backend.numerics, make)

    def over_all_layers(self, values: Sequence[Any], checked: frozenset[int]) -> CompiledGraph:
        """Return the program over all layers. Its inputs are those of the graph, then those of the other layers."""
        assert self.layered is not None and self._backend.layers is not None
        run = self.layered.run
        sources = run.unrolled.sources
        inputs, wide, parts = inputs_of_all_layers(run.unrolled, self._inputs, self._groups, self._backend.layers)
        roles = [self._roles[source] for source in sources]
        fakes = [values[source] for source in sources]
        rows = self.layered.rows
        if rows is not None:
            inputs, fakes, roles = [*inputs, rows.example], [*fakes, rows.value], [*roles, Role("rows", {1: "tokens"})]
        code = LayeredCode(run, parts, None if rows is None else rows.example, self.layered.stage)
        checked = frozenset(position for position, source in enumerate(sources) if source in checked)
        return CompiledGraph(_in_float_mode(run, self._inputs), fakes, inputs, roles, wide, checked, code)

    def finish(self, direct: Mapping[Any, Any], gm: fx.GraphModule) -> None:
        self._backend._certify(gm, self._named)
        read_extents(call_directly(gm, direct))

    def code(self) -> LayeredCode:
        """Return the code of a program that is a single graph."""
        return of_one_graph(self._graph, self._inputs, self._groups)

    def _direct_ops(self) -> Mapping[Any, Any]:
        """Return the operations that a CPU graph calls without going through Python.

        AOTInductor's packages keep the registered operations: torch's proxy executor calls them by name.
        """
        devices = {given.device.type for given in self._inputs if isinstance(given, torch.Tensor)}
        return direct_ops() if self._backend.compile_graph is compile_fx_inner and devices == {"cpu"} else {}


def _held(roles: Sequence[Role], inputs: Sequence[Any]) -> list[int]:
    """Return positions of the strided tensors that the compiled callable holds."""
    return [
        position
        for position, (role, given) in enumerate(zip(roles, inputs, strict=True))
        if role.kind == "weight" and isinstance(given, torch.Tensor) and given.layout is torch.strided
    ]


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
    """Return the fake inputs of the graph, with joined weights in place of single ones."""
    values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    wide = {positions[0] for positions in groups}
    return [values[i] if i in wide else given for i, given in enumerate(inputs)]


def _in_float_mode(run: Compiled, inputs: Sequence[Any]) -> Compiled:
    """Return ``run`` in the standard float mode, with the number of threads that its kernels were compiled for."""
    devices = {given.device for given in inputs if isinstance(given, torch.Tensor)}
    on_cpu = all(device.type == "cpu" for device in devices)
    return in_float_mode(run, torch.device("cpu"), torch.get_num_threads()) if on_cpu else run


enter_around_calls()


class NamedBackend:
    """The backend by name: ``options`` may hold "numerics" and "graph_breaks", as Backend takes them."""

    __name__ = "detcompile"

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        return _with_options(kwargs.get("options") or {})(gm, example_inputs)

    def around_calls(self, options: Mapping[str, Any]) -> Callable[[], Call]:
        return _with_options(options).around_calls({})


def _with_options(options: Mapping[str, Any]) -> Backend:
    unknown = options.keys() - {"numerics", "graph_breaks"}
    if unknown:
        raise InvalidInput(f"options={dict(options)!r}: {', '.join(sorted(unknown))} is none of numerics, graph_breaks")
    return Backend(**{"numerics": Numerics(), **options})


detcompile_backend = NamedBackend()
register_backend("detcompile", detcompile_backend)
