"""The file of an archive: what was written comes back, and no changed byte or missing end goes unseen."""

import copy
import hashlib
import itertools
import json
import stat
import struct
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from detcompile import Numerics
from detcompile.archives.archive import (
    EXTRA,
    MANIFEST,
    MANIFEST_DIGEST,
    ROOT,
    Archive,
    Share,
    library_folder,
    write_archive,
)
from detcompile.archives.manifest import require_model
from detcompile.archives.stored_weights import StoredWeights
from detcompile.errors import ArchiveError, DetcompileError
from tests.bits import assert_bitwise_equal

FACTS = {"format": 1, "dtype": "bfloat16"}
MEMBERS = {f"{EXTRA}/notes.txt": b"some words"}
LIBRARY = bytes(range(256))
CPU = torch.device("cpu")
MODEL = {
    "fingerprint": "0" * 64,
    "fingerprint_parts": {"source": "0" * 64},
    "weight_digests": {"a.weight": "0" * 64},
    "machine": {"device": "cpu", "platform": "x86_64", "torch": "2.13.0", "isa": "avx2", "vectors": "avx2"},
    "numerics": {"kv_chunk": 512, "tp_sizes": [1, 2]},
    "max_context": 2048,
    "dtype": "bfloat16",
    "num_token_ids": 160,
    "num_logits": 160,
    "name_or_path": "org/name",
    "num_parameters": [12, 4],
    "config": {"model_type": "qwen3"},
    "generation_config": {"eos_token_id": [2], "pad_token_id": None},
    "state_shapes": [[[80, 3], True]],
    "kv_groups": [[[0], None], [[1], 70]],
    "ranks": [{"arguments": [0, "a.weight"], "kv_shapes": [[2, 20, 20], [2, 20, 20]], "num_threads": 2}],
}
ODD: list[Any] = [None, True, -1, 0, 1 << 70, 0.5, float("nan"), "", "..", "x" * 300, {}, {"a": 1}]
ODD += [[], [[]], [-1], [1 << 40]]


def weights() -> dict[str, Tensor]:
    """Of every kind: dtypes, a scalar, no elements, strides that are not those of a row after a row."""
    torch.manual_seed(0)
    return {
        "a.weight": torch.randn(3, 5).bfloat16(),
        "eighths": torch.randn(2, 3).to(torch.float8_e4m3fn),
        "flags": torch.tensor([True, False, True]),
        "norm": torch.randn(7),
        "nothing": torch.empty(0, 3),
        "quantized": torch.randn(4, 6).to(torch.float8_e4m3fn),
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


def assert_the_same_weights(actual: dict[str, Tensor]) -> None:
    assert actual.keys() == weights().keys()
    for name, tensor in weights().items():
        assert_bitwise_equal(actual[name], tensor, name)
        assert actual[name].stride() == tensor.stride(), name


def test_archive_round_trips(inside: Path) -> None:
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
def test_each_rank_checks_its_own_members(tmp_path: Path, beside: bool) -> None:
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
def test_truncated_file_is_rejected(inside: Path, end: float) -> None:
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


def test_failed_write_keeps_the_old_file(inside: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.pt2"
    path.write_bytes(inside.read_bytes())
    with pytest.raises(FileNotFoundError):
        missing = Share({}, (tmp_path / "missing",), StoredWeights.of(weights()))
        write_archive(path, FACTS, MEMBERS, [missing])
    assert path.read_bytes() == inside.read_bytes()
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.pt2"]


Members = Sequence[tuple[str | zipfile.ZipInfo, bytes]]


def forged(target: Path, path: Path, more: Members = (), facts: Any = None, drop: str = "") -> Path:
    """An archive with other members and another manifest, whole as far as its digests go."""
    with zipfile.ZipFile(path) as old:
        kept = {name.removeprefix(f"{ROOT}/"): old.read(name) for name in old.namelist()}
    known = json.loads(kept[MANIFEST])
    added = [(one.filename if isinstance(one, zipfile.ZipInfo) else one, content) for one, content in more]
    for name, content in added:
        digest = hashlib.sha256(content).hexdigest()
        known["members"][name.removeprefix(f"{ROOT}/")] = {"sha256": digest, "bytes": len(content)}
    manifest = json.dumps(known if facts is None else facts).encode() if not isinstance(facts, bytes) else facts
    kept |= {MANIFEST: manifest, MANIFEST_DIGEST: hashlib.sha256(manifest).hexdigest().encode()}
    with zipfile.ZipFile(target, "w") as archive:
        for name, content in kept.items():
            if name != drop:
                archive.writestr(f"{ROOT}/{name}", content)
        for one, content in more:
            archive.writestr(one, content)
        archive.comment = b"0" * 64
    return sealed(target)


def sealed(path: Path) -> Path:
    """Recompute the digest of everything outside the members' contents."""
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        places = sorted((content.find(b"PK", i.header_offset), i.file_size) for i in archive.infolist())
    digest, at = hashlib.sha256(), 0
    for offset, size in places:
        start = offset + 30 + sum(struct.unpack("<HH", content[offset + 26 : offset + 30]))
        digest.update(content[at:start])
        at = start + size
    digest.update(content[at:-64])
    content[-64:] = digest.hexdigest().encode()
    path.write_bytes(content)
    return path


def linked(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.create_system, info.external_attr = 3, (stat.S_IFLNK | 0o777) << 16
    return info


def squeezed(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.compress_type = zipfile.ZIP_DEFLATED
    return info


def test_a_forgery_without_a_fault_is_taken(inside: Path, tmp_path: Path) -> None:
    """So that what refuses the others is their fault."""
    archive = Archive(forged(tmp_path / "m.pt2", inside, [(f"{ROOT}/{EXTRA}/more.txt", b"more")]))
    assert archive.read(f"{EXTRA}/more.txt") == b"more"


OUTSIDE = [
    *("../x", "../../x", "a/../../../x", "/x", "//x", "./x", "a//x", "a/", "a/./x", "..", "."),
    *("..\\x", "a\\..\\x", "C:x", "a\nb", "a\u202eb", "x" * 300),
]


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("folder", [library_folder(0), f"{EXTRA}/tokenizer", ""])
def test_member_outside_the_folder_is_rejected(inside: Path, tmp_path: Path, folder: str, name: str) -> None:
    member = f"{ROOT}/{folder}/{name}" if folder else name
    path = forged(tmp_path / "m.pt2", inside, [(member, b"planted")])
    with pytest.raises(ArchiveError, match=r"m\.pt2 is damaged: "):
        Archive(path)


ODD_MEMBERS = [linked(f"{ROOT}/{EXTRA}/x"), squeezed(f"{ROOT}/{EXTRA}/x")]
ODD_MEMBERS += [f"{ROOT}/{EXTRA}/notes.txt", f"{ROOT}/{EXTRA}"]


@pytest.mark.parametrize("member", ODD_MEMBERS)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_links_compressed_and_repeated_members_are_refused(inside: Path, tmp_path: Path, member: Any) -> None:
    path = forged(tmp_path / "m.pt2", inside, [(member, b"/etc/passwd" * 100)])
    with pytest.raises(ArchiveError, match=r"m\.pt2 is damaged: "):
        Archive(path)


@pytest.mark.parametrize("drop", [f"{EXTRA}/notes.txt", f"{EXTRA}/rank0.safetensors"])
def test_missing_listed_member_is_named(inside: Path, tmp_path: Path, drop: str) -> None:
    with pytest.raises(ArchiveError, match=f"m.pt2 is damaged: {drop}"):
        Archive(forged(tmp_path / "m.pt2", inside, drop=drop)).weights(CPU)


@pytest.mark.parametrize("place", ["../other", "/etc/passwd", "a/b", "..", ""])
def test_weights_beside_are_beside(inside: Path, tmp_path: Path, place: str) -> None:
    facts = Archive(inside).facts
    facts["ranks"][0]["weights"] |= {"file": place, "bytes": 1, "sha256": "0" * 64}
    with pytest.raises(ArchiveError, match=r"m\.pt2 is not what export wrote: manifest, ranks\[0\]: weights"):
        Archive(forged(tmp_path / "m.pt2", inside, facts=facts))


@pytest.mark.parametrize("manifest", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 200_000, b'{"members": {}}'])
def test_malformed_manifest_is_rejected(inside: Path, tmp_path: Path, manifest: bytes) -> None:
    with pytest.raises(ArchiveError, match=r"m\.pt2 is not what export wrote"):
        Archive(forged(tmp_path / "m.pt2", inside, facts=manifest))


def places_in(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Of every value inside a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, item in inner for place in places_in(item, (*at, key)))]


def with_odd(facts: Any, draw: st.DataObject) -> Any:
    """Facts with up to three values replaced by odd ones, or gone."""
    facts = copy.deepcopy(facts)
    for _ in range(draw.draw(st.integers(1, 3))):
        *path, last = draw.draw(st.sampled_from([place for place in places_in(facts) if place]))
        inner = facts
        for key in path:
            inner = inner[key]
        if isinstance(inner, dict) and draw.draw(st.booleans()):
            del inner[last]
        else:
            inner[last] = copy.deepcopy(draw.draw(st.sampled_from(ODD)))
    return facts


@settings(max_examples=80)
@given(draw=st.data())
def test_forged_manifest_raises_only_archive_error(inside: Path, draw: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = forged(Path(folder, "m.pt2"), inside, facts=with_odd(Archive(inside).facts, draw))
        try:
            assert Archive(path).weights(CPU)
        except ArchiveError as error:
            assert "m.pt2 is " in str(error)
        assert [file.name for file in Path(folder).iterdir()] == ["m.pt2"]


@settings(max_examples=300)
@given(draw=st.data())
def test_forged_facts_are_rejected_or_well_typed(draw: st.DataObject) -> None:
    facts = with_odd(MODEL, draw)
    facts.setdefault("ranks", [])
    try:
        require_model(Path("m.pt2"), MODEL)
        if not isinstance(facts["ranks"], list):  # which require_shares refuses
            return
        require_model(Path("m.pt2"), facts)
        Numerics(**facts["numerics"])
    except (ArchiveError, DetcompileError, TypeError):
        return
    assert isinstance(getattr(torch, facts["dtype"]), torch.dtype)
    layers = {layer for layers, _ in facts["kv_groups"] for layer in layers}
    shapes = [share["kv_shapes"] for share in facts["ranks"]]
    for extents in (*itertools.chain(*shapes), *(shape for shape, _ in facts["state_shapes"])):
        assert 0 <= torch.empty(extents, device="meta").numel() <= 1 << 24
    assert all(layers == set(range(len(of_rank))) for of_rank in shapes)


HEADERS = [
    {"dtype": "F16", "shape": [4], "data_offsets": [0, 16]},
    {"dtype": "F32", "shape": [1 << 60], "data_offsets": [0, 16]},
    {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]},
    {"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]},
    {"dtype": "F32", "shape": [4], "data_offsets": [16, 0]},
    {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]},
    {"dtype": "S7", "shape": [4], "data_offsets": [0, 16]},
    {"dtype": "F32", "shape": "4", "data_offsets": [0, 16]},
    {"shape": [4]},
    [],
]


@pytest.mark.parametrize("header", [{"w": entry} for entry in HEADERS] + [[], None, "w"])
def test_forged_weights_are_refused(inside: Path, tmp_path: Path, header: Any) -> None:
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(16)
    member = f"{EXTRA}/rank0.safetensors"
    facts = Archive(inside).facts
    facts["members"][member] = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    with zipfile.ZipFile(tmp_path / "old.pt2", "w") as archive, zipfile.ZipFile(inside) as old:
        for name in old.namelist():
            archive.writestr(name, content if name.endswith(member) else old.read(name))
    actual = Archive(forged(tmp_path / "m.pt2", tmp_path / "old.pt2", facts=facts))
    with pytest.raises(ArchiveError, match=r"m\.pt2 is damaged: its weights"):
        actual.weights(CPU)


@pytest.mark.parametrize("strides", [[1 << 39, 1], [0, 1], [1], [5, 1, 1]])
def test_forged_strides_take_no_memory(inside: Path, tmp_path: Path, strides: list[int]) -> None:
    facts = Archive(inside).facts
    facts["ranks"][0]["weights"]["strides"]["a.weight"] = strides
    with pytest.raises(ArchiveError, match=r"its weights are not what export wrote \(a\.weight has"):
        Archive(forged(tmp_path / "m.pt2", inside, facts=facts)).weights(CPU)


@settings(max_examples=100)
@given(changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_forged_directory_of_members_is_refused(
    inside: Path, changes: list[tuple[float, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Its bytes changed, and the digest of them made anew where zipfile still reads it."""
    content = bytearray(inside.read_bytes())
    start = content.index(b"PK\x01\x02")
    for at, value in changes:
        content[start + int(at * (len(content) - 64 - start))] = value
    path = tmp_path_factory.mktemp("forged") / "m.pt2"
    path.write_bytes(content)
    try:
        sealed(path)
    except Exception:  # zipfile's, or what comes of places beyond the end
        path.write_bytes(content)
    try:
        assert Archive(path).names(library_folder(0))
    except ArchiveError as error:
        assert "m.pt2 " in str(error)
