"""The files that transformers reads a model's weights from, by the names that it looks for."""

import contextlib
import json
from pathlib import Path

import huggingface_hub

__all__ = ["WEIGHTS", "files_at_hand", "parts_of", "weight_files"]

WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # or an index each, of files that hold a part; in this order


def weight_files(folder: Path) -> list[Path]:
    """The weights of a folder; none where it has none, or no sound index, of which the loader says what is wrong."""
    for name in WEIGHTS:
        if (folder / name).is_file():
            return [folder / name]
        if parts := parts_of(folder, name):
            return [folder / part for part in parts]
    return []


def parts_of(folder: Path, name: str) -> list[str]:
    """The files that an index names; none without a sound index, of which the loader says what is wrong."""
    try:
        places = json.loads((folder / f"{name}.index.json").read_bytes())["weight_map"]
        return sorted({str(part) for part in places.values()})
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return []


def files_at_hand(name: str) -> list[Path]:
    """The weights of a local folder, or of the main branch that the Hub's cache has of an id; none of any other text.

    Neither torch nor transformers is imported for it.
    """
    with contextlib.suppress(OSError, ValueError):  # any text: too long for a path, no id
        if Path(name).is_dir():
            return weight_files(Path(name))
        if name.count("/") == 1 and not Path(name).exists():
            config = huggingface_hub.try_to_load_from_cache(name, "config.json")
            return weight_files(Path(config).parent) if isinstance(config, str) else []
    return []
