"""The exported file: a zip in torch's .pt2 layout with a manifest. Every byte is checked when it is opened.

The manifest holds the sha256 of every other member. The zip's comment, at the end of the file, holds the sha256 of all
bytes outside of member contents. Each rank has a compiled library and a shard of the weights, either as a safetensors
member or as a safetensors file next to the archive. Members are not compressed, so that weights are read from mapped
pages without copying the file.
"""

import dataclasses
import hashlib
import itertools
import json
import mmap
import os
import re
import stat
import tempfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

from detcompile import orders
from detcompile.archives.manifest import parsed, plain_name, require_shares
from detcompile.archives.stored_weights import SUFFIX, StoredWeights, files_beside, mapped, read_weights
from detcompile.errors import ArchiveError
from detcompile.orders.numerics import Numerics
from detcompile.orders.sum_order import SumOrder
from detcompile.passes.proof.certificate import Certificate, Entry

ROOT = "detcompile"  # top folder that torch's reader expects
LIBRARIES = "data/aotinductor"  # where torch looks for AOTInductor's outputs, one folder each
EXTRA = "extra/detcompile"
MANIFEST, MANIFEST_DIGEST = f"{EXTRA}/manifest.json", f"{EXTRA}/manifest.sha256"
LAYOUT = {"archive_format": b"pt2", "archive_version": b"0", "byteorder": b"little", ".data/version": b"3\n"}
RANK_MEMBER = re.compile(rf"(?:{EXTRA}|{LIBRARIES})/rank(\d+)[./]")
LOCAL_HEADER = b"PK\x03\x04"
CHUNK_BYTES = 1 << 24
COMMENT_BYTES = 2 * hashlib.sha256().digest_size  # in hex


class Share(NamedTuple):
    """One rank's part of an archive.

    Attributes:
        facts: the rank's manifest entries, plain JSON values; ``write_archive`` adds "weights".
        files: files of the rank's library.
        weights: the rank's shard of the weights.
    """

    facts: Mapping[str, Any]
    files: tuple[Path, ...]
    weights: StoredWeights


def library_folder(rank: int) -> str:
    """Return the folder that holds the members of a rank's library."""
    return f"{LIBRARIES}/rank{rank}"


def write_archive(
    path: Path,
    facts: Mapping[str, Any],
    members: Mapping[str, bytes],
    ranks: Sequence[Share],
    beside: bool = False,
) -> None:
    """Write an archive. Each file is written under a temporary name and renamed when it is complete.

    Args:
        facts: manifest entries, plain JSON values; "members" and "ranks" are added.
        members: contents by name, without the ranks' members.
        beside: write the weights to files next to the archive.

    Raises:
        OSError: a file cannot be written.
    """
    known: list[dict[str, Any]] = [
        {**share.facts, "weights": {"file": None, "strides": share.weights.strides}} for share in ranks
    ]
    if beside:
        for rank, (share, place) in enumerate(zip(ranks, files_beside(path, len(ranks)))):
            with _put_into_place(place) as file:
                known[rank]["weights"] |= {"file": place.name, **_write_hashed(file, share.weights.parts())}
    with _put_into_place(path) as file:
        with zipfile.ZipFile(file, "w") as archive:
            written: dict[str, Any] = {}

            def add(name: str, content: Iterable[Any]) -> None:
                with archive.open(zipfile.ZipInfo(f"{ROOT}/{name}"), "w", force_zip64=True) as member:
                    written[name] = _write_hashed(member, content)

            for name, content in (LAYOUT | dict(members)).items():
                add(name, [content])
            for rank, share in enumerate(ranks):
                for library in share.files:
                    add(f"{library_folder(rank)}/{library.name}", [library.read_bytes()])
                if not beside:
                    add(_weights_name(rank), share.weights.parts())
            manifest = json.dumps({**facts, "ranks": known, "members": written}, indent=1).encode()
            add(MANIFEST, [manifest])
            add(MANIFEST_DIGEST, [hashlib.sha256(manifest).hexdigest().encode()])
            archive.comment = b"0" * COMMENT_BYTES
        _seal(file, path)


class Archive:
    """An opened archive. All bytes are checked, except for members of other ranks, which those ranks check.

    Args:
        rank: the rank whose part is read; None reads no rank's part.

    Attributes:
        facts: the manifest.

    Raises:
        ArchiveError: the file is not an archive, is truncated, was changed since it was written, or has members or a
            manifest that export never writes. Raised by the constructor.
    """

    def __init__(self, path: Path, rank: int | None = 0) -> None:
        self.path = path
        self.rank = rank
        self._bytes = mapped(path)
        self._places = _places(self._bytes, path)
        if _frame_digest(self._bytes, self._places) != self._bytes[-COMMENT_BYTES:]:
            raise _damaged(path, "the directory of its members")
        for name in (MANIFEST, MANIFEST_DIGEST):
            if name not in self._places:
                raise ArchiveError(f"{path} holds no {name}: not a detcompile archive. Give one that export wrote")
        if _digest(self._view(MANIFEST)) != self.read(MANIFEST_DIGEST).decode(errors="replace"):
            raise _damaged(path, MANIFEST)
        self.facts: dict[str, Any] = parsed(path, MANIFEST, self.read(MANIFEST))
        require_shares(path, self.facts)
        self._require_whole()

    def read(self, name: str) -> bytes:
        """Return a member's contents."""
        return bytes(self._view(name))

    def names(self, folder: str) -> list[str]:
        """Return the names of the members in a folder."""
        return [name for name in self._places if name.startswith(f"{folder}/")]

    @property
    def share(self) -> dict[str, Any]:
        """This rank's entries of the manifest."""
        assert self.rank is not None
        return self.facts["ranks"][self.rank]

    def weights(self, device: torch.device) -> dict[str, Tensor]:
        """Copy this rank's weights to the device; return them by name.

        Raises:
            ArchiveError: the weights file next to the archive is missing, changed or malformed.
        """
        assert self.rank is not None
        where = self.share["weights"]
        name = _weights_name(self.rank)
        if where["file"] is None:
            if name not in self._places:
                raise _damaged(self.path, name)
            beside, content = self.path, self._view(name)
        else:
            beside = self.path.with_name(where["file"])
            content = memoryview(mapped(beside))
            if len(content) != where["bytes"] or _digest(content) != where["sha256"]:
                raise _damaged(beside, "its contents")
        return {name: tensor.to(device) for name, tensor in read_weights(beside, content, where["strides"])}

    def _view(self, name: str) -> memoryview:
        start, size = self._places[name]
        return memoryview(self._bytes)[start : start + size]

    def _require_whole(self) -> None:
        listed = self.facts["members"]
        others = set(self._places) - {MANIFEST, MANIFEST_DIGEST}
        for name in sorted(others ^ set(listed)):
            raise _damaged(self.path, name)
        for name, written in listed.items():
            if _rank_of(name) not in (None, self.rank):
                continue
            if self._places[name][1] != written["bytes"] or _digest(self._view(name)) != written["sha256"]:
                raise _damaged(self.path, name)


def _weights_name(rank: int) -> str:
    return f"{EXTRA}/rank{rank}{SUFFIX}"


def _rank_of(name: str) -> int | None:
    """Return the rank that a member belongs to; None if it belongs to all."""
    match = RANK_MEMBER.match(name)
    return None if match is None else int(match[1])


def _damaged(path: Path, what: str) -> ArchiveError:
    return ArchiveError(f"{path} is damaged: {what} is not what export wrote. Copy the file again, or export again.")


def _places(content: mmap.mmap, path: Path) -> dict[str, tuple[int, int]]:
    """Return (start, size) of each member's contents."""
    file: Any = content  # mmap has read, seek and tell, but no file type
    try:
        with zipfile.ZipFile(file) as archive:
            infos = archive.infolist()
    except Exception as error:  # zipfile raises many types on malformed input
        message = f"{path} is truncated, damaged or not an archive ({error}): copy or export it again"
        raise ArchiveError(message) from error
    places: dict[str, tuple[int, int]] = {}
    for info in infos:
        _require_plain(info, path)
        header = content[info.header_offset : info.header_offset + 30]  # ends with lengths of name and extra fields
        lengths = [int.from_bytes(header[at : at + 2], "little") for at in (26, 28)]
        start = info.header_offset + len(header) + sum(lengths)
        if header[:4] != LOCAL_HEADER or start + info.file_size > len(content):
            raise _damaged(path, info.filename)
        name = info.filename.removeprefix(f"{ROOT}/")
        if name in places:
            raise _damaged(path, f"{name}, which occurs twice,")
        places[name] = (start, info.file_size)
    ends = sorted((start, start + size, name) for name, (start, size) in places.items())
    for (_, end, _), (start, _, name) in itertools.pairwise(ends):
        if start < end:
            raise _damaged(path, f"{name}, which overlaps another member,")
    folders = {name[:at] for name in places for at in range(len(name)) if name[at] == "/"}
    for name in sorted(folders & places.keys()):
        raise _damaged(path, f"{name}, which is both a file and a folder,")
    return places


def _require_plain(info: zipfile.ZipInfo, path: Path) -> None:
    """Require an uncompressed regular file below ROOT, so that unpacking cannot write outside of the target folder."""
    inside = info.filename.startswith(f"{ROOT}/") and plain_name(info.filename) and plain_name(info.orig_filename)
    is_file = stat.S_IFMT(info.external_attr >> 16) in (0, stat.S_IFREG)
    stored = info.compress_type == zipfile.ZIP_STORED and info.compress_size == info.file_size
    if not (inside and is_file and stored):
        raise _damaged(path, repr(info.orig_filename))


def _seal(file: IO[bytes], path: Path) -> None:
    """Write the digest of all bytes outside of member contents into the zip comment."""
    file.flush()
    with mmap.mmap(file.fileno(), 0) as content:
        content[-COMMENT_BYTES:] = _frame_digest(content, _places(content, path))


def _frame_digest(content: mmap.mmap, places: Mapping[str, tuple[int, int]]) -> bytes:
    digest, at = hashlib.sha256(), 0
    for start, size in sorted(places.values()):
        digest.update(content[at:start])
        at = start + size
    digest.update(content[at:-COMMENT_BYTES])
    return digest.hexdigest().encode()


def _digest(content: memoryview) -> str:
    digest = hashlib.sha256()
    for start in range(0, len(content), CHUNK_BYTES):
        digest.update(content[start : start + CHUNK_BYTES])
    return digest.hexdigest()


class _put_into_place:
    """Open a temporary file; rename it to ``path`` if the block succeeds, otherwise delete it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> IO[bytes]:
        descriptor, self._name = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}-")
        self._file = os.fdopen(descriptor, "w+b")
        return self._file

    def __exit__(self, failed: Any, *_: Any) -> None:
        self._file.close()
        if failed is None:
            os.chmod(self._name, 0o666 & ~_umask())  # the mode of a new file
            os.replace(self._name, self.path)
        else:
            with suppress(OSError):
                os.unlink(self._name)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _write_hashed(file: IO[bytes], parts: Iterable[Any]) -> dict[str, Any]:
    digest, size = hashlib.sha256(), 0
    for part in parts:
        for start in range(0, len(part), CHUNK_BYTES):
            chunk = memoryview(part)[start : start + CHUNK_BYTES]
            digest.update(chunk)
            file.write(chunk)
        size += len(part)
    return {"sha256": digest.hexdigest(), "bytes": size}


def certificate_json(certificate: Certificate) -> bytes:
    """Serialize a certificate as JSON."""
    entries = [dataclasses.asdict(entry) for entry in certificate.entries]
    sums = [_order_json(order) for order in certificate.sums]
    return json.dumps({"entries": entries, "sums": sums}, indent=1).encode()


def read_certificate(content: dict[str, Any], numerics: Numerics) -> Certificate:
    """Return the certificate that ``certificate_json`` wrote. Malformed content raises any exception."""
    entries = tuple(Entry(**{**entry, "holds_for": tuple(entry["holds_for"])}) for entry in content["entries"])
    return Certificate(entries, numerics, tuple(_order(order) for order in content["sums"]))


def _order_json(order: SumOrder) -> dict[str, Any]:
    fields = {field.name: getattr(order, field.name) for field in dataclasses.fields(order)}  # type: ignore[arg-type]
    nested = {name: _order_json(value) if isinstance(value, SumOrder) else value for name, value in fields.items()}
    return {"order": type(order).__name__, **nested}


def _order(content: dict[str, Any]) -> SumOrder:
    kind = getattr(orders, content["order"])
    if not (isinstance(kind, type) and issubclass(kind, SumOrder)):
        raise ValueError(f"{content['order']} is not a SumOrder")
    fields = {name: _order(value) if isinstance(value, dict) else value for name, value in content.items()}
    return kind(**{name: tuple(v) if isinstance(v, list) else v for name, v in fields.items() if name != "order"})
