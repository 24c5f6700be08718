"""RemoteModel: a CompiledModel whose ranks run in worker processes; from compile(tp=n) in one process, or load()."""

import contextlib
import pickle
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from detcompile.errors import InvalidInput, WorkerError
from detcompile.executors.ranks import Nodes, RankPlan, start_ranks
from detcompile.executors.remote import RemoteExecutor
from detcompile.models.certified import WeightSource
from detcompile.models.compiled import CompiledModel
from detcompile.models.loading import Load
from detcompile.orders.numerics import Numerics
from detcompile.runtime.processes.group import WorkerGroup
from detcompile.storage import in_temporary_folder
from detcompile.transformers_internals.auto_classes import init_hf_modules


class RemoteModel(CompiledModel):
    """A certified causal LM in worker processes. It is called, generates and serves like a local one.

    If a worker fails, all of them end. An engine starts replacements and continues; until then every call of the model
    raises the WorkerError. Logits are returned on ``device``.

    Attributes:
        stages: number of pipeline stages.
    """

    def __init__(self, executor: RemoteExecutor) -> None:
        super().__init__(executor)
        self.stages = executor.pp
        self._workers = executor

    @property
    def group(self) -> WorkerGroup:
        """The worker processes."""
        return self._workers.group

    def apply(self, function: Callable[..., Any], *args: Any, seconds: float | None = None) -> list[Any]:
        """Run ``function(model, *args)`` in every worker with its CompiledModel; return the results in rank order.

        All ranks run it, so it may call the model. Exceptions end the workers, except those of errors.py.

        Args:
            function: located by its module and name; arguments and results are pickled.
            seconds: time limit; None uses ``group.step_seconds``.

        Raises:
            InvalidInput: the function is in the main script, which workers do not load, or in a module that they cannot
                import; an argument cannot be pickled; ``function`` is not callable; or ``seconds`` is not a time.
        """
        return self._workers.apply(function, *args, seconds=seconds)

    def update_weights(self, source: WeightSource) -> int:
        """Write new weights, as CompiledModel does; lost ranks are restarted first."""
        self._workers.revive()
        return super().update_weights(source)

    def _write_weights(self, tensors: Mapping[str, Tensor]) -> int:
        try:
            return super()._write_weights(tensors)
        except WorkerError:  # a loss of a rank was not noticed before: its replacement receives the weights
            self._workers.revive()
            return super()._write_weights(tensors)

    def close(self) -> None:
        """End the workers now. They also end when this object and its engines, or this process, end."""
        self._workers.close()

    def __enter__(self) -> "RemoteModel":
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def compile_in_workers(
    model: PreTrainedModel | Load | Callable[[], PreTrainedModel],
    *,
    tp: int,
    pp: int = 1,
    numerics: Numerics,
    max_context: int | None = None,
    options: Mapping[str, Any] | None = None,
    nodes: Nodes | None = None,
) -> RemoteModel:
    """Start ``pp * tp`` processes, one per rank, that load and compile ``model``.

    Args:
        model: a Load, whose checkpoint each rank reads itself; or a module, which is saved once to an unlinked
            temporary
            file that all ranks map, kept for replacements of lost ranks; or a function, located by its module and name,
            that builds the same module on each rank's current device. Ranks on GPUs take cuda:0, cuda:1, ….
        options: further arguments of compile().
        nodes: ``pp * tp`` processes started by torchrun, possibly on several machines; ``model`` is then a Load, and
            each rank takes the GPU of its local number.

    Raises:
        WorkerError: a rank could not start.
        InvalidInput: there are too few GPUs, the device names a single GPU, or the module cannot be sent.
        Also the errors of compile() in the ranks.
    """
    if isinstance(model, Load) and model.device.index is not None:
        ranks = f"tp={tp}" if pp == 1 else f"pp={pp}, tp={tp}"
        raise InvalidInput(f"device='{model.device}' with {ranks}: ranks take cuda:0, cuda:1, …; pass cuda or cpu")
    if isinstance(model, Load) and model.trust_remote_code:
        init_hf_modules()  # so that ranks' errors with classes of the model's code can be unpickled here
    device_type = _device_type(model)
    with contextlib.ExitStack() as files:
        saved = files.enter_context(_saved(model)) if isinstance(model, nn.Module) else None
        plan = RankPlan(
            tp=tp,
            pp=pp,
            numerics=numerics,
            device_type=device_type,
            num_threads=_threads_of_rank(pp * tp) if nodes is None else torch.get_num_threads(),  # as torchrun has them
            options=dict(options or {}),
            load=model.on if isinstance(model, Load) else None,
            file=None if saved is None else saved.fileno(),
            build=None if isinstance(model, (Load, nn.Module)) else model,
            max_context=max_context,
            host=None if nodes is None else nodes.host,
        )
        executor = start_ranks(plan, saved, nodes)
        files.pop_all()  # the executor may need the file again
    return RemoteModel(executor)


def load_in_workers(path: Path, tp: int, numerics: Numerics, device_type: str) -> RemoteModel:
    """Start ``tp`` processes, one per rank, that load their shares of an archive.

    Raises:
        WorkerError: a rank could not start.
        InvalidInput: there are too few GPUs.
        Also the errors of load() in the ranks.
    """
    plan = RankPlan(
        tp=tp,
        numerics=numerics,
        device_type=device_type,
        num_threads=_threads_of_rank(tp),
        options={},
        archive=str(path.absolute()),
    )
    return RemoteModel(start_ranks(plan))


def _threads_of_rank(tp: int) -> int:
    return max(1, torch.get_num_threads() // tp)


def _device_type(model: PreTrainedModel | Load | Callable[[], PreTrainedModel]) -> str:
    elsewhere = "cuda" if torch.cuda.is_available() else "cpu"
    device_type: str = getattr(model, "device", torch.device(elsewhere)).type
    return device_type


def _saved(model: PreTrainedModel) -> IO[bytes]:
    """Save the module to an unnamed temporary file, which never outlives its users."""
    local = {type(module) for module in model.modules() if type(module).__module__ == "__main__"}
    if local:
        raise InvalidInput(
            f"{', '.join(sorted(kind.__name__ for kind in local))} is defined in the main script, which workers do not"
            " load: move it to a module that can be imported"
        )
    with contextlib.ExitStack() as files:
        try:
            with in_temporary_folder():
                file = files.enter_context(tempfile.TemporaryFile())
                torch.save(model, file)
                file.flush()
        except (AttributeError, TypeError, RuntimeError, pickle.PicklingError) as error:
            raise InvalidInput(
                f"{type(model).__name__} cannot be sent to the workers ({error}): pass its folder to compile() instead"
            ) from error
        files.pop_all()
    return file
