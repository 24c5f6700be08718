"""Axis: another process."""

import pytest

import detcompile
from detcompile import DetcompileError, Numerics
from detcompile.verification import ModelSpec, verify


def test_a_fresh_process_gives_the_same_bytes(device: str) -> None:
    spec = ModelSpec("tiny", device=device)
    result = verify(spec.compile(), spec, ["restart"])["restart"]
    assert result.holds
    assert result.configurations == 4


def test_a_process_with_other_orders_is_seen(device: str) -> None:
    model = detcompile.compile(detcompile.load_model("tiny", device=device), numerics=Numerics(tp_sizes=(1, 2)))
    with pytest.raises(DetcompileError, match="another fingerprint"):
        verify(model, ModelSpec("tiny", device=device), ["restart"])
