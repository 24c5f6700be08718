"""export(): a compiled model as one file that runs without Python code of the model."""

import tempfile
from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedModel

from detcompile.api import compile
from detcompile.archives.archive import Archive, Share, certificate_json, write_archive
from detcompile.archives.description import CERTIFICATE, KERNELS, TOKENIZER, facts_of
from detcompile.archives.machine import this_machine
from detcompile.archives.stored_weights import StoredWeights, files_beside
from detcompile.errors import ArchiveError, InvalidInput, UnsupportedModel
from detcompile.executors.local import LocalExecutor
from detcompile.executors.lowered_module import LoweredModule
from detcompile.executors.remote import START_SECONDS
from detcompile.models.certified import CertifiedModel
from detcompile.models.compiled import CompiledModel, require_causal
from detcompile.models.remote import RemoteModel
from detcompile.passes.packaging import package
from detcompile.progress import shown as shown_stages
from detcompile.progress import stage
from detcompile.runtime.requests.plain_values import file_path, shown
from detcompile.storage import disk_failure, naming
from detcompile.templates.cpu import library as cpu_library

DEVICES: tuple[str, ...] = ("cpu", "cuda")  # on which exported programs were tested against the JIT


def export(
    model: CompiledModel | PreTrainedModel | str | Path,
    path: str | Path,
    *,
    weights: Literal["inside", "beside"] = "inside",
) -> Path:
    """Write a compiled model to one file, which ``detcompile.load`` runs with the same bits.

    The file holds one program for every number of tokens, compiled by AOTInductor, the CPU kernels, the certificate,
    the fingerprint, the tokenizer if there is one, and the sha256 of each of them. It runs on machines like this one
    with the same torch and detcompile; load() refuses others. For a model in worker processes (``compile(tp=4)``) it
    holds a program and a share of the weights for every rank.

    Args:
        model: the result of ``compile``; or an argument of ``compile``, which is then called with its defaults.
        path: ends with .pt2; replaced once the new file is complete. Its folder is checked before anything is compiled.
        weights: "inside"; or "beside" for a .safetensors file of the same name, one per rank, which must stay next to
            the archive. Existing files there are replaced only if they belong to this archive.

    Returns:
        The path.

    Raises:
        InvalidInput: the path or ``weights`` is invalid, or another file is in the way of the weights.
        UnsupportedModel: the model came from an archive, this process is one of the ranks that share it (torchrun), or
            its device is not in DEVICES.
        WorkerError: a rank failed.
        StorageError: the file cannot be written, or the disk is full.
        Also what ``compile`` raises.
    """
    if weights not in ("inside", "beside"):
        raise InvalidInput(f"weights={weights!r}: give 'inside' or 'beside'")
    path = file_path(path, "export to")
    num_ranks = model.group.num_ranks if isinstance(model, RemoteModel) else 1
    require_target(path, num_ranks if weights == "beside" else 0)
    compiled = require_causal(model if isinstance(model, CertifiedModel) else compile(model), "export()")
    if compiled.device.type not in DEVICES:
        raise UnsupportedModel(
            f"export on {compiled.device.type}: exported programs were tested on {', '.join(DEVICES)} only"
            " (docs/limits.md): compile the model there"
        )
    if compiled.ranks is not None:
        raise UnsupportedModel(
            "this process is one of the ranks that share the model: compile it from a single process with tp="
            f"{compiled.ranks.size}, and export that: the bits are the same"
        )
    if isinstance(compiled, RemoteModel) and compiled.stages > 1:
        raise UnsupportedModel(f"export of a model in stages: compile it with pp=1 instead of pp={compiled.stages}")
    try:
        with shown_stages(None):
            _write(compiled, path, weights == "beside")
    except OSError as error:
        raise disk_failure(error, path) or error from error
    return path


def require_target(path: Path, num_beside: int = 0) -> None:
    """Raise InvalidInput unless an archive can have this path.

    Args:
        num_beside: number of ranks whose weights go beside it. They may replace an older export's weights, but no other
            file.

    Raises:
        InvalidInput: the path is invalid, or the weights would overwrite another file.
    """
    try:
        path.exists()
    except OSError as error:
        raise InvalidInput(f"export to {shown(str(path))}: {error.strerror}; give another name") from error
    if path.suffix != ".pt2" or not path.parent.is_dir() or path.is_dir():
        raise InvalidInput(f"export to {path}: pass a file name that ends with .pt2, in a folder that exists")
    replaceable = _weights_of(path) if num_beside else ()
    for file in files_beside(path, num_beside):
        if file.exists() and file.name not in replaceable:
            raise InvalidInput(
                f"export to {path}: the weights would overwrite {file}, which is not part of an archive {path.name}:"
                " choose another name or folder, store the weights inside the archive, or move that file away"
            )


def _weights_of(path: Path) -> list[str]:
    """Return the names of the weight files beside an archive; none if it does not exist or is not an archive."""
    try:
        return [share["weights"]["file"] for share in Archive(path, rank=None).facts["ranks"]]
    except ArchiveError:
        return []


def _write(compiled: CompiledModel, path: Path, beside: bool) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as folder:
        with stage("compile the program of the file"):
            if isinstance(compiled, RemoteModel):
                ranks = compiled.apply(_written_share, folder, seconds=START_SECONDS)
            else:
                ranks = [_share(compiled)]
        model = compiled.executor.description
        sizes = model.module, model.facts, model.numerics, model.parameters
        known = facts_of(*sizes, compiled.fingerprint_parts, compiled.weight_digests())
        facts = {**known, "machine": this_machine(compiled.device)}
        with stage(f"write {path.name}"):
            write_archive(path, facts, _common_members(compiled), ranks, beside)


def _share(compiled: CompiledModel) -> Share:
    """Return this process's part of the archive."""
    origin = compiled.executor.origin if isinstance(compiled.executor, LocalExecutor) else None
    if not isinstance(origin, LoweredModule):
        raise UnsupportedModel("this model was loaded from an archive: copy that, or compile it from its own folder")
    program = compiled.program if compiled.ranks is None else None
    packaged = package(compiled.model, compiled.numerics, compiled.certificate, origin.recurrences, program)
    facts = {
        "arguments": packaged.arguments,
        "views": packaged.views,
        "kv_shapes": [list(shape) for shape in compiled.facts.kv_shapes],
        "num_threads": torch.get_num_threads(),  # for its kernels
    }
    return Share(facts, packaged.files, StoredWeights.of(packaged.weights))


def _written_share(compiled: CompiledModel, folder: str) -> Share:
    """Return a worker process's part of the archive: its weights in a file."""
    share = _share(compiled)
    rank = 0 if compiled.ranks is None else compiled.ranks.rank
    with naming(Path(folder)):
        return share._replace(weights=share.weights.written_to(Path(folder, f"rank{rank}")))


def _common_members(compiled: CompiledModel) -> dict[str, bytes]:
    """Return the members that all ranks share."""
    members = {CERTIFICATE: certificate_json(compiled.certificate)}
    if compiled.device.type == "cpu":
        isa = cpu_library.isa()
        members[f"{KERNELS}/{isa}.so"] = cpu_library.library_bytes(isa)
    if compiled.tokenizer is not None:
        with tempfile.TemporaryDirectory() as folder:
            compiled.tokenizer.save_pretrained(folder)
            files = sorted(file for file in Path(folder).rglob("*") if file.is_file())
            members |= {f"{TOKENIZER}/{file.relative_to(folder).as_posix()}": file.read_bytes() for file in files}
    return members
