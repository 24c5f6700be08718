"""Weights from one process to others, as vLLM's weight transfer sends them: a broadcast from rank 0, the trainer.

The processes meet in a TCPStore that rank 0 serves. On GPUs they then share an NCCL communicator whose id comes through
the store, as in vLLM's StatelessProcessGroup and PyNcclCommunicator, so that a trainer may use vLLM's. On CPUs they use
gloo, which vLLM does not have.

This module's rank 0 also announces the number of processes and the size of each broadcast in the store, so that a
mismatch is an error at once. vLLM's announces neither: a mismatch ends by the time limit. A transfer that breaks off,
for example because rank 0 is gone, is aborted: its group cannot be used again, and its kernels leave the GPU.

Packed tensors are sent in buckets of bytes: tensors are added to a bucket until it exceeds ``bucket_bytes``.

A trainer: ``TransferGroup(address, port, 0, 1 + engines, device).send(named_tensors)``.
"""

import ctypes
import functools
import io
import math
import pickle
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from detcompile.errors import InvalidInput
from detcompile.weights import read_tensors

BUCKET_BYTES = 1 << 30  # vLLM's default
TIMEOUT_SECONDS = 300.0
NCCL_ID = "broadcast_from/0/0"  # key of the store
NCCL_ID_BYTES = 128
POLL_SECONDS, ALIVE_SECONDS = 0.0005, 1.0  # between looks at the GPU, and at rank 0's store
SIZE, SENT = "size", "sent"  # keys of the store: the number of processes, and the bytes of each broadcast
_NCCL_UINT8, _NCCL_FLOAT32, _NCCL_SUM = 1, 7, 0  # ncclDataType_t and ncclRedOp_t
Result = TypeVar("Result")


class TensorInfo(NamedTuple):
    """Name, dtype and shape of a tensor, which the receiver knows before it arrives."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Return its size."""
        return math.prod(self.shape) * self.dtype.itemsize


class TransferGroup:
    """One process's membership in a group whose rank 0 sends.

    Args:
        address, port: of the store, which rank 0 serves.
        rank: this process; the sender has 0.
        size: number of processes.
        device: where tensors are sent from, or received.
        seconds: time for all processes to join, and for each broadcast.

    Raises:
        InvalidInput: the others did not join in time, their group has another size, or rank 0 sent no NCCL id.
    """

    def __init__(
        self,
        address: str,
        port: int,
        rank: int,
        size: int,
        device: torch.device,
        seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        self.device = device
        self._is_sender = rank == 0
        self._seconds = seconds
        self._num_broadcasts = 0
        self._is_aborted = False
        timeout = timedelta(seconds=seconds)

        def join() -> tuple[TCPStore, bool, _Communicator | _Gloo]:
            socket.getaddrinfo(address, port)  # an unknown name fails at once; the store would try on
            store = TCPStore(address, port, size, rank == 0, timeout, wait_for_workers=rank != 0, use_libuv=False)
            announces = _compare_sizes(store, rank, size, device)
            if device.type == "cuda":
                return store, announces, _Communicator(store, rank, size, device)
            return store, announces, _Gloo(store, rank, size, timeout)

        try:
            self._store, self._announces, self._collective = _within(seconds, join)
        except (RuntimeError, ValueError, OverflowError, OSError) as error:
            raise InvalidInput(f"cannot join the weight transfer at {address}, port {port}: {error}") from error

    def send(
        self, tensors: Iterable[tuple[str, Tensor]], *, packed: bool = True, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        """Send tensors to all other ranks, which must ``receive`` the same names, dtypes and shapes.

        Args:
            tensors: names and tensors of any dtype, on any device.
            packed: send several tensors per broadcast; receivers must pass the same value.
            bucket_bytes: size of a broadcast with ``packed``, exceeded by its last tensor.

        Raises:
            InvalidInput: the transfer broke off, or a tensor was overwritten while later ones were read; then nothing
                is sent.
        """
        tensor_of = {_info(name, tensor): tensor.detach() for name, tensor in read_tensors(tensors)}
        for bucket in _buckets(list(tensor_of), packed, bucket_bytes):
            flat = [tensor_of[info].to(self.device).contiguous().view(-1).view(torch.uint8) for info in bucket]
            self._exchange(bucket[0].name, torch.cat(flat))

    def receive(
        self, infos: Iterable[TensorInfo], *, packed: bool = True, bucket_bytes: int = BUCKET_BYTES
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the sent tensors by name, on the CPU, in the order of ``infos``.

        Raises:
            InvalidInput: the transfer broke off.
        """
        for bucket in _buckets(list(infos), packed, bucket_bytes):
            data = torch.empty(sum(info.nbytes for info in bucket), dtype=torch.uint8, device=self.device)
            self._exchange(bucket[0].name, data)
            yield from unpacked(bucket, data.cpu())

    def abort(self) -> None:
        """End a transfer that runs, from any thread. The group cannot be used any more."""
        self._is_aborted = True
        self._collective.abort()

    def _exchange(self, name: str, data: Tensor) -> None:
        """Broadcast bytes from rank 0.

        Raises:
            InvalidInput: the transfer broke off at the tensor of this name.
        """
        key = f"{SENT}/{self._num_broadcasts}"
        self._num_broadcasts += 1
        if data.is_cuda:
            torch.cuda.current_stream(data.device).synchronize()  # another thread has another stream

        def broadcast() -> None:
            if self._is_sender:
                self._store.set(key, str(data.numel()))
            elif self._announces and (sent := int(self._store.get(key))) != data.numel():
                raise RuntimeError(f"rank 0 sends {sent} bytes instead of {data.numel()}")
            if data.numel():
                self._collective.broadcast(data)

        try:
            if not self._is_aborted:
                _within(self._seconds, broadcast)
            if self._is_aborted:
                raise RuntimeError("it was aborted")
        except (RuntimeError, ValueError, OSError) as error:
            self.abort()
            raise InvalidInput(f"the weight transfer broke off at {name}: {error}") from error


def unpacked(infos: Sequence[TensorInfo], data: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield copies of tensors by name, whose bytes [n] on the CPU follow each other."""
    for info, part in zip(infos, data.split([info.nbytes for info in infos])):
        yield info.name, part.clone().view(info.dtype).view(info.shape)


def _within(seconds: float, work: Callable[[], Result]) -> Result:
    """Return the result of ``work``. Its thread is left behind if it takes too long.

    Raises:
        TimeoutError: it took too long.
    """
    results: SimpleQueue[tuple[Result, None] | tuple[None, Exception]] = SimpleQueue()

    def run() -> None:
        try:
            results.put((work(), None))
        except Exception as error:
            results.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        result, error = results.get(timeout=seconds)
        if error is not None:
            raise error
        return cast("Result", result)
    except Empty:
        raise TimeoutError(f"the other processes took more than {seconds:g} s") from None
    finally:
        error = None  # breaks a cycle through this frame: a group ends with its last user


def _compare_sizes(store: TCPStore, rank: int, size: int, device: torch.device) -> bool:
    """Compare the sizes that the processes joined with; return whether rank 0 announces sizes, which vLLM's does not.

    Raises:
        RuntimeError: the sizes differ.
    """
    if rank == 0:
        store.set(SIZE, str(size))
        for other in range(1, size):
            joined = int(store.get(f"{SIZE}/{other}"))
            if joined != size:
                raise RuntimeError(f"rank {other} joins a group of {joined} processes, rank 0 one of {size}")
        return True
    if device.type == "cuda":
        store.set(f"{SIZE}/{rank}", str(size))
        store.wait([NCCL_ID])  # is set after SIZE
        if not store.check([SIZE]):
            return False
    expected = int(store.get(SIZE))
    store.set(f"{SIZE}/{rank}", str(size))
    if expected != size:
        raise RuntimeError(f"rank {rank} joins a group of {size} processes, rank 0 one of {expected}")
    return True


def _info(name: str, tensor: Tensor) -> TensorInfo:
    return TensorInfo(name, tensor.dtype, tuple(tensor.shape))


def _buckets(infos: list[TensorInfo], packed: bool, bucket_bytes: int) -> Iterator[list[TensorInfo]]:
    """Divide tensors into broadcasts, as vLLM does."""
    bucket: list[TensorInfo] = []
    num_bytes = 0
    for info in infos:
        bucket.append(info)
        num_bytes += info.nbytes
        if not packed or num_bytes > bucket_bytes:
            yield bucket
            bucket, num_bytes = [], 0
    if bucket:
        yield bucket


class _Gloo:
    """Broadcasts of a gloo group. A wait ends by its time limit, or with the connection to rank 0."""

    def __init__(self, store: TCPStore, rank: int, size: int, timeout: timedelta) -> None:
        self._group: Any = ProcessGroupGloo(PrefixStore("weights", store), rank, size, timeout)
        self._options = BroadcastOptions()
        self._options.rootRank = 0

    def broadcast(self, data: Tensor) -> None:
        """Send bytes, or receive them."""
        self._group.broadcast([data], self._options).wait()

    def abort(self) -> None:
        """Do nothing: a thread may wait up to the time limit."""


class _Communicator:
    """Broadcasts of an NCCL communicator. vLLM warms up new ones by a sum, in which every rank takes part."""

    def __init__(self, store: Any, rank: int, size: int, device: torch.device) -> None:
        self._store, self._device = store, device
        self._library = _nccl_library()
        unique_id = _UniqueId()
        if rank == 0:
            _call_nccl(self._library.ncclGetUniqueId, ctypes.byref(unique_id))
            store.set(NCCL_ID, pickle.dumps(bytes(unique_id)))
        else:
            unique_id = _UniqueId.from_buffer_copy(_id_of(store.get(NCCL_ID)))
        self._communicator = ctypes.c_void_p()
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream()
            _call_nccl(self._library.ncclCommInitRank, ctypes.byref(self._communicator), size, unique_id, rank)
        self._ending = threading.Lock()
        self._end = weakref.finalize(self, self._library.ncclCommDestroy, self._communicator)
        self._end.atexit = False
        warmup = torch.zeros(1, device=device)
        addresses = warmup.data_ptr(), warmup.data_ptr()
        try:
            self._run(self._library.ncclAllReduce, *addresses, 1, _NCCL_FLOAT32, _NCCL_SUM)
        except RuntimeError:
            self.abort()
            raise

    def broadcast(self, data: Tensor) -> None:
        """Send bytes, or receive them.

        Raises:
            RuntimeError: NCCL failed, or rank 0 is gone.
        """
        self._run(self._library.ncclBroadcast, data.data_ptr(), data.data_ptr(), data.numel(), _NCCL_UINT8, 0)

    def abort(self) -> None:
        """End kernels that wait for other processes, which would stay on the GPU."""
        with self._ending:
            if self._end.detach() is not None:
                self._library.ncclCommAbort(self._communicator)

    def _run(self, collective: Any, *arguments: Any) -> None:
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            _call_nccl(collective, *arguments, self._communicator, self._stream.cuda_stream)
            looked = time.monotonic()
            while not self._stream.query():
                time.sleep(POLL_SECONDS)
                if time.monotonic() - looked > ALIVE_SECONDS:
                    self._store.check([NCCL_ID])  # raises if rank 0, which serves the store, is gone
                    looked = time.monotonic()


class _UniqueId(ctypes.Structure):
    _fields_: ClassVar = [("internal", ctypes.c_byte * NCCL_ID_BYTES)]


@functools.cache
def _nccl_library() -> ctypes.CDLL:
    """Return the NCCL that torch has loaded. torch.cuda.nccl.init_rank of torch 2.11 fails under Python 3.10 or later.

    Raises:
        OSError: torch was built without NCCL, or links it statically.
    """
    library = ctypes.CDLL("libnccl.so.2")
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    library.ncclCommInitRank.argtypes = [ctypes.POINTER(pointer), integer, _UniqueId, integer]
    library.ncclAllReduce.argtypes = [pointer, pointer, ctypes.c_size_t, integer, integer, pointer, pointer]
    library.ncclBroadcast.argtypes = [pointer, pointer, ctypes.c_size_t, integer, integer, pointer, pointer]
    library.ncclCommDestroy.argtypes = library.ncclCommAbort.argtypes = [pointer]
    library.ncclGetErrorString.restype = ctypes.c_char_p
    return library


def _call_nccl(function: Any, *arguments: Any) -> None:
    status = function(*arguments)
    if status != 0:
        raise RuntimeError(f"{function.__name__}: {_nccl_library().ncclGetErrorString(status).decode()}")


class _IdReader(pickle.Unpickler):
    """Reads an NCCL id that vLLM, or this module, has pickled, and runs no code of the pickle."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a stand-in for the names in a pickled ctypes structure; reject all others."""
        if (module, name) == ("_ctypes", "_unpickle"):
            return lambda kind, state: state[1]  # the structure's bytes
        if name == "ncclUniqueId":
            return name
        raise pickle.UnpicklingError(f"{module}.{name} is not part of an NCCL id")


def _id_of(pickled: bytes) -> bytes:
    """Return an NCCL id.

    Raises:
        InvalidInput: it is not a pickled id.
    """
    try:
        unique_id = _IdReader(io.BytesIO(pickled)).load()
    except Exception as error:  # a pickle can raise anything
        raise InvalidInput(f"rank 0 sent no NCCL id: {error}") from error
    if not isinstance(unique_id, (bytes, bytearray)) or len(unique_id) != NCCL_ID_BYTES:
        raise InvalidInput("rank 0 sent no NCCL id")
    return bytes(unique_id)
