"""export(): a compiled model as one file that runs without Python code of the model."""

import tempfile
from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedModel

from detcompile.api import compile
from detcompile.archive import LIBRARY_FOLDER, write_archive
from detcompile.compiled import CompiledModel
from detcompile.errors import InvalidInput, UnsupportedModel
from detcompile.exported import CERTIFICATE, KERNELS, TOKENIZER, certificate_json, facts_of
from detcompile.machine import this_machine
from detcompile.passes.lowering import package
from detcompile.templates import cpu_library

__all__ = ["DEVICES", "export", "require_target"]

DEVICES: tuple[str, ...] = ("cpu", "cuda")  # where exported programs were seen to give the bits of the JIT


def export(
    model: CompiledModel | PreTrainedModel | str | Path,
    path: str | Path,
    *,
    weights: Literal["inside", "beside"] = "inside",
) -> Path:
    """Write a compiled model to one file, which ``detcompile.load`` runs with the same bits.

    The file holds one program for every number of tokens, compiled by AOTInductor, the CPU kernels, the certificate,
    the fingerprint, the tokenizer if there is one, and the sha256 of each of them. It runs on machines like this one,
    with this torch and this detcompile; load() refuses others.

    Args:
        model: from ``compile``; or what ``compile`` takes, which is then called with its defaults.
        path: ends with .pt2; replaced once the new file is whole.
        weights: "inside", or "beside": in a file of safetensors of the same name, which has to stay next to it.

    Returns:
        The path.

    Raises:
        InvalidInput: a path or a choice that cannot be.
        UnsupportedModel: several ranks share the model, it came from an archive, or it is on none of DEVICES.
        Also what ``compile`` raises.
    """
    path = Path(path)
    require_target(path)
    if weights not in ("inside", "beside"):
        raise InvalidInput(f"weights={weights!r}: give 'inside' or 'beside'")
    compiled = model if isinstance(model, CompiledModel) else compile(model)
    if compiled.ranks is not None or type(compiled) is not CompiledModel:
        raise UnsupportedModel(
            f"{type(compiled).__name__}: a model that several ranks share, or that was loaded from an archive, is not"
            " exported: compile it from its own folder with tp=1"
        )
    if compiled.device.type not in DEVICES:
        raise UnsupportedModel(
            f"export on {compiled.device.type}: exported programs were run on {', '.join(DEVICES)} only so far"
            " (docs/limits.md): compile the model where it shall run"
        )
    packaged = package(compiled.model, compiled.numerics, compiled.certificate, compiled.recurrences)
    members: dict[str, bytes | Path] = {f"{LIBRARY_FOLDER}/{file.name}": file for file in packaged.files}
    members |= _others(compiled)
    facts = {**facts_of(compiled), "machine": this_machine(compiled.device), "arguments": packaged.arguments}
    facts["num_threads"] = torch.get_num_threads()  # that its kernels ask for
    beside = path.with_suffix(".safetensors") if weights == "beside" else None
    write_archive(path, facts, members, packaged.weights, beside)
    return path


def require_target(path: Path) -> None:
    """Fail unless an archive can have this path.

    Raises:
        InvalidInput: it cannot.
    """
    if path.suffix != ".pt2" or not path.parent.is_dir():
        raise InvalidInput(f"export to {path}: give a file in a folder that exists, whose name ends with .pt2")


def _others(compiled: CompiledModel) -> dict[str, bytes]:
    """Members besides the program."""
    members = {CERTIFICATE: certificate_json(compiled.certificate)}
    if compiled.device.type == "cpu":
        isa = cpu_library.isa()
        members[f"{KERNELS}/{isa}.so"] = cpu_library.library_bytes(isa)
    if compiled.tokenizer is not None:
        with tempfile.TemporaryDirectory() as folder:
            compiled.tokenizer.save_pretrained(folder)
            members |= {f"{TOKENIZER}/{file.name}": file.read_bytes() for file in sorted(Path(folder).iterdir())}
    return members
