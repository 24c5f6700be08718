"""RemoteModel: a CompiledModel whose ranks run in worker processes; compile(tp=n) makes it from a single process, and
load() where that was exported."""

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

__all__ = ["RemoteModel", "compile_in_workers", "load_in_workers"]


class RemoteModel(CompiledModel):
    """A certified causal LM in worker processes. It is called, generates and serves like one in this process.

    A worker that fails ends all of them. An engine has others started in their place and goes on; until one has, every
    call of the model raises the WorkerError. Logits come back to ``device``.

    Attributes:
        stages: stages of the pipeline that the worker processes are.
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
        """``function(model, *args)`` in every worker, with that rank's CompiledModel; the results, in rank order.

        All ranks run it, so that it may call the model. What it raises ends the workers, unless it is one of errors.py.

        Args:
            function: found by its module and name; arguments and results are pickled.
            seconds: longest that it may take; None takes ``group.step_seconds``.

        Raises:
            InvalidInput: the function is of the main script, which the workers do not have, or of a module that they do
                not find; or something that is given cannot be pickled, is no function, or no time.
        """
        return self._workers.apply(function, *args, seconds=seconds)

    def update_weights(self, source: WeightSource) -> int:
        """Give weights new contents, as CompiledModel does; ranks that were lost meanwhile are started again."""
        self._workers.revive()
        return super().update_weights(source)

    def _write_weights(self, given: Mapping[str, Tensor]) -> int:
        try:
            return super()._write_weights(given)
        except WorkerError:  # a rank was lost that nobody had missed: others take the weights
            self._workers.revive()
            return super()._write_weights(given)

    def close(self) -> None:
        """End the workers now. They also end with this object, its engines, and this process."""
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
    step_seconds: float | None = None,
    options: Mapping[str, Any] | None = None,
    nodes: Nodes | None = None,
) -> RemoteModel:
    """Start ``pp * tp`` processes, one a rank, that load and compile ``model``.

    Args:
        model: a checkpoint that was found, which each rank reads by itself, or a module, which is saved once to an
            unlinked temporary file that all ranks map, kept for those in the place of lost ones; or a function, found
            by its module and name, which each rank calls to make the same module on its current device. Ranks on GPUs
            take cuda:0, cuda:1, ….
        step_seconds: time after which a step counts as hung; None takes that of executors.ranks.
            ``group.step_seconds`` of the result can be set at any time.
        options: further arguments of compile(), handed on as they are.
        nodes: ``pp * tp`` processes that torchrun has started, perhaps on several machines; ``model`` is a checkpoint
            then, and each rank takes the GPU of its number on its machine.

    Raises:
        WorkerError: a rank could not start.
        InvalidInput: too few GPUs, one of several GPUs, or a module that cannot be sent.
        Also what compile() raises in the ranks.
    """
    if isinstance(model, Load) and model.device.index is not None:
        ranks = f"tp={tp}" if pp == 1 else f"pp={pp}, tp={tp}"
        raise InvalidInput(f"device='{model.device}' with {ranks}: ranks take cuda:0, cuda:1, …; give cuda or cpu")
    if isinstance(model, Load) and model.trust_remote_code:
        init_hf_modules()  # so that what the ranks say of such a model can be read here
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
        executor = start_ranks(plan, step_seconds, saved, nodes)
        files.pop_all()  # the executor may need the file again
    return RemoteModel(executor)


def load_in_workers(path: Path, tp: int, numerics: Numerics, device_type: str) -> RemoteModel:
    """Start ``tp`` processes, one a rank, that load their shares of an archive.

    Raises:
        WorkerError: a rank could not start.
        InvalidInput: too few GPUs.
        Also what load() raises in the ranks.
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
    """The module in a file without a name, so that nothing is left of it whatever happens."""
    own = {type(module) for module in model.modules() if type(module).__module__ == "__main__"}
    if own:
        raise InvalidInput(
            f"{', '.join(sorted(kind.__name__ for kind in own))} is defined in the main script, which workers do not"
            " read: move it to a module that can be imported"
        )
    with contextlib.ExitStack() as files:
        try:
            with in_temporary_folder():
                file = files.enter_context(tempfile.TemporaryFile())
                torch.save(model, file)
                file.flush()
        except (AttributeError, TypeError, RuntimeError, pickle.PicklingError) as error:
            raise InvalidInput(
                f"{type(model).__name__} cannot be sent to the workers ({error}): give compile() its folder instead"
            ) from error
        files.pop_all()
    return file
