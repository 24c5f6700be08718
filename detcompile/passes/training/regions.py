"""Regions of a certified forward graph, each differentiated and compiled by itself, with a proof of both directions."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch import config as functorch_config
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor.compile_fx import compile_fx, compile_fx_inner

from detcompile.orders.numerics import Numerics
from detcompile.passes.graphs import sympy_size
from detcompile.passes.layers.regions import Region
from detcompile.passes.pipeline import ROUNDING, decompositions, pinned_codegen
from detcompile.passes.proof.certificate import Certificate
from detcompile.passes.proof.inputs import Role
from detcompile.passes.training.ports import is_port, to_train
from detcompile.passes.training.twins import as_templates

__all__ = ["TrainedRegion"]


class TrainedRegion:
    """One region of a forward graph, for all layers of its structure.

    Args:
        region: the graph, rewritten, and what it takes.
        roles: what its inputs hold, by name.
        certificate: the forward's proof.
    """

    def __init__(self, region: Region, roles: Mapping[str, Role], certificate: Certificate, numerics: Numerics) -> None:
        self.region, self.roles, self.certificate, self.numerics = region, roles, certificate, numerics
        self._inputs = region.gm.graph.find_nodes(op="placeholder")
        self._programs: dict[Any, Callable[..., Sequence[Tensor]]] = {}

    def sizes(self) -> dict[int, tuple[int, int]]:
        """Of each input that is a number: an input whose extent it is, and the dimension; none of what is not found."""
        found: dict[Any, tuple[int, int]] = {}
        for place, node in enumerate(self._inputs):
            if isinstance(node.meta["val"], Tensor):
                for dim, size in enumerate(node.meta["val"].shape):
                    found.setdefault(sympy_size(size), (place, dim))
        numbers = {
            place: sympy_size(node.meta["val"])
            for place, node in enumerate(self._inputs)
            if isinstance(node.meta["val"], torch.SymInt)
        }
        return {place: found[size] for place, size in numbers.items() if size in found}

    def program(self, trained: tuple[int, ...], differentiated: tuple[int, ...]) -> Callable[..., Sequence[Tensor]]:
        """Code of the region, with a gradient: its inputs, the leaf table, a port for each trained one -> its outputs.

        Args:
            trained: positions of the inputs that are trained weights.
            differentiated: positions of the inputs that are rows with a gradient.
        """
        key = trained, differentiated
        if key not in self._programs:
            self._programs[key] = self._compile(trained, differentiated)
        return self._programs[key]

    def _compile(self, trained: tuple[int, ...], differentiated: tuple[int, ...]) -> Callable[..., Sequence[Tensor]]:
        mode = detect_fake_mode([node.meta["val"] for node in self._inputs])
        assert mode is not None and mode.shape_env is not None
        with mode, mode.shape_env.ignore_fresh_unbacked_symbols():
            count = mode.shape_env.create_unbacked_symint()
            torch._check(count >= 2)
            gm = to_train(self.region.gm, trained, torch.empty(count, dtype=torch.int32), self.numerics.token_grid)
        values = []
        for position, node in enumerate(gm.graph.find_nodes(op="placeholder")):
            value = node.meta["val"]
            value = value.detach() if isinstance(value, Tensor) else value
            values.append(value.requires_grad_() if position in differentiated or is_port(node) else value)
        settings = {"enable_autograd_cache": False, "force_non_lazy_backward_lowering": True}
        with tracing(TracingContext(mode)), functorch_config.patch(settings), torch.enable_grad():
            run: Callable[..., Sequence[Tensor]] = compile_fx(
                gm, values, inner_compile=self._lower, config_patches=ROUNDING, decompositions=decompositions()
            )
        return run

    def _lower(self, gm: fx.GraphModule, inputs: Sequence[Any], **settings: Any) -> Any:
        as_templates(gm)
        with pinned_codegen():
            return compile_fx_inner(gm, inputs, **settings)
