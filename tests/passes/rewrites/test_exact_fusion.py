"""Exact products are fused with the gate, norm and residual sum around them, with the same bytes."""

from collections import Counter
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

import detcompile
from detcompile import Numerics
from detcompile.passes.rewrites import exact_fusion, rope
from tests.bits import assert_bitwise_equal
from tests.exact import definition as exact
from tests.exact import golden
from tests.exhaustive import exhaustive_unless
from tests.model_cases import certified, random_model

# Exact operations of one layer and the head after the fusion.
CASES = {
    "qwen3": ("qwen3", {}, {"exact_fused_linear": 4, "exact_linear": 1, "exact_rms_norm": 1}),
    "llama with biases": (
        "llama",
        {"attention_bias": True, "mlp_bias": True},
        {"exact_fused_linear": 4, "exact_linear": 1, "exact_rms_norm": 1},
    ),
    "gemma2, with norms after products": (
        "gemma2",
        {},
        {"exact_fused_linear": 3, "exact_linear": 2, "exact_rms_norm": 3, "exact_function": 1, "exact_divide": 1},
    ),
    "phi3, rotated in part": (
        "phi3",
        {"partial_rotary_factor": 0.5},
        {"exact_fused_linear": 4, "exact_linear": 1, "exact_rms_norm": 1},
    ),
}


@pytest.fixture
def on_every_device() -> Iterator[None]:
    devices = ("cpu", "cuda")
    with mock.patch.object(exact_fusion, "DEVICES", devices), mock.patch.object(rope, "DEVICES", devices):
        yield


def counts(certificate: detcompile.Certificate) -> dict[str, int]:
    total: Counter[str] = Counter()
    for entry in certificate.entries:
        name = entry.op.removeprefix("detcompile.").removesuffix(".default")
        if name.startswith("exact_"):
            total[name] += entry.count
    return total


@pytest.mark.parametrize("arithmetic", exhaustive_unless("exact8x16".__eq__, ["exact8x16", "exact16"]))
@pytest.mark.parametrize("case", exhaustive_unless("qwen3".__eq__, list(CASES)))
def test_fused_and_separate_operations_have_the_same_bytes(
    case: str, arithmetic: str, request: pytest.FixtureRequest
) -> None:
    name, changes, expected = CASES[case]
    changes, numerics = {"num_hidden_layers": 1, **changes}, Numerics(arithmetic=arithmetic)
    separate = certified(random_model(name, torch.float32, **changes), numerics=numerics)
    request.getfixturevalue("on_every_device")
    fused = certified(random_model(name, torch.float32, **changes), numerics=numerics)
    assert "exact_fused_linear" not in counts(separate.certificate)
    if arithmetic == "exact8x16":
        assert counts(fused.certificate) == expected | {"exact_rotated_attention": 1}
    tokens = torch.randint(0, 160, (3, 90), generator=torch.Generator().manual_seed(1))
    assert_bitwise_equal(fused(tokens).logits, separate(tokens).logits)


def test_tiny_has_the_golden_digests(on_every_device: None) -> None:
    model = detcompile.compile("tiny", numerics=Numerics(arithmetic="exact8x16"))
    logits = model(torch.tensor([exact.fixed_tokens(127)])).logits[0]
    assert model.fingerprint == golden.kept()["fingerprints"]["exact8x16"]
    assert exact.digest(logits.numpy()) == golden.kept()["logits"]["exact8x16"]["127"]
