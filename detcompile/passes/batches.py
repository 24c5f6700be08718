"""Certify a model over a padless batch [B, T]: packing gives the batch an extent of 1, which hides batch operations.

The model's Python runs once over fake tensors of unknown extents B and T, and the graph of its operations is certified.
This takes a fifth of the time of a trace by Dynamo. If the run fails, branches on an extent or is not certified, Dynamo
traces the batch instead, and that graph decides: its refusals name lines of the model's source.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from detcompile.errors import UnsupportedModel
from detcompile.orders.numerics import Numerics
from detcompile.passes.backend import Backend, Expected
from detcompile.passes.capture import DenseForward
from detcompile.passes.layers.structure import Repeats, layers_of, view_of
from detcompile.passes.pipeline import decompositions, rewrite
from detcompile.passes.proof.certificate import Certificate, certify
from detcompile.passes.proof.context import Role
from detcompile.passes.rewrites.collectives import pin_collectives
from detcompile.passes.roles import dense_role
from detcompile.passes.tracing import trace_once
from detcompile.torch_internals.dynamo import as_if_compiling, mark_dynamic
from detcompile.torch_internals.fake_tensors import (
    FakeTensorMode,
    FunctionalTensorMode,
    dispatch_functionalize,
    enable_python_dispatcher,
    was_written,
)
from detcompile.torch_internals.symbolic_shapes import (
    DimDynamic,
    LocalSource,
    ShapeEnv,
    StatelessSymbolicContext,
    make_fx,
)

logger = logging.getLogger(__name__)
B, T = 3, 5  # no other dimension has these extents
ROWS = Role("rows", {0: "batch", 1: "tokens"})


def certify_batches(
    model: PreTrainedModel, numerics: Numerics, expected: Expected, repeats: Repeats | None = None
) -> None:
    """Prove a model over a batch of several rows.

    Args:
        repeats: layers by their structure. If given, the first layers stand for all.

    Raises:
        UncertifiedOp, UnsupportedModel: rows of the batch may meet, or the model cannot be traced over a batch.
    """
    if repeats is not None:
        model, expected = layers_of(model, range(repeats.prefix)), Expected(repeats.prefix)
    device = next(model.parameters()).device
    forward = DenseForward(view_of(model))  # a view: a run may leave state in modules
    weights = dict((*forward.named_parameters(), *forward.named_buffers()))

    def run(weights: Mapping[str, Tensor], *given: Tensor) -> Tensor:
        return torch.func.functional_call(forward, weights, given)

    try:
        certificate_of_batches(run, weights, device, numerics, expected)
    except Exception as error:  # the model's code may raise anything over fake tensors
        logger.debug("%s over a batch is traced by Dynamo: %s", type(model).__name__, error)
        _trace_batches(model, numerics, expected, device)


def certificate_of_batches(
    run: Callable[..., Tensor],
    weights: Mapping[str, Tensor],
    device: torch.device,
    numerics: Numerics,
    expected: Expected | None,
) -> Certificate:
    """Certify the operations of ``run(weights, input_ids [B, T], position_ids [B, T])`` for unknown B and T >= 2.

    Raises:
        UnsupportedModel: the code branches on B or T.
        UncertifiedOp: rows may meet.
        Exception: an error of the model's code over fake tensors.
    """
    shapes = ShapeEnv()
    fakes = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
    fakes.cache_enabled = False  # with unknown extents, computing a result is faster than looking it up
    unknown = StatelessSymbolicContext([DimDynamic.DUCK, DimDynamic.DUCK])
    ids = torch.zeros(B, T, dtype=torch.int64, device=device)
    positions = torch.arange(T, device=device).repeat(B, 1)
    given = [
        fakes.from_tensor(tensor, symbolic_context=unknown, source=LocalSource(name))
        for name, tensor in (("input_ids", ids), ("position_ids", positions))
    ]
    held = {name: fakes.from_tensor(tensor, static_shapes=True) for name, tensor in weights.items()}

    def watched(held: Mapping[str, Any], *given: Any) -> Tensor:
        output = run(held, *given)
        if any(was_written(tensor) for tensor in (*held.values(), *given)):
            raise UnsupportedModel("the model writes into its weights or what it is given")
        return output

    functional = dispatch_functionalize(watched, FunctionalTensorMode())
    with torch.no_grad(), fakes, enable_python_dispatcher(), as_if_compiling():
        gm = make_fx(functional, decomposition_table=decompositions())(held, *given)
    if shapes.guards:
        raise UnsupportedModel(f"the model branches on the extents of its batch: {shapes.guards[0].expr}")
    gm = rewrite(pin_collectives(gm, numerics))
    *others, ids_node, positions_node = gm.graph.find_nodes(op="placeholder")
    roles = {node.name: Role("weight") for node in others} | {ids_node.name: ROWS, positions_node.name: ROWS}
    attention, recurrences = (None, 0) if expected is None else expected
    return certify(gm.graph, roles, numerics, attention, recurrences)


def _trace_batches(model: PreTrainedModel, numerics: Numerics, expected: Expected, device: torch.device) -> None:
    """Trace the model over a batch with Dynamo, and certify the graph."""
    backend = Backend(numerics, dense_role, expects=expected, certify_only=True)
    input_ids = torch.zeros(B, T, dtype=torch.int64, device=device)
    position_ids = torch.arange(T, device=device).repeat(B, 1)
    for tensor in (input_ids, position_ids):
        mark_dynamic(tensor, [0, 1])
    trace_once(DenseForward(model), backend, (input_ids, position_ids))
