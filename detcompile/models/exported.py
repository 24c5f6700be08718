"""load(): a compiled model from the file that export wrote, without the Python code of the model."""

import dataclasses
import json
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._export.serde.schema import ScalarType
from torch.distributed import ProcessGroup
from torch.torch_version import TorchVersion

from detcompile import orders
from detcompile.archives.archive import EXTRA, Archive, library_folder
from detcompile.archives.machine import obstacle
from detcompile.archives.manifest import parsed, require_model
from detcompile.errors import ArchiveError, DetcompileError, InvalidInput
from detcompile.models.compiled import CompiledModel
from detcompile.models.fingerprints import fingerprint, source_digest
from detcompile.models.live_weights import LiveWeights
from detcompile.models.remote import load_in_workers
from detcompile.orders.numerics import Numerics
from detcompile.orders.sum_order import SumOrder
from detcompile.parallel import TensorParallel, tensor_parallel
from detcompile.passes.programs.cache_writes import require_kept
from detcompile.passes.programs.example_step import example_step
from detcompile.passes.proof.certificate import Certificate, Entry
from detcompile.runtime.dense.end_tokens import stop_tokens
from detcompile.runtime.engine_setup import EngineModel
from detcompile.runtime.kv.kv_cache import KVShape
from detcompile.step import KVGroup, StateShape, StepInputs, step_leaves
from detcompile.storage import disk_failure
from detcompile.templates.cpu import library as cpu_library
from detcompile.templates.cpu.fp_mode import in_float_mode

__all__ = ["CERTIFICATE", "ExportedModel", "FORMAT", "KERNELS", "TOKENIZER", "certificate_json", "facts_of", "load"]

FORMAT = 3
TEMPORARY_ADVICE = "Free space there or make it writable, or set TMPDIR to another folder."
CONVERTS_DTYPES = TorchVersion(torch.__version__) >= "2.12"  # https://github.com/pytorch/pytorch/pull/173562
DTYPE_NUMBERS = {ScalarType.HALF: 5, ScalarType.FLOAT: 6, ScalarType.DOUBLE: 7, ScalarType.BFLOAT16: 15}  # torch's own
CERTIFICATE, KERNELS, TOKENIZER = (f"{EXTRA}/{name}" for name in ("certificate.json", "cpu", "tokenizer"))


class ExportedModel(CompiledModel):
    """A certified causal LM from an archive. It is called, generates and serves like the one it was exported from.

    ``model`` stands for the module, of which there is none: it has ``generation_config`` and ``name_or_path`` only.
    Drafters that need the module's layers or hidden states are refused.
    """

    def __init__(self, archive: Archive, ranks: TensorParallel | None = None) -> None:
        facts, share = archive.facts, archive.share
        library = library_folder(0 if ranks is None else ranks.rank)
        self._facts = facts
        self._folder = tempfile.TemporaryDirectory(prefix="detcompile-")  # lives as long as what was loaded from it
        for name in (*archive.names(library), *archive.names(TOKENIZER)):
            place = Path(self._folder.name, name)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(archive.read(name))
        ends = SimpleNamespace(eos_token_id=facts["eos_token_ids"], pad_token_id=facts["pad_token_id"])
        tokenizer = str(Path(self._folder.name, TOKENIZER))
        self.model: Any = SimpleNamespace(generation_config=ends, name_or_path=tokenizer)
        self.numerics = Numerics(**facts["numerics"])
        self.max_context = facts["max_context"]
        self.ranks = ranks
        self.vocab_size = facts["num_token_ids"]
        self.certificate = _certificate(json.loads(archive.read(CERTIFICATE)), self.numerics)
        self._num_logits = facts["num_logits"]
        self._kv_shapes = tuple(KVShape(*shape) for shape in facts["kv_shapes"])
        self._kv_groups = tuple(KVGroup(tuple(layers), window) for layers, window in facts["kv_groups"])
        self._parts = {}
        self._state_shapes = tuple(StateShape(tuple(shape), float32) for shape, float32 in facts["state_shapes"])
        self.recurrences = None
        self._generator = None
        weights = archive.weights(self.device)
        named = {
            name: weights[held_in].as_strided(shape, stride, offset)
            for name, (held_in, shape, stride, offset) in share["views"].items()
        }
        digests = facts["weight_digests"]
        held = {name: tensor for name, tensor in named.items() if name in digests}
        self._weights = LiveWeights(lambda: held, lambda: named, whole=digests, is_share=ranks is not None)
        program = _Program(Path(self._folder.name, library), share["arguments"], weights, ranks)
        self.forward = in_float_mode(program, self.device, share["num_threads"])
        step = example_step(self._kv_shapes, len(self._kv_groups), self._state_shapes, self.dtype, self.device)
        require_kept(self.forward, self._kv_groups, step)

    @property
    def device(self) -> torch.device:
        """Where the weights live."""
        kind = self._facts["machine"]["device"]
        return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights, the activations and the KV cache."""
        return getattr(torch, self._facts["dtype"])

    @cached_property
    def _fixed_parts(self) -> dict[str, str]:
        return {name: part for name, part in self._facts["fingerprint_parts"].items() if name != "weights"}

    @property
    def engine_model(self) -> EngineModel:
        """What an engine has to know of this model; its hidden states cannot be had."""
        return EngineModel(
            forward=self.forward,
            kv_shapes=self._kv_shapes,
            kv_groups=self._kv_groups,
            state_shapes=self._state_shapes,
            dtype=self.dtype,
            device=self.device,
            max_context=self.max_context,
            num_token_ids=self.vocab_size,
            num_logits=self._num_logits,
            eos_token_ids=stop_tokens(self.model, None),
            weights_version=self._weights.version,
        )

    def head_weight(self) -> Tensor:
        """Not here: an archive does not say which of its weights is the head.

        Raises:
            InvalidInput: always.
        """
        raise InvalidInput("an archive does not say which of its weights is the head: compile the model")

    def medusa_drafter(self, *_arguments: object, **_options: object) -> Any:
        """Not here: an archive holds no program that gives hidden states."""
        raise InvalidInput("Medusa heads read hidden states, which an archive does not give: compile the model")

    def _with_layers(self, layers: tuple[int, ...]) -> CompiledModel:
        raise InvalidInput("an archive holds the whole model only: compile the model to draft with some of its layers")


class _Program:
    """AOTInductor's library, called like the forward that the JIT compiled."""

    def __init__(
        self, folder: Path, arguments: list[int | str], weights: dict[str, Tensor], ranks: TensorParallel | None
    ) -> None:
        (library,) = folder.glob("*.so")
        for operations in folder.glob("*.json"):
            operations.write_text(_for_this_process(operations.read_text(), "" if ranks is None else ranks.group))
        self._arguments = [weights[source] if isinstance(source, str) else source for source in arguments]
        on_gpu = next(iter(weights.values())).device.type == "cuda"
        runners: Any = torch._C._aoti
        if on_gpu:
            # Without the runtime's own bookkeeping of threads: its CUDA events cannot be asked about after a capture.
            self._runner = runners.AOTIModelContainerRunnerCuda(str(library), 1, "cuda", str(folder), True)
        else:
            self._runner = runners.AOTIModelContainerRunnerCpu(str(library), 1)
        self._one_at_a_time = threading.Lock()

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, position_ids: Tensor, step: StepInputs, logits_to_keep: Tensor) -> Tensor:
        given = step_leaves(input_ids, position_ids, step, logits_to_keep)
        with self._one_at_a_time:
            (logits,) = self._runner.run([given[a] if isinstance(a, int) else a for a in self._arguments])
        return logits


def load(path: str | Path, *, tp_group: ProcessGroup | None = None) -> CompiledModel:
    """A compiled model from a file that ``export`` wrote: same bits, same fingerprint.

    Neither transformers' code of the model nor its class is needed, nor a C++ compiler. The ranks of a model that was
    compiled for several run in worker processes again, a RemoteModel then. Where torch.distributed was initialised
    before (torchrun), none are started: every process calls load() and takes its own rank's share.

    Args:
        tp_group: the processes that share the model, as ``compile`` takes them.

    Raises:
        ArchiveError: the file is damaged, or was made for another machine, torch or detcompile.
        InvalidInput: there is no such file; there are too few GPUs, or another number of processes than ranks; ranks
            were given different archives; or this process runs CPU kernels of another compiler.
        UnsupportedModel: the program, run over one step, did not write its KV caches in place
            (passes.programs.cache_writes).
        WorkerError: a worker process could not start.
    """
    path = Path(path)
    if not path.is_file():
        raise InvalidInput(f"{path}: no such file; give one that export wrote")
    opened = Archive(path, rank=None)
    facts = opened.facts
    if facts.get("format") != FORMAT:
        raise ArchiveError(f"{path} has format {facts.get('format')}, known is {FORMAT}: export it again")
    require_model(path, facts)
    reason = obstacle(facts["machine"])
    if reason:
        raise ArchiveError(f"{path} does not run here with its bits: {reason}")
    if facts["fingerprint_parts"]["source"] != source_digest():
        raise ArchiveError(f"{path} was made by another version of detcompile: export it again")
    tp = len(facts["ranks"])
    with _as_exported(path):
        numerics = Numerics(**facts["numerics"])
        _certificate(parsed(path, CERTIFICATE, opened.read(CERTIFICATE)), numerics)
        sound = tp in numerics.tp_sizes and all(_library_of(opened, rank) for rank in range(tp))
    if not sound:
        raise ArchiveError(f"{path} is not what export wrote: no library for each of {tp} ranks. Export it again")
    if tp > 1 and tp_group is None and not dist.is_initialized():
        return load_in_workers(path, tp, numerics, facts["machine"]["device"])
    ranks = tensor_parallel(tp, tp_group) if tp > 1 else None
    archive = Archive(path, 0 if ranks is None else ranks.rank)
    if facts["machine"]["device"] == "cpu":
        _adopt_kernels(archive, facts["machine"]["isa"])
    if ranks is not None:
        ranks.require_equal(facts["fingerprint_parts"])
    with _as_exported(path):
        return ExportedModel(archive, ranks)


def _adopt_kernels(archive: Archive, isa: str) -> None:
    """The kernels that the program was made with, and no others."""
    name = f"{KERNELS}/{isa}.so"
    if archive.names(KERNELS) != [name]:
        raise ArchiveError(f"{archive.path} is not what export wrote: it has no {name}. Copy it, or export it, again.")
    cpu_library.adopt(isa, archive.read(name))


def _library_of(archive: Archive, rank: int) -> bool:
    """Whether there is one library for this rank."""
    return sum(name.endswith(".so") for name in archive.names(library_folder(rank))) == 1


@contextmanager
def _as_exported(path: Path) -> Iterator[None]:
    """What export wrote is read without complaint; what is not fails as that, and not by the exception it comes to."""
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


def _for_this_process(operations: str, group: str) -> str:
    """The operations of a program, as AOTInductor lists them, over this group and with dtypes as this torch reads them.

    The list has a dtype by its number in torch.export's schema. Before 2.12 torch took that for its own number.
    """

    def adapted(value: dict[str, Any]) -> dict[str, Any]:
        if value.get("name") == "group":
            return value | {"arg": {"as_string": group}}
        if "as_scalar_type" in value and not CONVERTS_DTYPES:
            return {"as_scalar_type": DTYPE_NUMBERS[ScalarType(value["as_scalar_type"])]}
        return value

    return json.dumps(json.loads(operations, object_hook=adapted))


def facts_of(model: CompiledModel) -> dict[str, Any]:
    """What an ExportedModel has to know of the model that is exported, as JSON has it."""
    known, parts = model.engine_model, model.fingerprint_parts
    return {
        "format": FORMAT,
        "fingerprint": fingerprint(parts),
        "fingerprint_parts": parts,
        "weight_digests": model.weight_digests(),
        "step": list(StepInputs._fields),
        "numerics": dataclasses.asdict(model.numerics),
        "max_context": model.max_context,
        "dtype": str(model.dtype).removeprefix("torch."),
        "num_token_ids": known.num_token_ids,
        "num_logits": known.num_logits,
        "eos_token_ids": list(known.eos_token_ids),
        "pad_token_id": getattr(getattr(model.model, "generation_config", None), "pad_token_id", None),
        "kv_shapes": [list(shape) for shape in known.kv_shapes],
        "state_shapes": [[list(state.shape), state.float32] for state in known.state_shapes],
        "kv_groups": [[list(group.layers), group.window] for group in known.kv_groups],
    }


def certificate_json(certificate: Certificate) -> bytes:
    """A certificate, whole."""
    entries = [dataclasses.asdict(entry) for entry in certificate.entries]
    sums = [_order_json(order) for order in certificate.sums]
    return json.dumps({"entries": entries, "sums": sums}, indent=1).encode()


def _certificate(content: dict[str, Any], numerics: Numerics) -> Certificate:
    entries = tuple(Entry(**entry) for entry in content["entries"])
    return Certificate(entries, numerics, tuple(_order(order) for order in content["sums"]))


def _order_json(order: SumOrder) -> dict[str, Any]:
    fields = {field.name: getattr(order, field.name) for field in dataclasses.fields(order)}  # type: ignore[arg-type]
    nested = {name: _order_json(value) if isinstance(value, SumOrder) else value for name, value in fields.items()}
    return {"order": type(order).__name__, **nested}


def _order(content: dict[str, Any]) -> SumOrder:
    kind = getattr(orders, content["order"])
    if not (isinstance(kind, type) and issubclass(kind, SumOrder)):
        raise ValueError(f"{content['order']} is no order of a sum")
    fields = {name: _order(value) if isinstance(value, dict) else value for name, value in content.items()}
    return kind(**{name: tuple(v) if isinstance(v, list) else v for name, v in fields.items() if name != "order"})
