"""WeightStore: a folder with the server's current weights, so that a lost engine or server starts with them."""

import contextlib
import json
import os
import shutil
from pathlib import Path

import msgspec

from detcompile.errors import InvalidInput
from detcompile.serving.engines.protocol import Weights
from detcompile.storage import naming

CURRENT = "current.json"
FIRST = Weights("0", 0, "", "")  # the weights that the model is loaded with


class Kept(msgspec.Struct):
    """The file CURRENT.

    Attributes:
        folder: the weights' folder, in the store.
        version: their name.
        number: number of earlier versions.
        digest: the fingerprint's part for them; not checked if empty.
    """

    folder: str
    version: str
    number: int
    digest: str = ""

    @property
    def weights(self) -> Weights:
        """Return the version without the fingerprint."""
        return Weights(self.version, self.number, "", self.digest)


class WeightStore:
    """Keeps one version. A single rename replaces it, so the next server finds the old version or the new one.

    Args:
        root: the folder; created if it is missing.

    Attributes:
        kept: the version that is kept; None before the first.

    Raises:
        InvalidInput: the folder holds something else.
        StorageError: it cannot be written.
    """

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        with naming(self._root):
            self._root.mkdir(parents=True, exist_ok=True)
        self.kept: Kept | None = None
        file = self._root / CURRENT
        if file.exists():
            try:
                self.kept = msgspec.json.decode(file.read_bytes(), type=Kept)
            except (OSError, msgspec.DecodeError) as error:
                raise InvalidInput(f"--weights {root}: {CURRENT} cannot be read: {error}") from error
            if not self.folder.is_dir():
                raise InvalidInput(f"--weights {root}: {CURRENT} names {self.kept.folder}, which is missing")
        self.clean()

    @property
    def folder(self) -> Path:
        """Return the folder of the version that is kept."""
        assert self.kept is not None
        return self._root / self.kept.folder

    def new_folder(self, number: int) -> Path:
        """Return an empty folder for a version, which ``keep`` makes the current one.

        Raises:
            StorageError: it cannot be created.
        """
        folder = self._root / f"version-{number}"
        with naming(folder):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        return folder

    def copy(self, source: Path, folder: Path) -> None:
        """Put the weight files of a folder into another one, as hard links where the file system allows it.

        Raises:
            StorageError: a file cannot be written.
        """
        with naming(folder):
            for path in sorted(source.glob("*.safetensors*")):
                with contextlib.suppress(OSError):
                    os.link(path.resolve(), folder / path.name)
                    continue
                shutil.copyfile(path, folder / path.name)

    def keep(self, kept: Kept) -> None:
        """Make a folder's version the current one. ``clean`` deletes the others.

        Raises:
            StorageError: the file cannot be written; the old version is kept.
        """
        with naming(self._root / CURRENT):
            new = self._root / f"{CURRENT}.new"
            with new.open("wb") as file:
                file.write(json.dumps(msgspec.to_builtins(kept)).encode())
                file.flush()
                os.fsync(file.fileno())
            new.replace(self._root / CURRENT)
        self.kept = kept

    def forget(self) -> None:
        """Keep no version: the model's own weights are the current ones.

        Raises:
            StorageError: the file cannot be deleted.
        """
        with naming(self._root / CURRENT):
            (self._root / CURRENT).unlink(missing_ok=True)
        self.kept = None

    def clean(self) -> None:
        """Delete the versions that are not the current one."""
        for folder in self._root.glob("version-*"):
            if self.kept is None or folder.name != self.kept.folder:
                shutil.rmtree(folder, ignore_errors=True)
