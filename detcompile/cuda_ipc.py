"""Weights in the memory of another process on the same GPU, as vLLM's IPC weight transfer names them.

The trainer keeps its tensors. For each it sends the arguments of torch's ``rebuild_cuda_tensor`` by the GPU's UUID, as
a pickle in base64. Or it packs several into one buffer of bytes, which it fills again for the next ones, and sends the
arguments of this buffer. The receiver maps the memory and copies it. Reading the pickle runs no code of it.
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
from detcompile.weight_transfer import TensorInfo, unpacked

PACKED = "the packed buffer"
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


def read_handles(pickled: str, infos: Sequence[TensorInfo], gpu: str) -> list[Mapped] | Mapped:
    """Return the handles of tensors on a GPU, or the one of the buffer that they are packed into.

    Raises:
        InvalidInput: they cannot be read, are of other tensors, or of another GPU.
    """
    try:
        handles = _HandleReader(io.BytesIO(base64.b64decode(pickled, validate=True))).load()
    except Exception as error:  # a pickle can raise anything
        raise InvalidInput(f"ipc_handles_pickled cannot be read: {error}") from error
    if isinstance(handles, dict):
        buffer = TensorInfo(PACKED, torch.uint8, (sum(info.nbytes for info in infos),))
        return _mapped(buffer, handles, gpu, may_be_larger=True)
    if not isinstance(handles, list) or len(handles) != len(infos):
        raise InvalidInput("ipc_handles_pickled must have one handle per name, or that of a packed buffer")
    return [_mapped(info, by_gpu, gpu) for info, by_gpu in zip(infos, handles)]


class Importer:
    """Copies tensors out of another process's memory on a GPU.

    A buffer stays mapped until ``close``: its trainer counts one mapping, however often it is filled.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer: tuple[Mapped, Tensor] | None = None

    def receive(self, infos: Sequence[TensorInfo], handles: list[Mapped] | Mapped) -> Iterator[tuple[str, Tensor]]:
        """Yield copies of the tensors by name, on the CPU.

        Raises:
            InvalidInput: a tensor cannot be mapped, for example because the trainer has ended.
        """
        if isinstance(handles, Mapped):
            buffer = self._buffer
            if buffer is None or buffer[0] != handles:
                buffer = self._buffer = handles, self._map(PACKED, torch.uint8, handles)
            yield from unpacked(infos, buffer[1][: sum(info.nbytes for info in infos)].cpu())
            return
        for info, mapped in zip(infos, handles):
            yield info.name, self._map(info.name, info.dtype, mapped).cpu()

    def close(self) -> None:
        """Release the buffer."""
        self._buffer = None

    def _map(self, name: str, dtype: torch.dtype, mapped: Mapped) -> Tensor:
        size, stride, offset, *storage, event, synced = mapped
        handle, num_bytes, start, counter, place = storage
        with torch.cuda.device(self._device):
            kind = torch.UntypedStorage, dtype, torch.cuda.current_device()
            try:
                tensor: Tensor = rebuild_cuda_tensor(
                    Tensor, size, stride, offset, *kind, handle, num_bytes, start, False, counter, place, event, synced
                )
            except RuntimeError as error:
                raise InvalidInput(f"{name} cannot be mapped from the trainer's memory: {error}") from error
        return tensor


def _mapped(info: TensorInfo, by_gpu: Any, gpu: str, *, may_be_larger: bool = False) -> Mapped:
    """Return the handle of a tensor on a GPU.

    Args:
        may_be_larger: accept a longer tensor [n].

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
        raise InvalidInput(f"{info.name}: its handle does not have torch's form: {error}") from error
    if not is_valid:
        raise InvalidInput(f"{info.name}: its handle names memory outside of its storage, or is not one of CUDA")
    is_larger = may_be_larger and len(size) == 1 and size[0] > info.shape[0]
    if not (is_larger or tuple(size) == info.shape) or dtype != str(info.dtype):
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
