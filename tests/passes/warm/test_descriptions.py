"""A model from a checkpoint is described completely, so that its program can be kept."""

from pathlib import Path
from typing import Any

import pytest
import torch

from detcompile.models.loading import find
from detcompile.passes.warm.descriptions import Descriptions
from tests.exhaustive import exhaustive_unless
from tests.model_cases import ARCHITECTURES, STATEFUL, random_model

NAMES = [*ARCHITECTURES, *STATEFUL, "mixtral", "qwen3_moe"]
QUICK = ("llama", "gpt_neox", "mixtral")  # transformers renames the weights of the second, and stacks the third's


@pytest.mark.parametrize("name", exhaustive_unless(lambda name: name in QUICK, NAMES))
def test_two_loads_of_a_checkpoint_have_one_description(name: str, tmp_path: Path) -> None:
    random_model(name, torch.float32).save_pretrained(tmp_path)
    one, other = (described(tmp_path) for _ in range(2))
    assert one == other


def described(folder: Path) -> list[Any]:
    model = find(folder, device="cpu").on(torch.device("cpu"))
    descriptions = Descriptions(model)
    return [descriptions.module(module) for module in model.modules()]
