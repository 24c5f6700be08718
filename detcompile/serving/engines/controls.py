"""Controls: changes of an engine's weights and caches. New weights are read and checked before any tensor changes.

``load`` and ``receive`` read weights in a thread while the engine runs. ``commit`` writes them between two steps, while
the engine has no request. ``join`` and ``receive`` wait for a trainer, each in its own thread; a later ``join`` takes
the place of an earlier one, and ``drop`` that of a ``receive``.
"""

import functools
import math
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from detcompile.cuda_ipc import Importer, gpu_uuid, read_handles
from detcompile.digests import weights_digest
from detcompile.errors import DetcompileError, InvalidInput, StorageError
from detcompile.executors.live_weights import LiveWeights
from detcompile.models.checkpoints import read_weights
from detcompile.models.compiled import CompiledModel
from detcompile.runtime.engine import Engine
from detcompile.serving.engines.engine_verifications import Verifications
from detcompile.serving.engines.protocol import Control, Controlled
from detcompile.weight_transfer import TensorInfo, TransferGroup
from detcompile.weights import weight_digests

Action = Callable[..., dict[str, Any]]
MOST_BYTES = 16  # of a transfer, per parameter of the model


class Controls:
    """Runs actions one at a time, in order. Commands may be added from any thread.

    Args:
        model: the served model.
        engine: its engine.
        verifications: gets the fingerprint parts of new weights.
        send: sends reports to the front end.
    """

    def __init__(
        self, model: CompiledModel, engine: Engine, verifications: Verifications, send: Callable[[Any], None]
    ) -> None:
        self._model = model
        self._engine = engine
        self._verifications = verifications
        self._send = send
        self._staged: dict[str, Tensor] = {}  # new weights
        self._kept: dict[str, Tensor] = {}  # current weights that a partial update keeps
        self._waiting: deque[Control] = deque()
        self._reader = ThreadPoolExecutor(1, "weights")
        self._group: TransferGroup | None = None
        self._importer = Importer(model.device)
        self._changing = threading.Lock()  # held while the group or the staged weights change
        self._latest: dict[str, int] = {}  # call_id by action; results of earlier calls are dropped
        self._with_trainer: Mapping[str, Action] = {"join": self._join, "receive": self._receive}
        self._beside_steps: Mapping[str, Action] = {
            "drop": self._drop,
            "keep": self._keep,
            "leave": self._leave,
            "load": self._load,
            "load_adapter": self._load_adapter,
            "prepare_ipc": self._prepare_ipc,
            "save": self._save,
            "unload_adapter": self._unload_adapter,
        }
        self._between_steps: Mapping[str, Action] = {
            "check": self._check,
            "commit": self._commit,
            "digests": self._digests,
            "forget_prefixes": self._forget_prefixes,
        }

    def add(self, command: Control) -> None:
        """Queue an action."""
        if command.action in self._with_trainer:
            with self._changing:
                self._latest[command.action] = command.call_id
            action = functools.partial(self._with_trainer[command.action], command.call_id)
            threading.Thread(target=self._run, args=(command, action), daemon=True).start()
        elif command.action in self._beside_steps:
            self._reader.submit(self._run, command, self._beside_steps[command.action])
        else:
            self._waiting.append(command)

    def step(self) -> bool:
        """Run the next action that needs to be alone; return False if there is none."""
        if not self._waiting:
            return False
        command = self._waiting.popleft()
        self._run(command, self._between_steps[command.action])
        return True

    def _run(self, command: Control, action: Action) -> None:
        """Run an action and report its result, or why there is none."""
        try:
            report = Controlled(command.call_id, action(**command.arguments))
        except torch.AcceleratorError:
            raise
        except DetcompileError as error:
            report = Controlled(command.call_id, {}, str(error), isinstance(error, InvalidInput))
        except Exception as error:
            report = Controlled(command.call_id, {}, f"{command.action} failed: {error!r}")
        self._send(report)

    def _load(self, path: str, partial: bool = False, current: str | None = None) -> dict[str, Any]:
        """Stage the weights of a folder, for ``check``.

        Args:
            partial: keep the weights that the folder lacks.
            current: folder of the current weights, read if other processes hold them.
        """
        self._forget_staged()
        staged = read_weights(Path(path))
        kept = self._others(staged, current) if partial else {}
        self._staged, self._kept = staged, kept
        return {}

    def _others(self, staged: Mapping[str, Tensor], current: str | None) -> dict[str, Tensor]:
        """Return the current weights that are not staged, each once.

        Raises:
            InvalidInput: other processes hold them, and ``current`` has other weights.
        """
        module = self._model.model
        if self._model.numerics.is_exact:
            raise InvalidInput("partial: the engines hold quantized weights (--numerics): give whole ones")
        if isinstance(module, nn.Module):
            held = module.state_dict(keep_vars=True)
            by_id = {id(tensor): name for name, tensor in reversed(held.items())}
            given = {id(held[name]) for name in staged if name in held}
            return {name: held[name].detach() for key, name in by_id.items() if key not in given}
        if current is None:
            raise InvalidInput("partial: with --tp or --pp, first give whole weights from a folder")
        whole, digests = read_weights(Path(current)), self._model.weight_digests()
        read = weight_digests({name: tensor for name, tensor in whole.items() if name in digests})
        changed = next((name for name, digest in read.items() if digests[name] != digest), None)
        if changed is not None:
            raise InvalidInput(f"partial: {current} has changed since it was loaded ({changed}): give whole weights")
        return {name: tensor for name, tensor in whole.items() if name not in staged}

    def _keep(self, names: list[str], current: str | None) -> dict[str, Any]:
        """Keep the current weights that a transfer did not send, for ``check``.

        Args:
            names: what was sent.
            current: as for ``load``.
        """
        if self._staged.keys() != set(names):
            raise InvalidInput("tensors of this update are lost, by another update or with an engine: send all again")
        self._kept = self._others(self._staged, current)
        return {}

    def _forget_staged(self) -> None:
        self._staged, self._kept = {}, {}
        self._importer.close()

    def _load_adapter(self, name: str, path: str) -> dict[str, Any]:
        return {"digest": self._engine.load_adapter(name, path)}

    def _unload_adapter(self, name: str) -> dict[str, Any]:
        self._engine.unload_adapter(name)
        return {}

    def _prepare_ipc(self) -> dict[str, Any]:
        if self._model.device.type != "cuda":
            raise InvalidInput("CUDA IPC needs engines on a GPU; to join a group, init_info needs master_address")
        return {}

    def _join(self, call_id: int, address: str, port: int, rank: int, size: int, seconds: float) -> dict[str, Any]:
        """Join a weight transfer, in place of an earlier one."""
        with self._changing:
            self._leave_group()
            self._latest.pop("receive", None)
        group = TransferGroup(address, port, rank, size, self._model.device, seconds)
        with self._changing:
            self._require_latest("join", call_id)
            self._group = group
        return {}

    def _leave(self) -> dict[str, Any]:
        """Leave the weight transfer; what was received is forgotten."""
        with self._changing:
            self._leave_group()
            self._latest.clear()
        return {}

    def _leave_group(self) -> None:
        if self._group is not None:
            self._group.abort()
        self._group = None
        self._forget_staged()

    def _require_latest(self, action: str, call_id: int) -> None:
        if self._latest.get(action) != call_id:
            raise InvalidInput("a later call ended this weight transfer")

    def _receive(
        self,
        call_id: int,
        names: list[str],
        dtype_names: list[str],
        shapes: list[list[int]],
        packed: bool,
        bucket_bytes: int,
        ipc_handles: str | None = None,
    ) -> dict[str, Any]:
        """Stage tensors of a transfer; ``check`` says later whether they fit, so that the sender need not wait."""
        infos = [
            TensorInfo(name, dtype_of(dtype), tuple(shape)) for name, dtype, shape in zip(names, dtype_names, shapes)
        ]
        num_bytes = sum(math.prod(max(1, size) for size in info.shape) * info.dtype.itemsize for info in infos)
        if num_bytes > MOST_BYTES * self._model.num_parameters():
            raise InvalidInput(f"shapes: {num_bytes} bytes are far more than the model has")
        if ipc_handles is None:
            received = self._broadcast(infos, packed, bucket_bytes)
        else:
            self._prepare_ipc()
            handles = read_handles(ipc_handles, infos, gpu_uuid(self._model.device))
            received = list(self._importer.receive(infos, handles))
        with self._changing:
            self._require_latest("receive", call_id)
            for name, tensor in received:
                if name in self._staged:
                    raise InvalidInput(f"{name} was sent twice: send each tensor once")
                self._staged[name] = tensor
        return {}

    def _broadcast(self, infos: list[TensorInfo], packed: bool, bucket_bytes: int) -> list[tuple[str, Tensor]]:
        """Receive tensors from the group's trainer."""
        group = self._group
        if group is None:
            raise InvalidInput(
                "an engine has not joined the weight transfer, perhaps because it was restarted: init it again"
            )
        try:
            return list(group.receive(infos, packed=packed, bucket_bytes=bucket_bytes))
        except InvalidInput:
            with self._changing:
                if self._group is group:
                    self._group = None  # what the sender has yet to send would be taken for the next update
            raise

    def _check(self) -> dict[str, Any]:
        require_whole(self._model, self._kept | self._staged)
        return {}

    def _drop(self) -> dict[str, Any]:
        with self._changing:
            self._forget_staged()
            self._latest.pop("receive", None)
        return {}

    def _save(self, path: str) -> dict[str, Any]:
        """Write the new weights to a file."""
        try:
            save_file({name: tensor.contiguous() for name, tensor in (self._kept | self._staged).items()}, path)
        except Exception as error:  # the library has no type of its own
            raise StorageError(f"{path}: the new weights cannot be written: {error}") from error
        return {}

    def _commit(self) -> dict[str, Any]:
        """Write the staged weights into the model."""
        self._end_cancelled()
        kept, staged = self._kept, self._staged
        self._forget_staged()
        self._model.update_weights(staged if isinstance(self._model.model, nn.Module) else kept | staged)
        parts = {name: str(part) for name, part in self._model.fingerprint_parts.items()}
        self._verifications.follow(parts)
        return {"fingerprint_parts": parts}

    def _digests(self) -> dict[str, Any]:
        digests = self._model.weight_digests()
        return {"checksums": digests, "weights": weights_digest(digests)}

    def _forget_prefixes(self) -> dict[str, Any]:
        self._end_cancelled()
        self._engine.forget_prefixes()
        return {}

    def _end_cancelled(self) -> None:
        """Run the steps that end requests which the front end has canceled."""
        while self._engine.has_unfinished_requests:
            self._engine.step()


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a name such as bfloat16 or torch.bfloat16.

    Raises:
        InvalidInput: torch has no dtype of this name.
    """
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise InvalidInput(f"dtype_names: {name[:40]!r} is not a dtype of torch")
    return dtype


def require_whole(model: CompiledModel, tensors: Mapping[str, Tensor]) -> None:
    """Reject new weights that do not fit, or that lack a parameter.

    Names of tied weights, and parameters of ranks in other processes, are checked by ``update_weights``.

    Raises:
        InvalidInput: names the tensor.
    """
    if model.numerics.is_exact:  # it holds weights of other names and dtypes
        if isinstance(model.executor.weights, LiveWeights):
            model.executor.weights.require_whole(tensors)
        return
    for name, digest in model.weight_digests().items():
        tensor = tensors.get(name)
        if tensor is not None:
            given = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            expected = digest.rpartition(" ")[0]
            if given != expected:
                raise InvalidInput(f"{name} is {given}, the model's is {expected}: nothing was changed")
    if not isinstance(model.model, nn.Module):
        return
    named = dict(model.model.named_parameters(remove_duplicate=False))
    known = {**named, **dict(model.model.named_buffers(remove_duplicate=False))}
    unknown = next((name for name in tensors if name not in known), None)
    if unknown is not None:
        raise InvalidInput(f"the model has no {unknown[:200]}: use the names of state_dict(). Nothing was changed")
    given_ids = {id(parameter) for name, parameter in named.items() if name in tensors}
    missing = next((name for name, parameter in named.items() if id(parameter) not in given_ids), None)
    if missing is not None:
        raise InvalidInput(f"{missing} is missing: give all parameters. Nothing was changed")
