"""ArchivedProgram: runs the program of an archive in this process, without the model's Python code."""

import json
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import GenerationConfig

from detcompile.archives.archive import Archive, library_folder, read_certificate
from detcompile.archives.description import CERTIFICATE, TOKENIZER, read_config, read_sizes
from detcompile.errors import InvalidInput
from detcompile.executors.description import ModelDescription, ParameterCount
from detcompile.executors.live_weights import LiveWeights
from detcompile.executors.local import LocalExecutor
from detcompile.orders.numerics import Numerics
from detcompile.parallel import TensorParallel
from detcompile.passes.programs.binding import example_step, require_cache_writes
from detcompile.runtime.engine_setup import Forwards
from detcompile.step import StepInputs, step_leaves
from detcompile.storage import in_temporary_folder
from detcompile.templates.cpu.fp_mode import in_float_mode
from detcompile.templates.device.cuda_graphs import constants
from detcompile.torch_internals.fake_tensors import without_modes
from detcompile.torch_internals.library_runner import converts_dtypes, dtype_number, library_runner


def executor_from(archive: Archive, ranks: TensorParallel | None = None) -> LocalExecutor:
    """Return the executor of an archive's program; of this rank's program if ranks share the model.

    Raises:
        UnsupportedModel: a trial step did not write the KV caches in place.
    """
    facts, share = archive.facts, archive.share
    library = library_folder(0 if ranks is None else ranks.rank)
    folder = _unpacked(archive, library)
    description = _described(archive, folder)
    sizes = description.facts
    weights = archive.weights(sizes.device)
    named = {
        name: weights[held_in].as_strided(shape, stride, offset)
        for name, (held_in, shape, stride, offset) in share["views"].items()
    }
    digests = facts["weight_digests"]
    held = {name: tensor for name, tensor in named.items() if name in digests}
    live = LiveWeights(lambda: held, lambda: named, whole=digests, is_share=ranks is not None)
    loaded = _Library(Path(folder.name, library), share["arguments"], weights, ranks)
    forward = in_float_mode(loaded, sizes.device, share["num_threads"])
    step = example_step(sizes.kv_shapes, len(sizes.kv_groups), sizes.state_shapes, sizes.dtype, sizes.device)
    require_cache_writes(forward, sizes.kv_groups, step)
    origin = ArchivedProgram(facts["fingerprint_parts"], folder)
    return LocalExecutor(description, Forwards(forward), live, origin, ranks)


class ArchivedProgram:
    """The archive behind a LocalExecutor. Operations that need the module are rejected.

    Args:
        parts: the parts of the fingerprint.
        folder: the unpacked files; lives as long as this object.
    """

    def __init__(self, parts: Mapping[str, str], folder: "tempfile.TemporaryDirectory[str]") -> None:
        self.fixed_parts = {name: part for name, part in parts.items() if name != "weights"}
        self._folder = folder

    def head_weight(self) -> NoReturn:
        """Raise InvalidInput: an archive does not name its head's weight."""
        raise InvalidInput(
            "an archive has no hidden states for Medusa heads, and does not record which weight is the output head:"
            " compile the model instead"
        )

    def with_layers(self, layers: tuple[int, ...]) -> NoReturn:
        """Raise InvalidInput: an archive has one program, of all layers."""
        raise InvalidInput("an archive has one program of all layers: compile the model to draft with some of them")


def _unpacked(archive: Archive, library: str) -> "tempfile.TemporaryDirectory[str]":
    """Unpack the members that are read as files into a temporary folder."""
    with in_temporary_folder():
        folder = tempfile.TemporaryDirectory(prefix="detcompile-")
        for name in (*archive.names(library), *archive.names(TOKENIZER)):
            place = Path(folder.name, name)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(archive.read(name))
    return folder


def _described(archive: Archive, folder: "tempfile.TemporaryDirectory[str]") -> ModelDescription:
    facts = archive.facts
    numerics = Numerics(**facts["numerics"])
    return ModelDescription(
        module=SimpleNamespace(
            config=read_config(facts["config"]),
            generation_config=GenerationConfig.from_dict(facts["generation_config"]),
            name_or_path=facts["name_or_path"],
            tokenizer_folder=str(Path(folder.name, TOKENIZER)),
        ),
        numerics=numerics,
        certificate=read_certificate(json.loads(archive.read(CERTIFICATE)), numerics),
        program=facts["fingerprint_parts"].get("program", ""),
        facts=read_sizes(facts, archive.share),
        parameters=ParameterCount(*facts["num_parameters"]),
    )


class _Library:
    """AOTInductor's library with the call signature of a compiled forward."""

    def __init__(
        self, folder: Path, arguments: list[int | str], weights: dict[str, Tensor], ranks: TensorParallel | None
    ) -> None:
        (library,) = folder.glob("*.so")
        for operations in folder.glob("*.json"):
            operations.write_text(_for_this_process(operations.read_text(), "" if ranks is None else ranks.group))
        self._arguments = [weights[source] if isinstance(source, str) else source for source in arguments]
        on_gpu = next(iter(weights.values())).device.type == "cuda"
        self._runner = library_runner(str(library), str(folder), on_gpu)
        self._one_at_a_time = threading.Lock()

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, position_ids: Tensor, step: StepInputs, logits_to_keep: Tensor) -> Tensor:
        inputs = step_leaves(input_ids, position_ids, step, logits_to_keep)
        # AOTInductor's libraries fail under a dispatch mode, such as that of recorded calls.
        with self._one_at_a_time, constants(self._arguments), without_modes():
            (logits,) = self._runner.run([inputs[a] if isinstance(a, int) else a for a in self._arguments])
        return logits


def _for_this_process(operations: str, group: str) -> str:
    """Adapt AOTInductor's list of operations: set the process group, and convert dtype numbers for this torch."""

    def adapted(value: dict[str, Any]) -> dict[str, Any]:
        if value.get("name") == "group" and "as_string" in value["arg"]:  # dequant_matmul's is a size
            return value | {"arg": {"as_string": group}}
        if "as_scalar_type" in value and not converts_dtypes():
            return {"as_scalar_type": dtype_number(value["as_scalar_type"])}
        return value

    return json.dumps(json.loads(operations, object_hook=adapted))
