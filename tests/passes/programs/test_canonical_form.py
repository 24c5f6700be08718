"""Graphs that compute different things have different digests."""

import math

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from detcompile.passes.programs.canonical_form import program_digest


def digest_of(constant: float) -> str:
    return program_digest(make_fx(lambda x: x * constant, tracing_mode="fake")(torch.ones(3)), ["x"])


def test_a_constant_counts_with_all_its_bits() -> None:
    assert digest_of(0.1) == digest_of(0.1) != digest_of(math.nextafter(0.1, 1.0))
