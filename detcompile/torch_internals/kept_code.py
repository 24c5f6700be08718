"""Inductor's code of a graph in a form that can be written to a file."""

import copy

from torch._inductor import config as inductor_config
from torch._inductor.output_code import CompiledFxGraph, CompiledFxGraphConstants, maybe_realign_inputs
from torch._inductor.runtime.triton_compat import triton_key
from torch._inductor.utils import BoxedBool
from torch.utils._ordered_set import OrderedSet

NAMES = {
    "CompiledFxGraph": "The type of Inductor's code of one graph. Without it: code that cannot be kept counts as code "
    "that can.",
    "triton_key": "A hash of all of Triton, 0.5 GB, in the name of each kernel in its cache. Without it: the first "
    "kernel waits for the hash.",
}


def without_code(graph: CompiledFxGraph) -> CompiledFxGraph:
    """Return a copy that can be pickled: it names its code in Inductor's cache.

    Without it: no program is kept, and every start compiles.
    """
    copied = copy.copy(graph)
    copied.prepare_for_serialization()
    copied.fx_kwargs = {}
    copied._triton_bundle = None
    return copied


def restore_code(graph: CompiledFxGraph) -> None:
    """Load the code of a copy from ``without_code``, in place.

    Its kernels are in caches, so Inductor's pool of compilers is not started. Without it: see ``without_code``.
    """
    with inductor_config.patch(compile_threads=1):
        graph.after_deserialization(CompiledFxGraphConstants())
    maybe_realign_inputs(BoxedBool(False), graph, graph.inputs_to_check, OrderedSet(graph.mutated_input_idxs))
