"""Skip cases that torch before 2.13 cannot trace for an unknown number of rows; they are refused there
(docs/limits.md)."""

import pytest
import torch

__all__ = ["needs_torch_2_13", "skip_before_torch_2_13"]

BEFORE_2_13 = torch.__version__ < (2, 13)


def needs_torch_2_13(reason: str) -> pytest.MarkDecorator:
    """Return a mark for tests that torch before 2.13 cannot run; ``reason`` says what it does instead."""
    return pytest.mark.skipif(BEFORE_2_13, reason=f"torch before 2.13 {reason}")


def skip_before_torch_2_13(name: str, reasons: dict[str, str]) -> None:
    """Skip the cases named in ``reasons``, which say what torch before 2.13 does instead."""
    if BEFORE_2_13 and name in reasons:
        pytest.skip(f"torch before 2.13 {reasons[name]}")
