"""Every axis on every architecture that the other files of this folder leave out, with few configurations each.

In the dtypes that tests/architectures compiles too: some of them in bfloat16.
"""

import pytest
import torch

from tests.architectures.test_meaning import CASES
from tests.exhaustive import exhaustive_unless
from tests.invariance.axis import MODELS, assert_every_axis_holds
from tests.model_cases import ARCHITECTURES, CANONICAL, compiled

OTHERS = [name for name in ARCHITECTURES if name not in {model.values[0] for model in MODELS}]


def dtype_of(name: str) -> torch.dtype:
    return torch.bfloat16 if (name, torch.bfloat16) in CASES else torch.float32


@pytest.mark.parametrize("name", exhaustive_unless(lambda name: (name, dtype_of(name)) in CANONICAL, OTHERS))
def test_every_axis_holds(name: str, device: str) -> None:
    """577 tokens are beyond a chunk of keys and the windows; 129 beyond two blocks and a window."""
    model = compiled(name, dtype_of(name), device)
    for length, seed in ((577, 1), (129, 2)):
        assert_every_axis_holds(model, length, seed)
