"""Weights are read into the page cache ahead: when a model is found, and by the command line."""

import ctypes
import mmap
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from detcompile import read_ahead as module
from detcompile.commands import cli
from detcompile.models import loading
from detcompile.models.hub import TINY_FOLDER
from detcompile.models.weight_files import files_at_hand, weight_files
from detcompile.read_ahead import THREAD, read_ahead
from tests.model_cases import random_model

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mincore.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p
SIZE = 1 << 25  # bytes


def awaited() -> None:
    for thread in threading.enumerate():
        if thread.name == THREAD:
            thread.join(60)
            assert not thread.is_alive()


def share_cached(file: Path) -> float:
    """Return the share of a file's pages in memory: mincore(2), which loads none."""
    num_pages = -(-file.stat().st_size // mmap.PAGESIZE)
    actual = ctypes.create_string_buffer(num_pages)
    with file.open("r+b") as stream, mmap.mmap(stream.fileno(), 0) as mapped:
        place = ctypes.c_char.from_buffer(mapped)
        assert LIBC.mincore(ctypes.byref(place), len(mapped), actual) == 0
        del place
    return sum(page & 1 for page in actual.raw) / num_pages


def cached_whole(file: Path) -> bool:
    """Return whether the whole file gets into memory: the kernel continues after the advice."""
    deadline = time.monotonic() + 60
    while (share := share_cached(file)) < 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    return share == 1


@pytest.fixture
def on_disk(tmp_path: Path) -> list[Path]:
    """Files that are not in the page cache."""
    files = [tmp_path / f"model-0000{part}-of-00002.safetensors" for part in (1, 2)]
    for file in files:
        with file.open("wb") as stream:
            stream.write(os.urandom(SIZE))
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if share_cached(file) > 0.5:
            pytest.skip("this file system keeps its files in memory")
    return files


def test_read_ahead_brings_files_into_memory(on_disk: list[Path]) -> None:
    read_ahead(on_disk)
    awaited()
    assert all(map(cached_whole, on_disk))


def test_read_ahead_works_for_devices_without_statistics(
    on_disk: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DEVICES", tmp_path)
    read_ahead(on_disk)
    awaited()
    assert all(map(cached_whole, on_disk))


def test_non_files_are_skipped(on_disk: list[Path], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    read_ahead([tmp_path / "absent", tmp_path, tmp_path / "pipe", tmp_path / "link", on_disk[0]])
    awaited()
    assert cached_whole(on_disk[0])
    read_ahead([Path("a\0b")])
    awaited()


@pytest.mark.parametrize("message", ["MemAvailable:    65535 kB\n", "MemFree:  99999999 kB\n", "what is this", None])
def test_files_are_not_read_without_free_memory(
    on_disk: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: str | None
) -> None:
    memory = tmp_path / "meminfo"
    if message is not None:
        memory.write_text(message)
    monkeypatch.setattr(module, "MEMORY", memory)
    read_ahead(on_disk)
    awaited()
    time.sleep(0.2)  # in which the disk would have given some
    assert max(map(share_cached, on_disk)) < 0.1


def test_finding_a_model_reads_its_weights_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random_model("llama", torch.float32, num_hidden_layers=1).save_pretrained(tmp_path, max_shard_size="100KB")
    (tmp_path / "consolidated.safetensors").write_bytes(b"another form of the same")
    requests: list[list[Path]] = []
    monkeypatch.setattr(loading, "read_ahead", requests.append)
    loading.find(tmp_path, device="cpu")
    assert requests == [sorted(tmp_path.glob("model-*.safetensors"))] and len(requests[0]) > 2
    loading.find(tmp_path, device="cpu", random=True)
    assert len(requests) == 1


def test_a_command_reads_ahead_before_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(cli, "read_ahead", lambda files: calls.extend(files))
    monkeypatch.setattr(cli, "_loaded", lambda name: calls.append(name) or _Nothing())
    command = cli._Command("check")
    command.make_context("check", [str(TINY_FOLDER), "--json"])
    assert calls == [TINY_FOLDER / "model.safetensors", "check"]
    calls[:] = ["nothing"]
    for option in ("--random", "--revision=main"):
        command.make_context("check", [str(TINY_FOLDER), option])
    assert calls == ["nothing", "check", "check"]


class _Nothing:
    def make_context(self, *args: object, **kwargs: object) -> None: ...


def test_hub_model_is_found_in_the_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / ("0" * 40)
    for folder in (snapshot, repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).write_text("{}")
    assert files_at_hand("org/name") == [snapshot / "model.safetensors"]
    for other in ("org/other", "tiny", "What is 1/2?", "x" * 5000, "a/\0", "../..", "", "--json"):
        assert files_at_hand(other) == [], other
    assert weight_files(snapshot / "refs") == []


def test_looking_for_weights_imports_no_torch() -> None:
    code = "from detcompile.commands import cli; cli._read_weights_ahead(['org/name', '.']); import sys"
    code += "; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
