"""Weight transfers between processes, with senders of other sizes and senders that send nothing."""

import ctypes
import os
import pickle
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed import TCPStore

from detcompile import weight_transfer
from detcompile.errors import InvalidInput
from detcompile.weight_transfer import TensorInfo, TransferGroup

CPU = torch.device("cpu")
Outcome = TransferGroup | InvalidInput


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


def together(*works: Callable[[], TransferGroup]) -> list[Outcome]:
    """Results of calls that wait for each other."""
    outcomes: dict[int, Outcome] = {}

    def run(place: int, work: Callable[[], TransferGroup]) -> None:
        try:
            outcomes[place] = work()
        except InvalidInput as error:
            outcomes[place] = InvalidInput(str(error))  # without its traceback, which holds the group

    threads = [threading.Thread(target=run, args=item) for item in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [outcomes[place] for place in range(len(works))]


def joined(sizes: list[int], seconds: float = 10.0) -> list[Outcome]:
    """Start one process per size; each expects a group of that size."""
    port = free_port()
    return together(*(
        lambda rank=rank, size=size: TransferGroup("127.0.0.1", port, rank, size, CPU, seconds)
        for rank, size in enumerate(sizes)
    ))  # fmt: skip


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2), (3, 3, 4), (3, 4, 3), (4, 3, 3), (2, 1000)])
def test_groups_of_other_sizes_are_refused(sizes: tuple[int, ...]) -> None:
    start = time.monotonic()
    outcomes = joined(list(sizes), seconds=1.0)
    assert time.monotonic() - start < 5
    assert any("processes, rank 0 one of" in str(outcome) for outcome in outcomes)
    for outcome in outcomes:
        assert isinstance(outcome, InvalidInput) and "cannot join the weight transfer" in str(outcome)


@pytest.mark.parametrize(("size", "others"), [(0, 0), (1, 1), (3, 0), (5, 1), (4000, 0)])
def test_tensors_of_other_sizes_are_refused(size: int, others: int) -> None:
    """Receivers disconnect at once, which ends the sender's wait."""
    groups: list[Any] = joined([2 + others] * (2 + others), seconds=20.0)
    announced = [TensorInfo("first", torch.float32, (2,)), TensorInfo("second", torch.float32, (4,))]
    sender = groups.pop(0)

    def receive() -> TransferGroup:
        receiver = groups.pop()
        list(receiver.receive(announced, packed=False))
        return receiver

    def send() -> TransferGroup:
        sender.send([("first", torch.ones(2)), ("second", torch.ones(size))], packed=False)
        return sender

    start = time.monotonic()
    sent, *received = [str(outcome) for outcome in together(send, *[receive] * len(groups))]
    assert time.monotonic() - start < 10 and (sent == str(sender) or "broke off at second" in sent)
    refusal = f"the weight transfer broke off at second: rank 0 sends {4 * size} bytes instead of 16"
    assert received == [refusal] * (1 + others)


def test_buffer_that_a_generator_uses_again_is_not_sent() -> None:
    buffer = torch.empty(2)
    with pytest.raises(InvalidInput, match="the tensor of first was overwritten"):
        TransferGroup.send(mock.Mock(), ((name, buffer.fill_(place)) for place, name in enumerate(("first", "second"))))


def test_waits_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a missing host, a silent listener, a store without a sender and a hanging collective."""

    def refused(port: int, size: int = 2, address: str = "127.0.0.1") -> str:
        start = time.monotonic()
        with pytest.raises(InvalidInput, match="cannot join the weight transfer") as error:
            TransferGroup(address, port, 1, size, CPU, 0.5)
        assert time.monotonic() - start < 4
        return str(error.value)

    refused(free_port())
    refused(9, address="no.such.host.invalid")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        refused(silent.getsockname()[1])
    store = TCPStore("127.0.0.1", free_port(), 1, True, timedelta(seconds=5), False, use_libuv=False)
    refused(store.port)
    store.set("size", "many")
    refused(store.port)
    group, receiver = joined([2, 2], seconds=0.5)
    assert isinstance(group, TransferGroup) and isinstance(receiver, TransferGroup)
    with pytest.raises(InvalidInput, match="broke off at a"):
        list(receiver.receive([TensorInfo("a", torch.float32, (1,))]))  # nothing is sent
    with pytest.raises(InvalidInput, match="broke off at a"):
        group.send([("a", torch.ones(1 << 20))])  # nobody receives
    hanging = threading.Event()
    monkeypatch.setattr(weight_transfer._Gloo, "broadcast", lambda *_: hanging.wait())
    group, receiver = joined([2, 2], seconds=0.5)
    assert isinstance(group, TransferGroup)
    with pytest.raises(InvalidInput, match="took more than"):
        group.send([("a", torch.ones(1))])
    with pytest.raises(InvalidInput, match="was aborted"):
        group.send([("a", torch.ones(1))])
    monkeypatch.setattr(weight_transfer._Gloo, "__init__", lambda *_: hanging.wait())
    assert all("took more than" in str(outcome) for outcome in joined([2, 2], seconds=0.5))
    hanging.set()


def test_aborted_transfers_yield_nothing() -> None:
    """Also if the collective ends as if it had received."""
    sender, receiver = joined([2, 2])
    assert isinstance(sender, TransferGroup) and isinstance(receiver, TransferGroup)
    infos = [TensorInfo(name, torch.float32, (1,)) for name in "ab"]
    received = receiver.receive(infos, packed=False)
    together(lambda: (sender.send([("a", torch.ones(1))]), sender)[1], lambda: (next(received), receiver)[1])
    receiver.abort()
    with pytest.raises(InvalidInput, match="broke off at b: it was aborted"):
        next(received)


class ncclUniqueId(ctypes.Structure):
    """vLLM's class of this name, which it pickles."""

    _fields_ = [("internal", ctypes.c_byte * 128)]


def test_nccl_id_is_read_without_its_class() -> None:
    sent = bytes(range(128))
    for pickled in (pickle.dumps(ncclUniqueId.from_buffer_copy(sent)), pickle.dumps(sent)):
        assert weight_transfer._id_of(pickled) == sent
    for odd in (b"", b"x", pickle.dumps(b"short"), pickle.dumps(os.system), pickle.dumps({"a": 1}), pickle.dumps(None)):
        with pytest.raises(InvalidInput, match="no NCCL id"):
            weight_transfer._id_of(odd)
