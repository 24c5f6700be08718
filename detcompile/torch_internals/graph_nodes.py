"""Data that torch attaches to nodes of its graphs, and how graphs call operations that write into arguments."""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from traceback import FrameSummary
from typing import Any

import torch
from torch import fx

NAMES = {
    "BASES": "The keyword of FUNCTIONALIZED for the tensors that are written. Without it: the proof does not see "
    "which caches an operation writes.",
    "FUNCTIONALIZED": "Calls an operation that writes into its arguments, and returns these as results. Without "
    "it: a graph that writes KV caches cannot be certified.",
}

FUNCTIONALIZED: Any = torch.ops.higher_order.auto_functionalized_v2
BASES = "_all_bases"
FOLDER = f"{Path(torch.__file__).parent}{os.sep}"  # the separator leaves torchvision out
FRAME = re.compile(r'^\s*File "(.+)", line (\d+), in ([^,\n]+)', re.MULTILINE)
CODE_NAME = re.compile(r"^forward_[0-9a-f]+$")  # passes.tracing.with_fresh_code


def base_index(argument: str) -> str:
    """Return the keyword of FUNCTIONALIZED with the index in BASES of an operation's argument.

    Without it: see BASES.
    """
    return f"_{argument}_base_index"


def expression_of(size: torch.SymInt | torch.SymFloat | torch.SymBool) -> Any:
    """Return the sympy expression of a symbolic number.

    Without it: the proof cannot tell which extents are those of rows.
    """
    return size.node.expr


def first_value(size: torch.SymInt) -> int | None:
    """Return the value that a symbol had in the trace; None if it is unknown.

    Without it: arguments with different numbers of rows are taken for one batch.
    """
    hint: int | None = size.node.hint
    return hint


def traced_value(node: fx.Node) -> Any:
    """Return the fake value of a node of Dynamo's graph, or None.

    Without it: inputs of a graph have no role in the proof.
    """
    return node.meta.get("example_value")


def module_stack(node: fx.Node) -> list[tuple[str, Any]]:
    """Return path and class of the modules that a node comes from, outermost first.

    Without it: a certificate and a refusal do not name the layer.
    """
    return list((node.meta.get("nn_module_stack") or {}).values())


def source_frames(node: fx.Node) -> list[FrameSummary]:
    """Return the Python frames that a node comes from, outermost first.

    Without it: a certificate and a refusal do not name the line of source.
    """
    frames = FRAME.findall(node.meta.get("stack_trace") or "")
    return [FrameSummary(file, int(line), name.strip(), lookup_line=False) for file, line, name in frames]


def frame_text(frame: FrameSummary) -> str:
    """Return "file:line in function" of a frame.

    Without it: see ``source_frames``.
    """
    name = "forward" if CODE_NAME.match(frame.name) else frame.name
    return f"{Path(frame.filename).name}:{frame.lineno} in {name}"


def innermost_model_frame(frames: Iterable[FrameSummary]) -> str:
    """Return the text of the innermost frame outside torch, or "".

    Without it: a message names a line of torch instead of the model's.
    """
    outside = [frame for frame in frames if not frame.filename.startswith(FOLDER)]
    return frame_text(outside[-1]) if outside else ""


def set_source_trace(node: fx.Node, origin: fx.Node) -> None:
    """Copy the Python frames of another node, for a node that a pass adds.

    Without it: see ``source_frames``.
    """
    node.meta["stack_trace"] = origin.meta.get("stack_trace", "")


def forget_eager_inputs(node: fx.Node) -> None:
    """Drop the values that a node's arguments had in the trace, after a pass has replaced the arguments.

    Without it: Inductor lays out the arguments of a new operation like those of the old one.
    """
    node.meta.pop("eager_input_vals", None)


def mark_user_outputs(output: fx.Node, count: int) -> None:
    """Tell Inductor that callers see all outputs of a graph, so that it keeps their strides.

    Without it: a region's outputs have other strides than the next region was compiled for.
    """
    output.meta["user_visible_output_idxs"] = list(range(count))
