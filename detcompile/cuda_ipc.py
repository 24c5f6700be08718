"""Weights in the memory of another process on the same GPU, as vLLM's IPC weight transfer names them.

The trainer keeps its tensors. For each it sends the arguments of torch's ``rebuild_cuda_tensor`` by the GPU's UUID, as
a pickle in base64. The receiver maps the memory and copies it. Reading the pickle runs no code of it.
"""

import base64
import io
import pickle
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from detcompile.errors import InvalidInput
from detcompile.weight_transfer import TensorInfo

REBUILD = f"{rebuild_cuda_tensor.__module__}.{rebuild_cuda_tensor.__name__}"


class Mapped(NamedTuple):
    """Where a tensor lies in the memory of another process: arguments of ``rebuild_cuda_tensor``, by torch's names."""

    tensor_size: tuple[int, ...]
    tensor_stride: tuple[int, ...]
    tensor_offset: int
    storage_handle: bytes
    storage_size_bytes: int
    storage_offset_bytes: int
    ref_counter_handle: bytes
    ref_counter_offset: int
    event_handle: bytes
    event_sync_required: bool


def gpu_uuid(device: torch.device) -> str:
    """Return the UUID by which handles name a GPU."""
    return str(torch.cuda.get_device_properties(device).uuid)


def update_info(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
    """Return the ``update_info`` of tensors on a GPU; they must stay as they are until the server has answered."""
    info: dict[str, list[Any]] = {"names": [], "dtype_names": [], "shapes": []}
    handles = []
    for name, tensor in tensors:
        handles.append({gpu_uuid(tensor.device): reduce_tensor(tensor.detach())})
        info["names"].append(name)
        info["dtype_names"].append(str(tensor.dtype).removeprefix("torch."))
        info["shapes"].append(list(tensor.shape))
    return {**info, "ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode()}


def read_handles(pickled: str, infos: Sequence[TensorInfo], gpu: str) -> list[Mapped]:
    """Return the handles of tensors on a GPU.

    Raises:
        InvalidInput: they cannot be read, are of other tensors, or of another GPU.
    """
    try:
        handles = _HandleReader(io.BytesIO(base64.b64decode(pickled, validate=True))).load()
    except Exception as error:  # a pickle can raise anything
        raise InvalidInput(f"ipc_handles_pickled cannot be read: {error}") from error
    if not isinstance(handles, list) or len(handles) != len(infos):
        raise InvalidInput("ipc_handles_pickled must be a list with one entry per name")
    return [_mapped(info, by_gpu, gpu) for info, by_gpu in zip(infos, handles)]


def receive(
    infos: Sequence[TensorInfo], handles: Sequence[Mapped], device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield copies of the tensors by name, on the CPU.

    Raises:
        InvalidInput: a tensor cannot be mapped, for example because the trainer has ended.
    """
    with torch.cuda.device(device):
        for info, mapped in zip(infos, handles):
            size, stride, offset, *storage, event, synced = mapped
            handle, num_bytes, start, counter, place = storage
            kind = torch.UntypedStorage, info.dtype, torch.cuda.current_device()
            try:
                tensor = rebuild_cuda_tensor(
                    Tensor, size, stride, offset, *kind, handle, num_bytes, start, False, counter, place, event, synced
                )
                yield info.name, tensor.cpu()
            except RuntimeError as error:
                raise InvalidInput(f"{info.name} cannot be mapped from the trainer's memory: {error}") from error


def _mapped(info: TensorInfo, by_gpu: Any, gpu: str) -> Mapped:
    """Return the handle of a tensor on a GPU.

    Raises:
        InvalidInput: there is none, or it is of another tensor.
    """
    if not isinstance(by_gpu, dict) or gpu not in by_gpu:
        raise InvalidInput(f"{info.name} has no handle for GPU {gpu}: the trainer must keep its weights on this GPU")
    given = by_gpu[gpu]
    if isinstance(given, tuple) and len(given) == 2 and given[0] == REBUILD:  # as ``reduce_tensor`` returns it
        given = given[1]
    try:
        _, size, stride, offset, _, dtype, _, handle, num_bytes, start, _, counter, place, event, synced = given
        mapped = Mapped(size, stride, offset, handle, num_bytes, start, counter, place, event, bool(synced))
        numbers = (*size, *stride, offset, num_bytes, start, place)
        extent = offset + 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        is_valid = (
            all(type(number) is int and number >= 0 for number in numbers)
            and all(type(part) is bytes for part in (handle, counter, event))
            and (min(size, default=1) == 0 or extent * info.dtype.itemsize <= num_bytes)
        )
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"{info.name}: its handle is not of this form of torch: {error}") from error
    if not is_valid:
        raise InvalidInput(f"{info.name}: its handle names memory outside of its storage, or is not one of CUDA")
    if tuple(size) != info.shape or dtype != str(info.dtype):
        expected = f"{info.dtype} {list(info.shape)}"
        raise InvalidInput(f"{info.name}: its handle is of {dtype} {list(size)}, not of {expected}")
    return mapped


class _HandleReader(pickle.Unpickler):
    """Reads the arguments of ``rebuild_cuda_tensor``; torch's classes and dtypes are replaced by their names."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a name's text; reject names outside of torch."""
        if (module, name) == ("torch", "Size"):
            return tuple
        if module.partition(".")[0] == "torch":
            return f"{module}.{name}"
        raise pickle.UnpicklingError(f"{module}.{name} is not part of a handle")
