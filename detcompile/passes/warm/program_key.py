"""ProgramKey: a digest of everything that decides a model's program. Equal keys mean equal programs."""

import hashlib
import json
import logging
import os
import platform
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import transformers
import triton
from transformers import PreTrainedModel

from detcompile.config import sizes_asserted
from detcompile.digests import source_digest
from detcompile.gc_pause import without_collections
from detcompile.orders.numerics import Numerics
from detcompile.passes.layers.structure import Shown, shown_by, view_of
from detcompile.passes.programs.lanes import vector_isa
from detcompile.passes.tracing import Seen, run_on_two_tokens
from detcompile.passes.warm.descriptions import CalledCode, Descriptions, Undescribed
from detcompile.passes.warm.programs import KEY_PART
from detcompile.templates.cpu import library as cpu_library
from detcompile.templates.cpu.shared_objects import compiler_if_any
from detcompile.torch_internals.inductor_settings import inductor_config

logger = logging.getLogger(__name__)
PART_DIGITS = 12  # of a part's digest
# Modes of torch that change computation.
MODES = (
    torch.get_default_dtype,
    torch.get_float32_matmul_precision,
    torch.are_deterministic_algorithms_enabled,
    torch.is_autocast_enabled,
)


class ObservedRun(NamedTuple):
    """One run of a model on two tokens."""

    shown: Shown  # its operations
    code: list[str]  # the Python code that it called, sorted


def observe_run(model: PreTrainedModel) -> ObservedRun | None:
    """Observe a run over fake tensors; None if the model does not run over them."""
    called = CalledCode()
    try:
        with torch.no_grad(), without_collections(), called:
            shown = shown_by(view_of(model), run_on_two_tokens, called.unobserved)
    except (RuntimeError, RecursionError, TypeError, ValueError) as error:
        logger.debug("%s does not run over fake tensors: %s", type(model).__name__, error)
        return None
    return ObservedRun(shown, sorted(called.lines))


class ProgramKey(NamedTuple):
    """The name of a kept program.

    Attributes:
        digest: sha256 over all parts.
        parts: a digest of each part, by name; the number of threads is not digested.
    """

    digest: str
    parts: dict[str, str]


def program_key(
    model: PreTrainedModel,
    numerics: Numerics,
    max_context: int,
    seen: Seen,
    observed: ObservedRun | None,
    use: str = "a forward",
    device: torch.device | None = None,
) -> ProgramKey | None:
    """Digest everything that decides the program of a prepared model; None if some of it cannot be described.

    Of the model: each module's class, children and attributes, the form of each weight, the operations of one run on
    two tokens with the contents of tensors from outside, and the Python code that the run calls. Values of weights are
    left out, because a program takes them as inputs.

    Args:
        observed: the run of the model, in its present state.
        use: what the program is for.
        device: where it runs, if the model is not there yet.
    """
    if observed is None:
        return None
    digest, parts = hashlib.sha256(use.encode()), {"use": _short(use)}
    place = device or next(model.parameters()).device
    try:
        for name, line in _parts(model, numerics, max_context, seen, observed, place):
            text = json.dumps(line)
            digest.update(text.encode())
            parts[name] = text if name == "threads" else _short(text)
    except (Undescribed, RuntimeError, RecursionError, TypeError, ValueError) as error:
        logger.debug("the program of %s is not kept: %s", type(model).__name__, error)
        return None
    return ProgramKey(digest.hexdigest(), parts)


def inductor_settings() -> list[tuple[str, str]]:
    """Return the settings of Inductor that a program may depend on, without folders, caches and traces."""
    settings = inductor_config.save_config_portable(ignore_private_configs=False)
    return sorted(
        (name, repr(value))
        for name, value in settings.items()
        if not (isinstance(value, str) and os.path.isabs(value))  # xpu.cutlass_dir may be the working directory
    )


def _parts(
    model: PreTrainedModel,
    numerics: Numerics,
    max_context: int,
    seen: Seen,
    observed: ObservedRun,
    device: torch.device,
) -> Iterator[tuple[str, Any]]:
    versions = [torch.__version__, torch.version.git_version, triton.__version__, transformers.__version__]
    yield "versions", [source_digest(), sys.version, *versions]
    yield "machine", _machine(device)
    yield "threads", torch.get_num_threads()
    yield "torch's modes", [sizes_asserted(), *(str(mode()) for mode in MODES)]
    yield "Inductor's settings", inductor_settings()
    caches = [repr(seen.groups), repr(seen.kv_shapes), repr(seen.states)]
    yield "numerics, context and caches", [repr(numerics), max_context, *caches]
    yield "attention", [[call.layer, call.num_heads, call.shape, call.chunk, call.window] for call in seen.attention]
    described = Descriptions(model)
    yield "modules", [[name, described.module(module)] for name, module in model.named_modules()]
    yield "operations", hashlib.sha256(repr(observed.shown).encode()).hexdigest()
    yield "Python code", hashlib.sha256(repr(observed.code).encode()).hexdigest()


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:PART_DIGITS]


def label_of(model: PreTrainedModel, max_context: int, digest: str, key: ProgramKey) -> dict[str, str]:
    """Return a description of a kept program, for lists of programs.

    Args:
        digest: the digest of the program.
    """
    layers = model.config.get_text_config().num_hidden_layers
    names = {"model": type(model).__name__, "layers": str(layers), "dtype": str(model.dtype)}
    parts = {f"{KEY_PART}{name}": part for name, part in key.parts.items()}
    return names | {"max_context": str(max_context), "program": digest} | parts


def cpu_facts() -> list[str]:
    """Return facts of the CPU and compiler that a program depends on. The first call in a process takes a second."""
    return [platform.machine(), "cpu", cpu_library.isa(), str(vector_isa()), compiler_if_any()]


def _machine(device: torch.device) -> list[str]:
    if device.type == "cpu":
        return cpu_facts()
    capability = torch.cuda.get_device_capability(device)
    return [platform.machine(), str(device), torch.cuda.get_device_name(device), str(capability)]
