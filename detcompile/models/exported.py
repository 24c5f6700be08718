"""load(): a compiled model from a file written by export, without the model's Python code."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from detcompile.archives.archive import Archive, library_folder, read_certificate
from detcompile.archives.description import CERTIFICATE, FORMAT, KERNELS
from detcompile.archives.machine import obstacle
from detcompile.archives.manifest import parsed, require_model
from detcompile.digests import source_digest
from detcompile.errors import ArchiveError, DetcompileError, InvalidInput
from detcompile.executors.archived import executor_from
from detcompile.models.compiled import CompiledModel
from detcompile.models.remote import load_in_workers
from detcompile.orders.numerics import Numerics
from detcompile.parallel import tensor_parallel
from detcompile.passes.release_probe import require_release
from detcompile.runtime.requests.plain_values import file_path, shown
from detcompile.storage import TEMPORARY_ADVICE, disk_failure
from detcompile.templates.cpu import library as cpu_library


class ExportedModel(CompiledModel):
    """A certified causal LM from an archive. It is called, generates and serves like the original model.

    Drafters that need the module's layers or hidden states are rejected.
    """


@torch.inference_mode(False)  # changes of weights that are created in inference mode cannot be detected
def load(path: str | Path, *, tp_group: ProcessGroup | None = None) -> CompiledModel:
    """Load a compiled model from a file written by ``export``: same bits, same fingerprint.

    Neither the model's class in transformers nor a C++ compiler is needed, except for the probe of an untested release.
    The ranks of a model that was compiled for several run in worker processes again, as a RemoteModel. If
    torch.distributed is initialized (torchrun), no workers are started: every process calls load() and takes its own
    rank's share.

    Args:
        tp_group: the processes that share the model, as in ``compile``.

    Raises:
        UnsupportedRelease: the installed torch, transformers or triton is untested and fails a probe.
        ArchiveError: the file is damaged, or was made for another machine, torch or detcompile.
        InvalidInput: the file does not exist; there are too few GPUs, or the processes are not one per rank;
            ranks load different archives; or this process runs CPU kernels of another compiler.
        UnsupportedModel: the program, in a test step, did not write its KV caches in place
            (passes.programs.binding).
        WorkerError: a worker process could not start.
    """
    path = file_path(path, "load from")
    try:
        exists = path.is_file()
    except OSError as error:
        raise InvalidInput(f"{shown(str(path))}: {error.strerror}; pass a file written by export") from error
    if not exists:
        raise InvalidInput(f"{path}: no such file; pass one written by export")
    require_release()
    opened = Archive(path, rank=None)
    facts = opened.facts
    if facts.get("format") != FORMAT:
        raise ArchiveError(f"{path} has format {facts.get('format')}, but {FORMAT} is required: export it again")
    require_model(path, facts)
    reason = obstacle(facts["machine"])
    if reason:
        raise ArchiveError(f"{path} cannot run here with the same bits: {reason}")
    if facts["fingerprint_parts"]["source"] != source_digest():
        raise ArchiveError(f"{path} was made by another version of detcompile: export it again")
    tp = len(facts["ranks"])
    with _as_exported(path):
        numerics = Numerics(**facts["numerics"])
        read_certificate(parsed(path, CERTIFICATE, opened.read(CERTIFICATE)), numerics)
        sound = (numerics.is_exact or tp in numerics.tp_sizes) and all(_library_of(opened, rank) for rank in range(tp))
    if not sound:
        raise ArchiveError(f"{path} is not what export wrote: some of {tp} ranks have no library. Export it again")
    if tp > 1 and tp_group is None and not dist.is_initialized():
        return load_in_workers(path, tp, numerics, facts["machine"]["device"])
    ranks = tensor_parallel(tp, tp_group) if tp > 1 else None
    archive = Archive(path, 0 if ranks is None else ranks.rank)
    if facts["machine"]["device"] == "cpu":
        _adopt_kernels(archive, facts["machine"]["isa"])
    if ranks is not None:
        ranks.require_equal(facts["fingerprint_parts"])
    with _as_exported(path):
        return ExportedModel(executor_from(archive, ranks))


def _adopt_kernels(archive: Archive, isa: str) -> None:
    """Load the kernels that the program was made with."""
    name = f"{KERNELS}/{isa}.so"
    if archive.names(KERNELS) != [name]:
        raise ArchiveError(f"{archive.path} is not what export wrote: it has no {name}. Copy it, or export it, again.")
    cpu_library.adopt(isa, archive.read(name))


def _library_of(archive: Archive, rank: int) -> bool:
    """Return True if the archive has one library for this rank."""
    return sum(name.endswith(".so") for name in archive.names(library_folder(rank))) == 1


@contextmanager
def _as_exported(path: Path) -> Iterator[None]:
    """Turn unexpected exceptions into ArchiveError: a file written by export is read without errors."""
    try:
        yield
    except (DetcompileError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:
        failed = disk_failure(error, Path(tempfile.gettempdir()), TEMPORARY_ADVICE)
        if failed is not None:
            raise failed from error
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ArchiveError(f"{path} is not what export wrote ({reason}). Copy it again, or export again.") from error
