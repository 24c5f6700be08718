"""Norm, rotation and cache write as one operation: recognized where they are, with the bytes of the separate ones."""

import types
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import nn

import detcompile
from detcompile.passes import pipeline, tracing
from detcompile.passes.rewrites import rope
from tests.bits import assert_bitwise_equal
from tests.exhaustive import exhaustive_unless
from tests.model_cases import certified, random_model

APART = tuple(apply for apply in pipeline.PASSES if apply is not rope.fuse_rope)


@pytest.fixture(autouse=True)
def fused_on_every_device() -> Iterator[None]:
    with mock.patch.object(rope, "DEVICES", ("cpu", "cuda")):
        yield


CASES = {
    "qwen3": ("qwen3", {}),
    "a window, and none": (
        "gemma3_text",
        {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2},
    ),
    "phi3": ("phi3", {}),
    "phi3, rotated in part": ("phi3", {"partial_rotary_factor": 0.5}),
    "gpt_neox, rotated in part": ("gpt_neox", {}),
    "llama with biases": ("llama", {"attention_bias": True}),
}


def count(certificate: detcompile.Certificate, name: str) -> int:
    return sum(entry.count for entry in certificate.entries if entry.op == f"detcompile.{name}.default")


WITH_INDUCTOR = [("qwen3", torch.float32), ("phi3, rotated in part", torch.bfloat16)]  # for time


ALL = [*((case, torch.bfloat16) for case in CASES), ("qwen3", torch.float32)]


@pytest.mark.parametrize(("case", "dtype"), exhaustive_unless(("qwen3", torch.bfloat16).__eq__, ALL))
def test_fused_and_separate_operations_have_the_same_bytes(case: str, dtype: torch.dtype) -> None:
    name, changes = CASES[case]
    changes = {"num_hidden_layers": 1, **changes}
    compile_model = detcompile.compile if (case, dtype) in WITH_INDUCTOR else certified
    with mock.patch.object(pipeline, "PASSES", APART):
        separate = compile_model(random_model(name, dtype, **changes))
    fused = compile_model(random_model(name, dtype, **changes))
    layers = fused.model.config.num_hidden_layers
    assert count(separate.certificate, "rope_cache") == 0 and count(separate.certificate, "paged_attention") == layers
    assert count(fused.certificate, "rope_cache") == count(fused.certificate, "cached_attention") == layers
    tokens = torch.randint(0, 160, (3, 90), generator=torch.Generator().manual_seed(1))
    assert_bitwise_equal(fused(tokens).logits, separate(tokens).logits)
    assert torch.equal(fused.generate(tokens[:1], max_new_tokens=4), separate.generate(tokens[:1], max_new_tokens=4))


def test_a_layer_with_head_norms_has_two_norms_left() -> None:
    """Qwen3: before attention and before the MLP; those of q and k are part of rope_cache, whose order is declared."""
    certificate = certified(random_model("qwen3", torch.bfloat16, num_hidden_layers=1)).certificate
    assert count(certificate, "rms_norm") == 2 + 1
    assert {entry.order for entry in certificate.entries if "rope_cache" in entry.op} == {"Row(32, lanes=64, vector=1)"}


def test_what_dynamo_saw_of_another_model_makes_no_extent_a_symbol() -> None:
    """A later model's code may bear the name of one that is gone, by which Dynamo remembers numbers that change."""

    def named_alike(module: nn.Module) -> types.MethodType:
        forward = type(module).forward
        code = forward.__code__.replace(co_name="forward_of_both")
        return types.MethodType(types.FunctionType(code, forward.__globals__), module)

    with mock.patch.object(tracing, "with_fresh_code", named_alike):
        for name in ("gemma3_text", "phi3"):
            certificate = certified(random_model(name, torch.bfloat16, num_hidden_layers=1)).certificate
    assert count(certificate, "rope_cache") == 1


@pytest.mark.parametrize("name", ["gptj", "cohere", "opt"])
def test_what_is_not_recognized_stays_apart(name: str) -> None:
    """Neighboring features rotated with each other, or no rotation at all."""
    certificate = certified(random_model(name, torch.float32, num_hidden_layers=1)).certificate
    assert count(certificate, "rope_cache") == 0 and count(certificate, "paged_attention") == 1


def test_heads_that_the_kernel_does_not_hold_stay_apart() -> None:
    with mock.patch.object(rope, "MOST_FEATURES", 16):
        certificate = certified(random_model("llama", torch.float32, num_hidden_layers=1)).certificate
    assert count(certificate, "rope_cache") == 0 and count(certificate, "paged_attention") == 1
