"""ProgramSource: one program of a model, taken from the cache of kept programs or compiled and kept."""

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from detcompile.config import programs_kept
from detcompile.errors import UnsupportedModel
from detcompile.orders.numerics import Numerics
from detcompile.parallel import PipelineStage, TensorParallel
from detcompile.passes.batches import certify_batches
from detcompile.passes.capture import PackedForward
from detcompile.passes.layers.structure import Repeats, layer_list
from detcompile.passes.programs.binding import CompiledGraph, bind, binding_of, require_cache_writes
from detcompile.passes.programs.canonical_form import never_run
from detcompile.passes.tracing import Seen, Traced, find_repeats, trace_packed
from detcompile.passes.warm import programs
from detcompile.passes.warm.kept_program import Program, StagePart, kept, take_program
from detcompile.passes.warm.program_key import ObservedRun, ProgramKey, label_of, observe_run, program_key
from detcompile.progress import stage
from detcompile.step import KVGroup
from detcompile.torch_internals.compile_workers import maybe_warm_pool
from detcompile.torch_internals.inductor import compile_fx_inner
from detcompile.torch_internals.modules import buffer_table, parameter_table
from detcompile.weights import weight_digests

INSTEAD = "compile it with pp=1"


class ProgramSource:
    """Source of a program over a model's layers: the cache, or the compiler.

    Args:
        model: rewritten by ``prepare`` and by ``pin_row_parallel`` or ``shard``.
        seen: what one eager run of the model shows.
        ranks: the ranks that share the model. Either all of them take a kept program, or none does.
        use: what the program is for; part of its key.
        pipeline_stage: the layers to run; None for all.

    Attributes:
        here: the layers to run, if they are a stage; None for all.
        groups: KV groups of the layers to run.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        numerics: Numerics,
        max_context: int,
        seen: Seen,
        ranks: TensorParallel | None,
        use: str,
        pipeline_stage: PipelineStage | None = None,
    ) -> None:
        self.model, self.numerics, self.max_context, self.seen = model, numerics, max_context, seen
        self.ranks, self.use, self.pipeline_stage = ranks, use, pipeline_stage
        self.here: range | None = None
        self.groups = seen.groups
        if pipeline_stage is not None:
            self.here = layers_of_stage(model, pipeline_stage, self.repeats, carries_states=bool(seen.states))
            self.groups = _groups_of_stage(seen.groups, self.here)

    @property
    def device(self) -> torch.device:
        """The device of the model's weights."""
        return next(self.model.parameters()).device

    @cached_property
    def observed(self) -> ObservedRun | None:
        """One run of the model over fake tensors; None if the model does not run over them."""
        return observe_run(self.model)

    @cached_property
    def repeats(self) -> Repeats | None:
        """Layers by their structure; None if every layer has to be traced."""
        return None if self.seen.states else find_repeats(self.model, self.observed and self.observed.shown)

    @cached_property
    def key(self) -> ProgramKey | None:
        """Name of the program in the cache; None if it cannot be kept."""
        if not programs_kept():
            return None
        device = None if self.pipeline_stage is None else self.pipeline_stage.device
        return program_key(self.model, self.numerics, self.max_context, self.seen, self.observed, self.use, device)

    def move(self) -> None:
        """Move a stage to its device and drop the layers that it neither runs nor traces."""
        if self.pipeline_stage is None or self.here is None:
            return
        assert self.repeats is not None
        _ = self.key  # reads the weights that are dropped here
        layers = list(layer_list(self.model) or ())
        held = [layer for index, layer in enumerate(layers) if index in self.here or index < self.repeats.prefix]
        tensors = [tensor for layer in held for tensor in (*layer.parameters(), *layer.buffers())]
        for layer in layers:
            _release_others(layer, tensors)
        if self.pipeline_stage.device is not None:
            self.model.to(self.pipeline_stage.device)

    def program(self) -> Program:
        """Take the kept program, else compile one and keep it. A stage keeps only the weights of its program."""
        program = self.take() or self.compile()
        if self.here is not None:
            _release_others(self.model, program.weights)
        return program

    def take(self) -> Program | None:
        """Return the kept program, or None."""
        if not programs_kept() and self.ranks is None:
            return None
        with stage("look for a kept program") as looking:
            seen = self.seen._replace(groups=self.groups)
            program = take_program(self.key and self.key.digest, self.model, seen, self.ranks, self.here)
            count = self._layers() if self.here is None else _counted(len(self.here))
            looking.becomes("no program is kept" if program is None else f"take a kept program of {count}")
        return program

    def compile(self) -> Program:
        """Capture, certify and compile the model, and keep the program."""
        if self.device.type == "cuda":
            maybe_warm_pool()
        captured = self._layers() if self.repeats is None else f"{self.repeats.prefix} of {self._layers()}"
        with stage(f"capture {captured} over a batch"):
            certify_batches(self.model, self.numerics, self.seen.expected, self.repeats)
        with stage(f"capture {captured} and compile") as compiling:
            packed = PackedForward(self.model)
            forward, traced = compile_packed(packed, self.numerics, self.seen, self.groups, self.repeats, self.here)
            count = sum(traced.certificate.counts.values())
            compiling.becomes(f"capture {captured}, certify {count} operations and compile")
        self._keep(traced)
        code = traced.graph.code
        part = None if self.here is None else StagePart(code.stage, code.rows)
        weights = _tensors_of(traced.graph)
        return Program(forward, traced.certificate, traced.digest, weights, traced.constants, part)

    def digest(self) -> tuple[str, Mapping[str, str]]:
        """Return the digest of the program, and digests of its constants, without compiling it."""
        with stage("capture the whole program") as capturing:
            content = None if self.key is None else programs.read(self.key.digest)
            if content is not None:
                capturing.becomes("take the whole program's digest")
                return content.decode(), {}
            packed = PackedForward(self.model)
            traced = trace_packed(packed, self.numerics, self.seen, never_run, join_weights=False, repeats=self.repeats)
        if self.key is not None and not traced.constants:
            label = label_of(self.model, self.max_context, traced.digest, self.key)
            programs.write(self.key.digest, traced.digest.encode(), label)
        return traced.digest, weight_digests(traced.constants)

    def _keep(self, traced: Traced) -> None:
        """Write a program into the cache, unless a rank cannot keep it."""
        may_keep = self.key is not None if self.ranks is None else bool(self.ranks.least(self.key is not None))
        content = kept(traced, self.model, self.ranks) if may_keep else None
        if self.key is not None and content is not None:
            label = label_of(self.model, self.max_context, traced.digest, self.key)
            programs.write(self.key.digest, content, label)

    def _layers(self) -> str:
        return _counted(self.model.config.get_text_config().num_hidden_layers)


def compile_packed(
    packed: PackedForward,
    numerics: Numerics,
    seen: Seen,
    groups: tuple[KVGroup, ...],
    repeats: Repeats | None = None,
    here: range | None = None,
) -> tuple[Callable[..., Any], Traced]:
    """Compile a packed forward and check that it writes the caches of ``groups`` in place."""
    traced = trace_packed(packed, numerics, seen, compile_fx_inner, repeats=repeats, here=here)
    forward = bind(traced.graph.run, binding_of(traced.graph, traced.example))
    require_cache_writes(forward, groups, traced.example)
    return forward, traced


def layers_of_stage(
    model: PreTrainedModel, pipeline_stage: PipelineStage, repeats: Repeats | None, *, carries_states: bool
) -> range:
    """Return the layers that a stage runs.

    Args:
        repeats: layers by their structure; None if the model is traced as a whole.

    Raises:
        UnsupportedModel: the model cannot be cut where layers meet.
        InvalidInput: there are more stages than layers.
    """
    name, layers, size = type(model).__name__, layer_list(model), pipeline_stage.size
    if carries_states:
        raise UnsupportedModel(f"{name}: pp={size}, but its layers carry states from token to token: {INSTEAD}")
    if layers is None:
        raise UnsupportedModel(f"{name}: pp={size}, but its layers are not in a single list: {INSTEAD}")
    here = pipeline_stage.layers(len(layers))
    if repeats is None:
        raise UnsupportedModel(
            f"{name}: pp={size}, but it is traced as a whole: its layers are too few or too different, or read"
            f" more of each other than their rows: {INSTEAD}"
        )
    return here


def _groups_of_stage(groups: tuple[KVGroup, ...], here: range) -> tuple[KVGroup, ...]:
    """Renumber the layers of each group from the stage's first. A group without layers keeps its block table."""
    return tuple(
        KVGroup(tuple(layer - here.start for layer in group.layers if layer in here), group.window) for group in groups
    )


def _tensors_of(graph: CompiledGraph) -> list[Tensor]:
    """Return the tensors that a program takes, including the parts of joined weights."""
    if graph.code is None:
        return []
    parts: Iterable[tuple[Tensor, ...]] = graph.code.parts.values()
    return [*(given for given in graph.inputs if isinstance(given, Tensor)), *(part for some in parts for part in some)]


def _release_others(model: nn.Module, used: Iterable[Tensor]) -> None:
    """Drop the parameters and buffers of a model that its program does not take."""
    used_ids = {id(tensor) for tensor in used}
    for module in model.modules():
        for table in (parameter_table(module), buffer_table(module)):
            for name, tensor in table.items():
                if id(tensor) not in used_ids:
                    table[name] = None


def _counted(layers: int) -> str:
    return "1 layer" if layers == 1 else f"{layers} layers"
