"""Measures the invariance axes of a device for `detcompile verify` and `detcompile demo`.

Run as a module, it is the second process of the restart axis: it reads a request from standard input and saves logits.
"""

import functools
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from detcompile.commands.axes import AXES, AxisResult, Configuration, Tokens, configurations, measure, score
from detcompile.config import environment_without_programs
from detcompile.errors import DetcompileError, InvalidInput
from detcompile.exporting import export
from detcompile.models.compiled import CompiledModel
from detcompile.models.hub import TINY, TINY_FOLDER
from detcompile.models.remote import RemoteModel
from detcompile.models.spec import ARCHIVE_SUFFIX, ModelSpec

RESTART = "restart"  # runs in another process
EXPORT = "export"  # an exported archive in another process; measured on request only
TP = "tp"  # one process for each rank, on GPUs one GPU each; measured on request only
PP = "pp"  # the same for pipeline stages
STAGES = (2, 4)  # numbers of stages that PP compares with one
PROMPT_LENGTHS = (12, 515, 67, 130, 260)  # the first two are targets: one short, one longer than a chunk of 512 keys


def available_axes(device_type: str) -> list[str]:
    """Return the axes measured by default on this device type: all but TP, PP and EXPORT."""
    axes = [axis for axis in AXES if axis != "cuda_graphs" or device_type == "cuda"]
    return [*axes, RESTART]


def require_axes(axes: Sequence[str], device_type: str | None = None) -> None:
    """Raise InvalidInput for an axis that does not exist on this device type, or on any."""
    known = [*available_axes(device_type or "cuda"), EXPORT, PP, TP]
    for axis in axes:
        if axis not in known:
            where = "" if device_type is None else f" on {device_type}"
            raise InvalidInput(f"no axis {axis!r}{where}; there are {', '.join(known)}")


def prompts_for(
    model: CompiledModel, spec: ModelSpec, seed: int, lengths: Sequence[int] = PROMPT_LENGTHS
) -> list[Tokens]:
    """Return prompts, targets first: real text for the embedded model, random tokens for others."""
    lengths = [min(length, model.max_context - 1) for length in lengths]
    if spec.name == TINY and not spec.random:
        return [tokens[:length] for tokens, length in zip(embedded_prompts(lengths), lengths, strict=True)]
    rng = random.Random(seed)
    return [tuple(rng.randrange(model.vocab_size) for _ in range(length)) for length in lengths]


def prompt_texts() -> list[str]:
    """Return the prompts that ship with the embedded model."""
    return (TINY_FOLDER / "prompts.txt").read_text().split("\n---\n")


def embedded_prompts(lengths: Sequence[int]) -> list[Tokens]:
    """Tokenize the shipped prompts; for each length, return the shortest prompt that reaches it, or all joined."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_FOLDER, local_files_only=True)
    encoded = sorted((tuple(tokenizer(text)["input_ids"]) for text in prompt_texts()), key=len)
    everything = tuple(token for tokens in encoded for token in tokens)
    return [next((tokens for tokens in encoded if len(tokens) >= length), everything) for length in lengths]


def verify(
    model: CompiledModel,
    spec: ModelSpec,
    axes: Sequence[str],
    *,
    count: int = 6,
    seed: int = 0,
    tick: Callable[[str], None] = lambda axis: None,
) -> dict[str, AxisResult]:
    """Measure ``axes`` with ``count`` configurations for each of two targets; call ``tick(axis)`` after each.

    Raises:
        InvalidInput: an axis does not exist on this device; TP with one declared size only; PP with fewer than two
            layers; or too few GPUs for TP or PP.
        UnsupportedModel, NumericsError: the model cannot be sharded over a declared number of ranks, or cut into
            stages; EXPORT of a model that was loaded from an archive.
    """
    require_axes(axes, model.device.type)
    prompts, spec = prompts_for(model, spec, seed), spec.pinned(model)
    results = {}
    for axis in axes:
        if axis in (PP, TP):
            settings = _sizes(model, axis), count, seed, functools.partial(tick, axis)
            results[axis] = _in_workers(model, spec, axis, prompts, *settings)
        elif axis == RESTART:
            results[axis] = _restart(model, spec, prompts[:2])
            tick(axis)
        elif axis == EXPORT:
            with tempfile.TemporaryDirectory() as folder:
                archive = export(model, Path(folder) / f"model{ARCHIVE_SUFFIX}")
                results[axis] = _restart(model, ModelSpec(str(archive)), prompts[:2])
            tick(axis)
        else:
            plan = configurations(axis, prompts, count, random.Random(f"{axis} {seed}"))
            results[axis] = measure(model, plan, functools.partial(tick, axis))
    return results


def _sizes(model: CompiledModel, axis: str) -> tuple[int, ...]:
    """Return the numbers of ranks or stages to compare with one."""
    if axis == TP:
        sizes = model.numerics.tp_sizes[1:]
        if not sizes:
            raise InvalidInput(
                f"axis {TP!r}: --tp-sizes declares one rank only; declare the sizes to compare, such as 1,2"
            )
        return sizes
    num_layers = len(model.facts.kv_shapes)
    sizes = tuple(size for size in STAGES if size <= num_layers)
    if not sizes:
        raise InvalidInput(f"axis {PP!r}: two stages need two layers, and the model has {num_layers}")
    return sizes


def _in_workers(
    model: CompiledModel,
    spec: ModelSpec,
    axis: str,
    prompts: Sequence[Tokens],
    sizes: Sequence[int],
    count: int,
    seed: int,
    tick: Callable[[], None],
) -> AxisResult:
    """Compare the targets in one process with every number of ranks or stages, alone and in chunked batches."""
    result = AxisResult()
    for target in prompts[:2]:
        result.add(target, score(model, Configuration((target,))))
        tick()
    for size in sizes:
        plan = configurations("chunking", prompts, count, random.Random(f"{axis} {size} {seed}"))
        sharded = spec.compile(**{axis: size})
        assert isinstance(sharded, RemoteModel), "compile() of several ranks outside torchrun starts workers"
        with sharded:
            for configuration in plan:
                result.add(configuration.rows[configuration.target], score(sharded, configuration))
                tick()
    return result


def _restart(model: CompiledModel, spec: ModelSpec, targets: Sequence[Tokens]) -> AxisResult:
    """Compare the targets in this process with a new one."""
    result = AxisResult()
    for target in targets:
        result.add(target, score(model, Configuration((target,))))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "logits.pt"
        request = json.dumps({"spec": asdict(spec), "targets": targets, "path": str(path)})
        child = subprocess.run(
            [sys.executable, "-m", __name__],
            input=request,
            text=True,
            capture_output=True,
            check=False,
            env=environment_without_programs(),  # compile again instead of reading the cache
        )
        if child.returncode:
            raise DetcompileError(f"the restarted process failed with {child.returncode}:\n{child.stderr[-4000:]}")
        answer: dict[str, Any] = torch.load(path)
    if answer["fingerprint"] != model.fingerprint:
        raise DetcompileError("the restarted process has another fingerprint: the model's files have changed")
    for target, logits in zip(targets, answer["logits"], strict=True):
        result.add(target, logits)
    return result


def _serve_restart() -> None:
    request = json.load(sys.stdin)
    model = ModelSpec(**request["spec"]).compile()
    logits = [score(model, Configuration((tuple(target),))).cpu() for target in request["targets"]]
    torch.save({"fingerprint": model.fingerprint, "logits": logits}, request["path"])


if __name__ == "__main__":
    _serve_restart()
