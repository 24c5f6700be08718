"""Reads the output of `detcompile verify --json`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from detcompile.commands.text_files import read_text_file
from detcompile.errors import InvalidInput

__all__ = ["Measurement", "read_measurements"]

COUNTS = ("configurations", "unique_logits", "unique_outputs")
DIVERGENCE = "max_probability_divergence"


@dataclass(frozen=True)
class Measurement:
    """The measurements of one axis. Equal bits mean one unique result and a divergence of 0."""

    configurations: int
    unique_logits: int
    unique_outputs: int
    divergence: float

    @property
    def holds(self) -> bool:
        """Whether every configuration gave the same bits."""
        return self.unique_logits == 1 and self.divergence == 0.0


def read_measurements(path: Path) -> tuple[str, dict[str, Measurement]]:
    """Return the fingerprint, and the measurements by axis.

    Raises:
        InvalidInput: the file cannot be read, or has another format.
    """
    try:
        content = json.loads(read_text_file(path))
        return str(content["fingerprint"]), {axis: _read(one) for axis, one in content["axes"].items()}
    except InvalidInput:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidInput(
            f"{path} is not what `detcompile verify MODEL --json` prints ({type(error).__name__}: {error})"
        ) from error


def _read(figures: Any) -> Measurement:
    counts, divergence = {name: figures[name] for name in COUNTS}, figures[DIVERGENCE]
    if not all(type(count) is int and count >= 0 for count in counts.values()) or type(divergence) is not float:
        raise ValueError(f"{[*counts.values(), divergence]} are not measurements of an axis")
    return Measurement(**counts, divergence=divergence)
