"""Files that others could have written are not loaded, and disk errors name their path."""

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from detcompile import StorageError, config
from detcompile.storage import cache_folder, disk_failure, distrust, put
from detcompile.templates.cpu import shared_objects
from detcompile.templates.device.gate import Tuner

OTHER = 4711  # a user that is neither this one nor root


def owned_by(owner: int, name: str):
    """Inside the block, Path.stat reports ``owner`` for files and folders of this name."""
    real = Path.stat

    def owned_stat(path: Path, **options: bool) -> os.stat_result:
        actual = real(path, **options)
        fields = list(actual)
        fields[stat.ST_UID] = owner
        return os.stat_result(fields) if path.name == name else actual

    return mock.patch.object(Path, "stat", owned_stat)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DETCOMPILE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "one.cpp").write_text('extern "C" int one() { return 1; }\n')
    return tmp_path / "one.cpp"


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o022, 0o077])
def test_new_cache_is_private_under_any_umask(cache: Path, source: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        library = cache_folder("cpu") / "one.so"
        shared_objects.build(library, [source], ["-fPIC"])
    finally:
        os.umask(before)
    assert not any(distrust(path) for path in (cache, cache / "cpu", library))
    assert shared_objects.is_intact(library)
    assert list(cache.rglob("*.so")) == [library] == [path for path in cache.rglob("*") if path.is_file()]


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757, 0o1777])
@pytest.mark.parametrize("folder", ["", "cpu"])
def test_folder_writable_by_others_is_refused(cache: Path, folder: str, mode: int) -> None:
    cache_folder("cpu")
    (cache / folder).chmod(mode)
    if mode & stat.S_ISVTX and not folder:  # a cache in /tmp: nobody can take what is ours there
        assert cache_folder("cpu") == cache / "cpu"
        return
    with pytest.raises(StorageError, match=rf"{cache / folder} can be written by others .*chmod.*DETCOMPILE_CACHE"):
        cache_folder("cpu")


@pytest.mark.parametrize("folder", ["cache", "cpu"])
def test_a_folder_of_another_user_is_refused(cache: Path, folder: str) -> None:
    cache_folder("cpu")
    with owned_by(OTHER, folder), pytest.raises(StorageError, match=rf"{folder} belongs to user {OTHER}, not to"):
        cache_folder("cpu")
    with owned_by(0, folder):
        assert cache_folder("cpu") == cache / "cpu"


@pytest.mark.parametrize("planted", ["another user's", "written by others", "a link"])
def test_library_writable_by_others_is_not_loaded(cache: Path, source: Path, planted: str) -> None:
    library = cache_folder("cpu") / "one.so"
    shared_objects.build(library, [source], ["-fPIC"])
    if planted == "another user's":
        with owned_by(OTHER, "one.so"):
            assert not shared_objects.is_intact(library)
    elif planted == "written by others":
        library.chmod(0o664)
        assert not shared_objects.is_intact(library)
    else:
        library.rename(cache / "elsewhere.so")
        library.symlink_to(cache / "elsewhere.so")
        assert not shared_objects.is_intact(library)
    shared_objects.build(library, [source], ["-fPIC"])
    assert shared_objects.is_intact(library) and not library.is_symlink()


@pytest.mark.parametrize("place", ["file", "folder"])
def test_decisions_writable_by_others_are_rejected(tmp_path: Path, place: str) -> None:
    folder = tmp_path / "schedules"
    first = Tuner("matmul", {}, folder)
    assert first.choose("p", "reference", ("fast",), lambda schedule: b"bits") == "fast"
    assert Tuner("matmul", {}, folder).recall(["p"], {"fast": "fast"}) == "fast"
    (first.path if place == "file" else folder).chmod(0o777)
    before = first.path.read_bytes()
    with pytest.warns(UserWarning, match=r"neither read nor kept: .* can be written by others .*DETCOMPILE_CACHE"):
        second = Tuner("matmul", {}, folder)
    assert second.choose("p", "reference", ("fast",), lambda schedule: schedule.encode()) == "reference"
    assert first.path.read_bytes() == before


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
def test_a_cache_that_cannot_be_written_is_named(cache: Path, source: Path, code: int) -> None:
    folder = cache_folder("cpu")
    failing = mock.Mock(side_effect=OSError(code, os.strerror(code)))
    words = rf"{cache}.*: {os.strerror(code)}\. .*DETCOMPILE_CACHE"
    for place in ("tempfile.mkdtemp", "os.replace"):
        with mock.patch(place, failing), pytest.raises(StorageError, match=words):
            shared_objects.build(folder / "one.so", [source], ["-fPIC"])
        assert not list(folder.iterdir())
    with mock.patch("os.mkdir", failing), pytest.raises(StorageError, match=words):
        (folder.rmdir(), cache_folder("cpu"))


@pytest.mark.parametrize("words", ["No space left on device", "Disk quota exceeded", "Read-only file system"])
def test_full_disk_is_not_reported_as_a_missing_compiler(
    cache: Path, source: Path, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\necho \"as: {source}: $TMPDIR: fatal error: '{words}'\" >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(StorageError, match=rf"{cache}/cpu cannot be used: {words}\. Free space"):
        shared_objects.build(cache_folder("cpu") / "one.so", [source], [])


def test_full_disk_is_named_for_exceptions_of_other_libraries() -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "/some/file")
    wrapped = RuntimeError("the backend failed")
    wrapped.__cause__ = full
    assert str(disk_failure(wrapped, Path("/else"))).startswith("/some/file cannot be used: No space left on device")
    owned_stat = RuntimeError("cc1plus: fatal error: 'No space left on device'")
    assert str(disk_failure(owned_stat, Path("/else"))).startswith("/else cannot be used")
    assert disk_failure(RuntimeError("no graph"), Path("/else")) is None
    assert disk_failure(FileNotFoundError(errno.ENOENT, "No such file", "/x"), Path("/else")) is None


def test_files_are_written_atomically(tmp_path: Path) -> None:
    put(tmp_path / "kept", b"before")
    with mock.patch("os.fchmod", side_effect=OSError(errno.ENOSPC, "full")), pytest.raises(OSError, match="full"):
        put(tmp_path / "kept", b"after")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("kept", b"before")]


def test_compile_names_the_folder_and_not_the_model() -> None:
    code = """
import os, torch, detcompile
from tests.model_cases import random_model
for name in ("DETCOMPILE_CACHE", "TORCHINDUCTOR_CACHE_DIR"):
    before = os.environ.pop(name, None)
    os.environ[name] = "/dev/null/x"
    try: detcompile.compile(random_model("llama", torch.float32, num_hidden_layers=1, vocab_size=163))
    except detcompile.StorageError as error: print(error)
    os.environ.pop(name) if before is None else os.environ.update({name: before})
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True)
    ours, torchs = done.stdout.splitlines()
    assert ours.startswith("/dev/null/x cannot be used: Not a directory") and "DETCOMPILE_CACHE" in ours
    assert torchs.startswith("/dev/null/x cannot be used: Not a directory") and "TORCHINDUCTOR_CACHE_DIR" in torchs


def test_missing_home_error_gives_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DETCOMPILE_CACHE", raising=False)
    with mock.patch.object(Path, "home", side_effect=RuntimeError), pytest.raises(StorageError, match="set DETCOMPILE"):
        config.cache_directory()
