"""Handles of CUDA IPC: read as vLLM's trainers send them, without running what is in a pickle."""

import base64
import contextlib
import os
import pickle
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, rebuild_tensor

from detcompile import cuda_ipc
from detcompile.cuda_ipc import Mapped, read_handles
from detcompile.errors import InvalidInput
from detcompile.weight_transfer import TensorInfo

GPU = "01234567-89ab-cdef-0123-456789abcdef"
INFO = TensorInfo("a", torch.bfloat16, (2, 3))
ARGUMENTS = {  # of a tensor [2, 3] in bfloat16, as ``reduce_tensor`` returns them
    "tensor_cls": torch.nn.Parameter, "tensor_size": torch.Size([2, 3]), "tensor_stride": (3, 1), "tensor_offset": 4,
    "storage_cls": torch.storage.TypedStorage, "dtype": torch.bfloat16, "storage_device": 7,
    "storage_handle": b"h" * 66, "storage_size_bytes": 20, "storage_offset_bytes": 512, "requires_grad": True,
    "ref_counter_handle": b"/torch_1",
    "ref_counter_offset": 2, "event_handle": b"e" * 64, "event_sync_required": True,
}  # fmt: skip


def sent(handles: Any) -> str:
    return base64.b64encode(pickle.dumps(handles)).decode()


@pytest.mark.parametrize("form", ["pair", "arguments"])
def test_handles_are_read_as_vllm_sends_them(form: str) -> None:
    arguments = tuple(ARGUMENTS.values())
    handle = (rebuild_cuda_tensor, arguments) if form == "pair" else arguments
    [mapped] = read_handles(sent([{"another GPU": None, GPU: handle}]), [INFO], GPU)
    assert mapped == Mapped((2, 3), (3, 1), 4, b"h" * 66, 20, 512, b"/torch_1", 2, b"e" * 64, True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tensor_size": torch.Size([3, 2]), "tensor_stride": (2, 1)}, r"\[3, 2\], not of torch.bfloat16 \[2, 3\]"),
        ({"dtype": torch.float16}, "torch.float16"),
        ({"tensor_offset": 5}, "outside of its storage"),
        ({"tensor_stride": (4, 1)}, "outside of its storage"),
        ({"tensor_stride": (3, -1)}, "outside of its storage"),
        ({"tensor_stride": (3,)}, "does not have torch's form"),
        ({"storage_size_bytes": 2.5}, "outside of its storage"),
        ({"storage_offset_bytes": -1}, "outside of its storage"),
        ({"storage_handle": "h"}, "outside of its storage"),
        ({"event_handle": None}, "outside of its storage"),
        ({"tensor_size": 3}, "does not have torch's form"),
    ],
)
def test_handles_of_other_memory_are_refused(change: dict[str, Any], message: str) -> None:
    handle = (rebuild_cuda_tensor, tuple((ARGUMENTS | change).values()))
    with pytest.raises(InvalidInput, match=f"^a: its handle .*{message}"):
        read_handles(sent([{GPU: handle}]), [INFO], GPU)


BUFFER = {
    "tensor_size": torch.Size([40]), "tensor_stride": (1,), "tensor_offset": 0, "dtype": torch.uint8,
    "storage_size_bytes": 40,
}  # fmt: skip


def test_packed_tensors_are_copied_from_one_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffer is filled again between two parts of an update."""
    mapped = torch.zeros(40, dtype=torch.uint8)
    calls = []

    def rebuild(*arguments: Any) -> torch.Tensor:
        calls.append(arguments)
        return mapped

    monkeypatch.setattr(cuda_ipc, "rebuild_cuda_tensor", rebuild)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    importer = cuda_ipc.Importer(torch.device("cuda", 3))
    handle = sent({GPU: tuple((ARGUMENTS | BUFFER).values())})
    for tensors in ([torch.randn(3), torch.randn(2, 3).bfloat16()], [torch.randn(5, 2)]):
        infos = [TensorInfo(str(place), one.dtype, tuple(one.shape)) for place, one in enumerate(tensors)]
        flat = torch.cat([one.view(-1).view(torch.uint8) for one in tensors])
        mapped[: len(flat)] = flat
        received = importer.receive(infos, read_handles(handle, infos, GPU))
        for (name, actual), info, one in zip(list(received), infos, tensors, strict=True):
            mapped.zero_()
            assert name == info.name and actual.dtype == one.dtype and torch.equal(actual, one)
    [call] = calls
    assert call[1:7] == ((40,), (1,), 0, torch.UntypedStorage, torch.uint8, 3)
    importer.close()
    list(importer.receive(infos, read_handles(handle, infos, GPU)))
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tensor_size": torch.Size([11])}, r"torch.uint8 \[11\], not of torch.uint8 \[12\]"),
        ({"tensor_size": torch.Size([20, 2]), "tensor_stride": (2, 1)}, r"not of torch.uint8 \[12\]"),
        ({"dtype": torch.int8}, "torch.int8"),
        ({"storage_size_bytes": 39}, "outside of its storage"),
        ({"tensor_size": 40}, "does not have torch's form"),
    ],
)
def test_malformed_packed_buffers_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=f"^the packed buffer: its handle .*{message}"):
        read_handles(sent({GPU: tuple((ARGUMENTS | BUFFER | change).values())}), [INFO], GPU)


class Command:
    """Creates a file where it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_malformed_pickles_are_refused_and_not_run(tmp_path: Any) -> None:
    arguments = tuple(ARGUMENTS.values())
    for odd in (
        "", "?", base64.b64encode(b"x").decode(), sent(None), sent([]), sent([{}, {}]), sent([None]), sent([{}]),
        sent({}), sent({GPU: None}),
        sent([{GPU: None}]), sent([{GPU: ()}]), sent([{GPU: arguments[:-1]}]),
        sent([{GPU: (rebuild_tensor, arguments)}]),
        sent([{"another GPU": (rebuild_cuda_tensor, arguments)}]), sent([{GPU: Command(str(tmp_path / "made"))}]),
        sent([{GPU: (rebuild_cuda_tensor, (Command(str(tmp_path / "made")), *arguments[1:]))}]),
    ):  # fmt: skip
        with pytest.raises(InvalidInput, match=r"ipc_handles_pickled|handle"):
            read_handles(odd, [INFO], GPU)
    assert not (tmp_path / "made").exists()
