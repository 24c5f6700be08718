"""RemoteModel: a CompiledModel whose ranks run in worker processes; compile(tp=n) makes it from a single process,
and load() where that was exported.

The parent keeps what decides: requests, scheduler, prefix cache, block tables. The workers hold what computes: weights,
KV caches, samplers. So a step sends its arrays, and gets its tokens back.
"""

import contextlib
import pickle
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from detcompile.config import gpus_shared
from detcompile.errors import InvalidInput
from detcompile.models.compiled import CompiledModel
from detcompile.models.live_weights import WeightSource
from detcompile.orders.numerics import Numerics
from detcompile.parallel import rank_device
from detcompile.passes.proof.certificate import Certificate
from detcompile.runtime.dense.end_tokens import stop_tokens
from detcompile.runtime.engine import Engine
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.engine_setup import EngineModel, engine_over
from detcompile.runtime.kv.kv_cache import KVShape
from detcompile.runtime.processes.group import WorkerGroup
from detcompile.runtime.processes.remote_worker import (
    PackedTensor,
    RemoteRunner,
    RemoteWorker,
    free_abandoned,
    pack_tensor,
    unpack_tensor,
)
from detcompile.runtime.processes.start_progress import StartProgress
from detcompile.runtime.speculation.drafter import require_fitting
from detcompile.runtime.speculation.speculator import SpeculationConfig
from detcompile.step import KVGroup

__all__ = ["ModelFacts", "RankPlan", "RemoteModel", "START_SECONDS", "compile_in_workers", "load_in_workers"]

STEP_SECONDS = {"cuda": 300.0, "cpu": 3600.0}  # a step may compile GPU kernels on its way; CPUs take their time
START_SECONDS = 3600.0  # loading, compiling, and capturing CUDA graphs


class RankPlan(NamedTuple):
    """What every rank is told at its start."""

    path: str | None  # of the model's folder
    file: int | None  # descriptor of a saved module
    build: Callable[[], PreTrainedModel] | None  # what else makes the module, on the rank's device
    tp: int
    numerics: Numerics
    max_context: int | None
    device_type: str
    num_threads: int
    options: dict[str, Any]  # of compile(), handed on
    archive: str | None = None  # that export wrote, which each rank loads instead


class ModelFacts(NamedTuple):
    """What the parent knows of the model that its workers hold."""

    config: Any  # None of an archive
    generation_config: Any
    name_or_path: str
    certificate: Certificate
    max_context: int
    vocab_size: int
    num_logits: int
    kv_shapes: tuple[KVShape, ...]  # of rank 0
    kv_groups: tuple[KVGroup, ...]
    dtype: torch.dtype
    device: torch.device
    hidden_size: int

    @classmethod
    def of(cls, model: CompiledModel) -> "ModelFacts":
        """In the worker."""
        known = model.engine_model
        return cls(
            getattr(model.model, "config", None),
            getattr(model.model, "generation_config", None),
            model.model.name_or_path,
            model.certificate,
            model.max_context,
            known.num_token_ids,
            known.num_logits,
            known.kv_shapes,
            known.kv_groups,
            known.dtype,
            known.device,
            known.hidden_size,
        )


class RemoteModel(CompiledModel):
    """A certified causal LM in worker processes. It is called, generates and serves like one in this process.

    ``model`` stands for the module and has its ``config``, ``generation_config`` and ``name_or_path`` only; there is
    no ``forward`` and no ``kv_cache`` here. A worker that fails ends all of them, and every call then raises its
    WorkerError. Logits come back to ``device``.

    Args:
        group: of workers.RankServer, started.
    """

    def __init__(self, group: WorkerGroup, facts: ModelFacts, numerics: Numerics) -> None:
        self.model: Any = SimpleNamespace(
            config=facts.config, generation_config=facts.generation_config, name_or_path=facts.name_or_path
        )
        self.numerics = numerics
        self.max_context = facts.max_context
        self.certificate = facts.certificate
        self.ranks = None
        self.vocab_size = facts.vocab_size
        self.group = group
        self._num_logits = facts.num_logits
        self._kv_shapes = facts.kv_shapes
        self._kv_groups = facts.kv_groups
        self._state_shapes = ()  # ranks share no model that has any
        self._facts = facts
        self._abandoned: deque[int] = deque()
        self._workers = SimpleNamespace(weights_version=0)
        self._generator = None

    @property
    def device(self) -> torch.device:
        """Where rank 0 has its weights."""
        return self._facts.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights, the activations and the KV cache."""
        return self._facts.dtype

    @property
    def fingerprint_parts(self) -> dict[str, str]:
        """What the contract holds fixed, by name; the same as of a model in this process."""
        return self.group.call("fingerprint_parts", seconds=START_SECONDS)[0]

    def weight_digests(self) -> dict[str, str]:
        """As ``CompiledModel.weight_digests``; every worker looks at its share."""
        return self.group.call("weight_digests", seconds=START_SECONDS)[0]

    def engine(
        self,
        config: EngineConfig | None = None,
        *,
        tokenizer: Any | None = None,
        speculation: SpeculationConfig | None = None,
    ) -> Engine:
        """As ``CompiledModel.engine``; its steps run in the workers.

        ``memory_fraction`` is of each rank's GPU; ranks on one GPU or on a CPU share what it leaves.
        """
        config = config or EngineConfig()
        num_blocks = config.num_blocks
        if num_blocks is None:
            ranks = self.group.num_ranks
            devices = {rank_device(self.device.type, rank) for rank in range(ranks)}
            sharers = -(-ranks // len(devices))
            asked = (config, sharers, speculation is not None)
            num_blocks = min(self.group.call("affordable_blocks", *asked, seconds=START_SECONDS))
        with_states = speculation is not None and speculation.reads_states
        if speculation is not None and with_states:
            require_fitting(speculation.drafter, self._num_logits, self._facts.hidden_size, None)
        given = (config, num_blocks, with_states)
        worker = RemoteWorker(self.group, self._abandoned, given, START_SECONDS, self.device)
        tokenizer = self.tokenizer if tokenizer is None else tokenizer
        return engine_over(worker, num_blocks, self.engine_model, config, tokenizer, speculation)

    def head_weight(self) -> Tensor:
        """As ``CompiledModel.head_weight``, on ``device``; it travels whole."""
        (weight, *_) = self.apply(_head_of_first_rank, seconds=START_SECONDS)
        return unpack_tensor(weight).to(self.device)

    def drafter(self, *_arguments: object, **_options: object) -> Any:
        """Not here: a draft model is small, and its logits are read at every token."""
        raise InvalidInput("a drafter runs in the caller's process: compile the draft model with tp=1")

    def apply(self, function: Callable[..., Any], *args: Any, seconds: float | None = None) -> list[Any]:
        """``function(model, *args)`` in every worker, with that rank's CompiledModel; the results, in rank order.

        All ranks run it, so that it may call the model. What it raises ends the workers, unless it is one of errors.py.

        Args:
            function: found by its module and name; arguments and results are pickled.
            seconds: that it may take; default: ``group.step_seconds``.

        Raises:
            InvalidInput: the function is of the main script, which the workers do not have.
        """
        if getattr(function, "__module__", None) == "__main__":
            raise InvalidInput(f"{function} is of the main script, which workers do not have: import it from a module")
        free_abandoned(self.group, self._abandoned)
        results = self.group.call("apply", function, args, seconds=seconds)
        self._workers.weights_version = max(self.group.call("weights_version"))  # it may have changed them
        return results

    def update_weights(self, source: WeightSource) -> int:
        """Not here: ranks that share a model take no new weights yet.

        Raises:
            InvalidInput: always.
        """
        raise InvalidInput("update_weights: ranks share this model: compile it with tp=1, or load and compile it again")

    @property
    def weights_version(self) -> int:
        """As ``CompiledModel.weights_version``, as far as ``apply`` has changed them."""
        return self._workers.weights_version

    @property
    def engine_model(self) -> EngineModel:
        """As ``CompiledModel.engine_model``, without the forward."""
        facts, workers = self._facts, self._workers
        return EngineModel(
            forward=_no_forward,
            kv_shapes=facts.kv_shapes,
            kv_groups=facts.kv_groups,
            dtype=facts.dtype,
            device=facts.device,
            max_context=facts.max_context,
            num_token_ids=facts.vocab_size,
            num_logits=facts.num_logits,
            eos_token_ids=stop_tokens(self.model, None),
            hidden_size=facts.hidden_size,
            weights_version=lambda *, look=False: workers.weights_version,
        )

    def close(self) -> None:
        """End the workers now. They also end with this object, its engines, and this process."""
        self.group.close()

    def __enter__(self) -> "RemoteModel":
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def _runner(self, num_blocks: int, block_size: int, cuda_graphs: bool, num_states: int = 0) -> Any:
        return RemoteRunner(self.group, self._abandoned, (num_blocks, block_size, cuda_graphs), self.device)


def compile_in_workers(
    model: PreTrainedModel | str | Path | Callable[[], PreTrainedModel],
    *,
    tp: int,
    numerics: Numerics,
    max_context: int | None = None,
    step_seconds: float | None = None,
    options: Mapping[str, Any] | None = None,
) -> RemoteModel:
    """Start ``tp`` processes, one a rank, that load and compile ``model``.

    Args:
        model: a folder, which each rank reads by itself, or a module, which is saved once to an unlinked temporary
            file that all ranks map; or a function, found by its module and name, which each rank calls to make the
            same module on its current device. Ranks on GPUs take cuda:0, cuda:1, ….
        step_seconds: after which a step counts as hung; default: by STEP_SECONDS. ``group.step_seconds`` of the result
            can be set at any time.
        options: of compile(), handed on as they are.

    Raises:
        WorkerError: a rank could not start. InvalidInput: too few GPUs, or a module that cannot be sent.
        Also what compile() raises in the ranks.
    """
    device_type = _device_type(model)
    with contextlib.ExitStack() as files:
        saved = files.enter_context(_saved(model)) if isinstance(model, nn.Module) else None
        plan = RankPlan(
            path=str(model) if isinstance(model, (str, Path)) else None,
            file=None if saved is None else saved.fileno(),
            build=None if isinstance(model, (str, Path, nn.Module)) else model,
            tp=tp,
            numerics=numerics,
            max_context=max_context,
            device_type=device_type,
            num_threads=_threads_of_rank(tp),
            options=dict(options or {}),
        )
        return _started(plan, step_seconds)


def load_in_workers(path: Path, tp: int, numerics: Numerics, device_type: str) -> RemoteModel:
    """Start ``tp`` processes, one a rank, that load their shares of an archive.

    Raises:
        WorkerError: a rank could not start. InvalidInput: too few GPUs. Also what load() raises in the ranks.
    """
    plan = RankPlan(
        path=None,
        file=None,
        build=None,
        tp=tp,
        numerics=numerics,
        max_context=None,
        device_type=device_type,
        num_threads=_threads_of_rank(tp),
        options={},
        archive=str(path.absolute()),
    )
    return _started(plan)


def _started(plan: RankPlan, step_seconds: float | None = None) -> RemoteModel:
    found, needed = torch.cuda.device_count(), 1 if gpus_shared() else plan.tp
    if plan.device_type == "cuda" and found < needed:
        instead = "take a smaller tp, or a module on the CPU" if plan.archive is None else "export it with a smaller tp"
        shared = "; DETCOMPILE_SHARED_GPUS=1 lets ranks share GPUs, to compare bits and not for speed" if found else ""
        raise InvalidInput(f"tp={plan.tp} needs {needed} GPUs, this machine has {found}: {instead}{shared}")
    group = WorkerGroup(
        plan.tp,
        "detcompile.workers:RankServer",
        (plan,),
        step_seconds=STEP_SECONDS[plan.device_type] if step_seconds is None else step_seconds,
        files=() if plan.file is None else (plan.file,),
    )
    with StartProgress(plan.tp) as progress:
        group.on_note = progress.on_note
        try:
            group.result(group.started)
            port = group.call("open_store")[0]
            facts = group.call("start", port, seconds=START_SECONDS)[0]
        except BaseException:
            group.close()
            raise
    group.on_note = lambda rank, text: None
    return RemoteModel(group, facts, plan.numerics)


def _threads_of_rank(tp: int) -> int:
    return max(1, torch.get_num_threads() // tp)


def _head_of_first_rank(model: CompiledModel) -> PackedTensor | None:
    weight = model.head_weight()
    return pack_tensor(weight) if model.ranks is None or model.ranks.rank == 0 else None


def _device_type(model: PreTrainedModel | str | Path | Callable[[], PreTrainedModel]) -> str:
    elsewhere = "cuda" if torch.cuda.is_available() else "cpu"
    device_type: str = getattr(model, "device", torch.device(elsewhere)).type
    return device_type


@contextlib.contextmanager
def _saved(model: PreTrainedModel) -> Iterator[IO[bytes]]:
    """The module in a file without a name, so that nothing is left of it whatever happens."""
    own = {type(module) for module in model.modules() if type(module).__module__ == "__main__"}
    if own:
        raise InvalidInput(
            f"{', '.join(sorted(kind.__name__ for kind in own))} is defined in the main script, which workers do not"
            " read: move it to a module that can be imported"
        )
    with tempfile.TemporaryFile() as file:
        try:
            torch.save(model, file)
        except (AttributeError, TypeError, RuntimeError, pickle.PicklingError) as error:
            raise InvalidInput(
                f"{type(model).__name__} cannot be sent to the workers ({error}): give compile() its folder instead"
            ) from error
        file.flush()
        yield file


def _no_forward(*_arguments: object) -> torch.Tensor:
    raise AssertionError("the forward of this model runs in its workers")
