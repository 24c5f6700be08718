"""Axis: another process."""

import subprocess
from unittest import mock

import pytest
import torch

from detcompile import DetcompileError
from detcompile.commands import verification
from detcompile.commands.verification import PROMPT_LENGTHS, verify
from detcompile.models.spec import ModelSpec
from tests.model_cases import compiled

MODEL = "tiny-draft"  # as "tiny", and sooner compiled


def test_a_fresh_process_gives_the_same_bytes(device: str) -> None:
    spec = ModelSpec(MODEL, device=device)
    result = verify(compiled(MODEL, torch.bfloat16, device), spec, ["restart"])["restart"]
    assert result.holds
    assert result.configurations == 4


@pytest.mark.parametrize("seen", ["another fingerprint", "other logits"])
def test_another_answer_of_the_process_is_seen(seen: str, device: str) -> None:
    model = compiled(MODEL, torch.bfloat16, device)
    fingerprint = "0" * 64 if seen == "another fingerprint" else model.fingerprint
    answer = {"fingerprint": fingerprint, "logits": [torch.zeros(n, model.vocab_size) for n in PROMPT_LENGTHS[:2]]}
    ended = subprocess.CompletedProcess([], 0, "", "")
    with (
        mock.patch.object(verification.subprocess, "run", return_value=ended),
        mock.patch.object(verification.torch, "load", return_value=answer),
    ):
        if seen == "another fingerprint":
            with pytest.raises(DetcompileError, match="another fingerprint"):
                verify(model, ModelSpec(MODEL, device=device), ["restart"])
        else:
            assert not verify(model, ModelSpec(MODEL, device=device), ["restart"])["restart"].holds
