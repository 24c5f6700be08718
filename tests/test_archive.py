"""The file of an archive: what was written comes back, and no changed byte or missing end goes unseen."""

import json
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from detcompile.archive import EXTRA, Archive, Share, library_folder, write_archive
from detcompile.errors import ArchiveError
from detcompile.stored_weights import StoredWeights
from tests.bits import assert_bitwise_equal

FACTS = {"format": 1, "dtype": "bfloat16"}
MEMBERS = {f"{EXTRA}/notes.txt": b"some words"}
LIBRARY = bytes(range(256))
CPU = torch.device("cpu")


def weights() -> dict[str, Tensor]:
    """Of every kind: dtypes, a scalar, no elements, strides that are not those of a row after a row."""
    torch.manual_seed(0)
    return {
        "a.weight": torch.randn(3, 5).bfloat16(),
        "eighths": torch.randn(2, 3).to(torch.float8_e4m3fn),
        "flags": torch.tensor([True, False, True]),
        "norm": torch.randn(7),
        "nothing": torch.empty(0, 3),
        "quantised": torch.randn(4, 6).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(3),
        "turned": torch.randn(4, 6).t(),
        "zeros": torch.arange(-3, 3, dtype=torch.int16),
    }


def share(folder: Path, rank: int = 0) -> Share:
    """A rank's, with a library of its own."""
    library = folder / f"model{rank}.so"
    library.write_bytes(LIBRARY)
    return Share({"arguments": [rank, "a.weight"]}, (library,), StoredWeights.of(weights()))


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("archive")
    write_archive(folder / "inside.pt2", FACTS, MEMBERS, [share(folder)])
    return folder / "inside.pt2"


def assert_the_same_weights(found: dict[str, Tensor]) -> None:
    assert found.keys() == weights().keys()
    for name, tensor in weights().items():
        assert_bitwise_equal(found[name], tensor, name)
        assert found[name].stride() == tensor.stride(), name


def test_what_was_written_comes_back(inside: Path) -> None:
    archive = Archive(inside)
    assert {name: archive.facts[name] for name in FACTS} == FACTS
    assert {name: archive.read(name) for name in MEMBERS} == MEMBERS
    assert archive.share["arguments"] == [0, "a.weight"]
    (library,) = archive.names(library_folder(0))
    assert library.endswith("/model0.so") and archive.read(library) == LIBRARY
    assert_the_same_weights(archive.weights(CPU))


def test_weights_may_change_after_loading(inside: Path) -> None:
    archive = Archive(inside)
    archive.weights(CPU)["norm"].zero_()
    assert_the_same_weights(archive.weights(CPU))


def test_weights_beside_are_a_file_of_safetensors(tmp_path: Path) -> None:
    write_archive(tmp_path / "m.pt2", FACTS, MEMBERS, [share(tmp_path)], beside=True)
    assert_the_same_weights(Archive(tmp_path / "m.pt2").weights(CPU))
    for name, tensor in load_file(tmp_path / "m.safetensors").items():
        assert_bitwise_equal(tensor, weights()[name], name)


@pytest.mark.parametrize("damage", [bytes.upper, lambda content: content[:-1], lambda content: b""])
def test_damaged_weights_beside_are_refused(tmp_path: Path, damage) -> None:
    write_archive(tmp_path / "m.pt2", FACTS, MEMBERS, [share(tmp_path)], beside=True)
    beside = tmp_path / "m.safetensors"
    beside.write_bytes(damage(beside.read_bytes()))
    with pytest.raises(ArchiveError, match=r"m\.safetensors is (damaged|empty)"):
        Archive(tmp_path / "m.pt2").weights(CPU)
    beside.unlink()
    with pytest.raises(ArchiveError, match=r"m\.safetensors cannot be read: No such file"):
        Archive(tmp_path / "m.pt2").weights(CPU)


@pytest.mark.parametrize("beside", [False, True])
def test_each_rank_reads_and_checks_its_own(tmp_path: Path, beside: bool) -> None:
    path = tmp_path / "m.pt2"
    ranks = [share(tmp_path, rank) for rank in range(2)]
    ranks[1] = ranks[1]._replace(weights=ranks[1].weights.written_to(tmp_path / "written"))
    write_archive(path, FACTS, MEMBERS, ranks, beside)
    files = sorted(file.name for file in tmp_path.glob("*.safetensors"))
    assert files == (["m.rank0.safetensors", "m.rank1.safetensors"] if beside else [])
    for rank in range(2):
        archive = Archive(path, rank)
        assert archive.share["arguments"] == [rank, "a.weight"]
        assert len(archive.names(library_folder(rank))) == 1
        assert_the_same_weights(archive.weights(CPU))
    content = bytearray(path.read_bytes())
    content[content.rindex(LIBRARY) + 9] ^= 1
    path.write_bytes(content)
    assert Archive(path, 0).facts == Archive(path, None).facts
    with pytest.raises(ArchiveError, match=r"rank1/model1\.so is not what export wrote"):
        Archive(path, 1)


@settings(max_examples=300)
@given(at=st.floats(0, 1, exclude_max=True), change=st.integers(1, 255))
def test_every_changed_byte_is_seen(inside: Path, at: float, change: int) -> None:
    content = bytearray(inside.read_bytes())
    content[int(at * len(content))] ^= change
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "changed.pt2")
        path.write_bytes(content)
        with pytest.raises(ArchiveError):
            Archive(path)


@given(end=st.floats(0, 1, exclude_max=True))
def test_a_file_that_is_cut_short_is_refused(inside: Path, end: float) -> None:
    content = inside.read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "short.pt2")
        path.write_bytes(content[: int(end * len(content))])
        with pytest.raises(ArchiveError):
            Archive(path)


def test_a_damaged_member_is_named(inside: Path, tmp_path: Path) -> None:
    content = bytearray(inside.read_bytes())
    content[content.index(LIBRARY) + 9] ^= 1
    (tmp_path / "m.pt2").write_bytes(content)
    with pytest.raises(ArchiveError, match=r"model0\.so is not what export wrote"):
        Archive(tmp_path / "m.pt2")


def test_other_files_are_refused(tmp_path: Path) -> None:
    torch.save({"x": 1}, tmp_path / "saved.pt2")
    (tmp_path / "text.pt2").write_text(json.dumps(FACTS))
    for name in ("saved", "text"):
        with pytest.raises(ArchiveError, match=f"{name}.pt2 is "):
            Archive(tmp_path / f"{name}.pt2")


def test_a_write_that_fails_leaves_the_old_file(inside: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.pt2"
    path.write_bytes(inside.read_bytes())
    with pytest.raises(FileNotFoundError):
        missing = Share({}, (tmp_path / "missing",), StoredWeights.of(weights()))
        write_archive(path, FACTS, MEMBERS, [missing])
    assert path.read_bytes() == inside.read_bytes()
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.pt2"]
