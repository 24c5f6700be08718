"""WholeModel: what is known of a whole model before ranks take shares of it, and stages their layers."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from detcompile.config import programs_kept
from detcompile.digests import weights_digest
from detcompile.orders.numerics import Numerics
from detcompile.parallel import TensorParallel
from detcompile.passes.capture import PackedForward
from detcompile.passes.layers.structure import view_of
from detcompile.passes.programs.canonical_form import never_run
from detcompile.passes.sharding.shard import pin_row_parallel
from detcompile.passes.tracing import Seen, find_repeats, trace_packed
from detcompile.passes.warm import programs
from detcompile.passes.warm.program_key import ObservedRun, label_of, observe_run, program_key
from detcompile.progress import stage
from detcompile.weights import named_weights, weight_digests

__all__ = ["WholeModel", "read_whole"]


class WholeModel(NamedTuple):
    """What is known of a whole model before ranks take shares of it, and stages their layers."""

    program: str  # digest of the program that one rank would run
    weights: Mapping[str, str]  # digests


def read_whole(
    model: PreTrainedModel,
    numerics: Numerics,
    max_context: int,
    seen: Seen,
    ranks: TensorParallel | None,
    on_read: Callable[[int, int], None] | None,
) -> WholeModel:
    """Read the whole model, which has to be the same on every rank.

    It is compared before the first collective of the model: ranks that differ would wait for each other.
    """
    with stage("read the weights" if ranks is None else "compare the ranks' weights"):
        digests = weight_digests(named_weights(model), on_read)
        declared = {"numerics": str(numerics), "max_context": str(max_context)}
        if ranks is not None:
            ranks.require_equal({"weights": weights_digest(digests), **declared})
    with stage("capture the whole program") as capturing:
        view = view_of(model)
        pin_row_parallel(view, numerics)
        key, observed = None, observe_run(view)
        if programs_kept():
            key = program_key(view, numerics, max_context, seen, observed, use="the digest of the whole")
        known = None if key is None else programs.read(key.digest)
        if known is not None:
            capturing.becomes("take the whole program's digest")
            return WholeModel(known.decode(), digests)
        program, constants = _whole_program(view, numerics, seen, observed)
    if key is not None and not constants:
        programs.write(key.digest, program.encode(), label_of(model, max_context, program, key))
    return WholeModel(program, digests | weight_digests(constants))


def _whole_program(
    view: PreTrainedModel, numerics: Numerics, seen: Seen, observed: ObservedRun | None
) -> tuple[str, Mapping[str, Tensor]]:
    """The digest of the program that one rank would run, and its constants."""
    repeats = None if seen.states else find_repeats(view, observed and observed.shown)
    traced = trace_packed(PackedForward(view), numerics, seen, never_run, join_weights=False, repeats=repeats)
    return traced.digest, traced.constants
