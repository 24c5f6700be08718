"""Files of a model's weights, by the names that transformers looks for."""

import contextlib
import json
from pathlib import Path

import huggingface_hub

WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # or an index of parts for each; in this order


def weight_files(folder: Path) -> list[Path]:
    """Return a folder's weight files; none if there are none or the index is invalid, which the loader reports."""
    for name in WEIGHTS:
        if (folder / name).is_file():
            return [folder / name]
        if parts := parts_of(folder, name):
            return [folder / part for part in parts]
    return []


def parts_of(folder: Path, name: str) -> list[str]:
    """Return the files that an index names; none if the index is invalid, which the loader reports."""
    try:
        places = json.loads((folder / f"{name}.index.json").read_bytes())["weight_map"]
        return sorted({str(part) for part in places.values()})
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return []


def files_at_hand(name: str) -> list[Path]:
    """Return the weights of a local folder, or of an id's main branch in the Hub's cache; none for any other text.

    It imports neither torch nor transformers.
    """
    with contextlib.suppress(OSError, ValueError):  # the text may be too long for a path, or not an id
        if Path(name).is_dir():
            return weight_files(Path(name))
        if name.count("/") == 1 and not Path(name).exists():
            config = huggingface_hub.try_to_load_from_cache(name, "config.json")
            return weight_files(Path(config).parent) if isinstance(config, str) else []
    return []
