"""Compile a model's forward ahead of time into AOTInductor's files."""

from pathlib import Path
from typing import NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from detcompile.errors import UnsupportedModel
from detcompile.orders.numerics import Numerics
from detcompile.passes.capture import PackedForward, isolated, observe_attention
from detcompile.passes.modules.recurrences import Recurrences
from detcompile.passes.programs.aot import Packaging
from detcompile.passes.programs.canonical_form import input_names, never_run
from detcompile.passes.proof.certificate import Certificate
from detcompile.passes.tracing import Seen, find_repeats, trace_packed
from detcompile.step import step_leaves
from detcompile.weights import WeightView, named_weights, views_in


class Packaged(NamedTuple):
    """A compiled model as AOTInductor's files.

    ``arguments`` lists what the library takes: an index into step.step_leaves, or the name of a weight.
    ``views`` maps the model's parameters and buffers to their places in ``weights``, by name.
    """

    files: tuple[Path, ...]
    arguments: tuple[int | str, ...]
    weights: dict[str, Tensor]
    views: dict[str, WeightView]


@isolated
def package(
    model: PreTrainedModel,
    numerics: Numerics,
    certificate: Certificate,
    recurrences: Recurrences | None,
    program: str | None,
) -> Packaged:
    """Compile the forward of a model that ``lower`` has rewritten, ahead of time.

    Args:
        certificate, recurrences: from Lowered.
        program: from Lowered; None if the model is a rank's share.

    Raises:
        UnsupportedModel: the graph differs from the compiled one.
    """
    packaging = Packaging()
    seen = Seen.of(observe_attention(model, numerics.kv_chunk, recurrences), recurrences)
    traced = trace_packed(PackedForward(model), numerics, seen, packaging)
    graph, leaves = traced.graph, step_leaves(*traced.example)
    same = _sums(traced.certificate) == _sums(certificate)
    if not same or not _same_program(model, numerics, seen, traced.digest, program):
        raise UnsupportedModel(f"{type(model).__name__} gave another graph than the compiled one: load it again")
    place = {id(leaf): index for index, leaf in enumerate(leaves)}
    names = input_names(model, leaves, graph.inputs)
    arguments: list[int | str] = []
    weights: dict[str, Tensor] = {}
    for position in packaging.kept:
        given = graph.inputs[position]
        if id(given) in place:
            arguments.append(place[id(given)])
            continue
        name = names[position] + (".joined" if position in graph.joined else "")
        weights[name] = graph.joined.get(position, given).detach()
        arguments.append(name)
    held = named_weights(model, every_name=True) | traced.constants
    return Packaged(packaging.files, tuple(arguments), weights, views_in(weights, held))


def _sums(certificate: Certificate) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return the sums of a certificate. Movements are left out: what all layers move may be moved once or per layer."""
    counts = {kind: count for kind, count in certificate.counts.items() if kind not in ("movement", "pointwise")}
    return counts, certificate.orders


def _same_program(model: PreTrainedModel, numerics: Numerics, seen: Seen, digest: str, program: str | None) -> bool:
    """Return whether a program's digest, of all layers or of the first ones, matches the model."""
    if program in (None, digest):
        return True
    repeats = None if seen.states else find_repeats(model)
    if repeats is None:
        return False
    return trace_packed(PackedForward(model), numerics, seen, never_run, repeats=repeats).digest == program
