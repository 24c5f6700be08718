"""Golden digests of the operations and of `tiny`, for the bits version that they were recorded under.

`python -m tests.test_bits_version` records what golden_digests.json lacks, and everything anew if BITS_VERSION was
raised; DETCOMPILE_CPU_ISA chooses the instruction set. On a CPU with AMX, record with avx512bf16 first.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from detcompile import EngineConfig, SamplingParams
from detcompile.digests import BITS_VERSION
from detcompile.errors import DetcompileError
from detcompile.passes.programs.lanes import vector_isa
from detcompile.templates.cpu import library
from tests.exhaustive import EXHAUSTIVE_BY_CASE
from tests.model_cases import compiled
from tests.templates import test_directed_calls as directed

GOLDEN = Path(__file__).with_name("golden_digests.json")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SCALES = (1, 5, 9)  # of the sizes of test_directed_calls
# Their CPU reference takes torch's exp, whose float32 bits depend on the CPU's vendor. No graph of a CPU has them.
BY_TORCH = {"gated_matmul float32", "silu_mul float32"}
OTHERS = [isa for isa in library.supported_isas() if isa != library.isa()]
ADVICE = """bits moved under bits version {}. If this is intended, raise BITS_VERSION in detcompile/digests.py, name the
operation in CHANGELOG.md and run: python -m tests.test_bits_version"""


def rounding_rows(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """Return a replacement of ``rows``: values of 24 bits and 13 exponents, so that the order of a sum shows, made of
    integers, so that no library's function decides them."""

    def rows(*shape: int) -> torch.Tensor:
        count = torch.arange(torch.Size(shape).numel())
        mantissas = (count * 2654435761 + 12345) % 2**24 - 2**23
        return torch.ldexp(mantissas.float(), -(count * 7 % 13) - 18).to(dtype).view(shape)

    return rows


def operation_digest(name: str, dtype: torch.dtype) -> str:
    """Return the sha256 of an operation's results for all SCALES; a refused call counts as such."""
    make, call = directed.called(name)
    sizes = dict(zip(make.__code__.co_varnames, make.__defaults__ or ()))
    digest = hashlib.sha256()
    with mock.patch.object(directed, "rows", rounding_rows(dtype)):
        for scale in SCALES:
            try:
                results = call(**make(**{size: value * scale for size, value in sizes.items()}))
            except DetcompileError:
                digest.update(b"refused")
                continue
            for result in results if isinstance(results, tuple) else (results,):
                digest.update(as_bytes(result) if isinstance(result, torch.Tensor) else str(result).encode())
    return digest.hexdigest()


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


def tiny_digest(dtype: torch.dtype) -> str:
    """Return the sha256 of `tiny`'s logits for 64 tokens, and of 48 tokens that it draws."""
    model = compiled("tiny", dtype)
    logits = model(torch.arange(1, 65)[None]).logits
    params = SamplingParams(max_tokens=48, temperature=0.8, top_p=0.95, seed=7, ignore_eos=True)
    [output] = model.engine(EngineConfig(num_blocks=32)).generate([list(range(1, 33))], params, progress=False)
    return hashlib.sha256(as_bytes(logits) + str(output.outputs[0].token_ids).encode()).hexdigest()


def vectors() -> str:
    """Return the vectors of pointwise operations, the only ones whose bits depend on them; tiles compute none."""
    return str(vector_isa()).removesuffix(" amx_tile")


def key_of(name: str, kept: dict[str, str]) -> str:
    """Return the key of a digest: AMX has separate digests where its order of bfloat16 products matters."""
    with_isa = f"{name} {library.isa()}"
    return with_isa if with_isa in kept else name


def recorded() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(GOLDEN.read_text())
    assert content["bits_version"] == BITS_VERSION, "BITS_VERSION was raised: run python -m tests.test_bits_version"
    return content


@pytest.mark.parametrize("name", directed.CALLS)
def test_operations_have_their_golden_digests(name: str) -> None:
    expected = recorded()["operations"]
    for text, dtype in DTYPES.items():
        if (call := f"{name} {text}") not in BY_TORCH:
            actual = operation_digest(name, dtype)
            assert actual == expected[key_of(call, expected)], f"{name} of {text}: {ADVICE.format(BITS_VERSION)}"


@pytest.mark.parametrize("name", ["float32", "bfloat16", pytest.param("float16", marks=EXHAUSTIVE_BY_CASE)])
def test_tiny_has_its_golden_digests(name: str) -> None:
    kept = recorded()["tiny"]
    expected = kept.get(key_of(f"{name} {vectors()}", kept))
    if expected is None:
        pytest.skip(f"no digest was recorded for {vectors()}")
    assert tiny_digest(DTYPES[name]) == expected, f"tiny in {name}: {ADVICE.format(BITS_VERSION)}"


@EXHAUSTIVE_BY_CASE
@pytest.mark.parametrize("isa", OTHERS)
def test_other_instruction_sets_have_the_golden_digests(isa: str) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-k",
        "golden and not other",
    ]
    environment = os.environ | {"DETCOMPILE_CPU_ISA": isa}
    run = subprocess.run([*command, __file__], cwd=GOLDEN.parents[1], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert " passed" in run.stdout


def main() -> None:
    """Record digests; those of this bits version that are there already must not change."""
    kept = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if kept.get("bits_version") != BITS_VERSION:
        kept = {"bits_version": BITS_VERSION, "operations": {}, "tiny": {}}
    calls = [(name, text) for name in directed.CALLS for text in DTYPES if f"{name} {text}" not in BY_TORCH]
    operations = {f"{name} {text}": operation_digest(name, DTYPES[text]) for name, text in calls}
    tiny = {f"{text} {vectors()}": tiny_digest(dtype) for text, dtype in DTYPES.items()}
    for kind, actual in (("operations", operations), ("tiny", tiny)):
        moved = []
        for name, digest in actual.items():
            key = key_of(name, kept[kind])
            if library.isa() == "amx" and "bfloat16" in name and kept[kind].get(name, digest) != digest:
                key = f"{name} amx"
            if kept[kind].setdefault(key, digest) != digest:
                moved.append(key)
        if moved:
            sys.exit(f"{', '.join(moved)}: {ADVICE.format(BITS_VERSION)}")
    GOLDEN.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
