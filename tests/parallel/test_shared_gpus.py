"""Devices and backends of ranks that may share GPUs. The tests on cuda-4 compare their bits."""

import os
from pathlib import Path
from unittest import mock

import pytest
import torch

from detcompile.config import settle_symmetric_memory
from detcompile.errors import InvalidInput
from detcompile.models.remote import load_in_workers
from detcompile.orders.numerics import Numerics
from detcompile.parallel import backend_of_ranks, rank_device

OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("DETCOMPILE_SHARED_GPUS", raising=False)


def test_each_rank_gets_its_own_gpu_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [rank_device("cuda", rank).index for rank in range(4)] == [0, 1, 2, 3]
    assert [rank_device("cpu", rank).type for rank in range(2)] == ["cpu", "cpu"]
    assert (backend_of_ranks("cpu"), backend_of_ranks("cuda")) == ("gloo", "nccl")
    monkeypatch.setenv("DETCOMPILE_SHARED_GPUS", "1")
    assert [rank_device("cuda", rank).index for rank in range(4)] == [0, 1, 0, 1]
    assert (backend_of_ranks("cpu"), backend_of_ranks("cuda")) == ("gloo", "cuda:gloo")


def test_shared_gpus_allow_overlapping_symmetric_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for shared in ("0", "1"):
        monkeypatch.setenv("DETCOMPILE_SHARED_GPUS", shared)
        with mock.patch.dict(os.environ):
            os.environ.pop(OVERLAPPING, None)
            settle_symmetric_memory()
            assert (os.environ.get(OVERLAPPING) == "1") == (shared == "1")


def test_too_few_gpus_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"tp=4 needs 4 GPUs, this machine has 2: .*DETCOMPILE_SHARED_GPUS=1"):
        load_in_workers(tmp_path, 4, Numerics(), "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("DETCOMPILE_SHARED_GPUS", "1")
    with pytest.raises(InvalidInput, match=r"tp=4 needs 1 GPUs, this machine has 0: export it with a smaller tp$"):
        load_in_workers(tmp_path, 4, Numerics(), "cuda")
