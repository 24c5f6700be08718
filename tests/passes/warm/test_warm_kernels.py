"""A second process on a GPU takes all kernels and schedules from the caches of the first."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import NEEDS_CUDA

# Inductor compiles its kernels in this process too, so that they are counted.
START = """
import json
from unittest import mock
import torch, triton
import detcompile
from detcompile import EngineConfig, SamplingParams
from detcompile.templates.device import gate
from tests.model_cases import random_model

compiled, loaded, probed = [], [], []

def note(*, src, cache_hit, **_):
    (loaded if cache_hit else compiled).append(src.name)

def probe(template, problem, *rest):
    probed.append(f"{template}: {problem}")
    return reference_bits(template, problem, *rest)

reference_bits = gate._reference_bits
triton.knobs.compilation.listener = note
with mock.patch.object(gate, "_reference_bits", probe):
    model = detcompile.compile(random_model("qwen3", torch.bfloat16, "cuda"), max_context=512)
    engine = model.engine(EngineConfig(max_num_seqs=4, max_num_batched_tokens=64, num_blocks=64))
    (output,) = engine.generate([[3, 4, 5]], SamplingParams(max_tokens=8, temperature=0.0))
found = {"compiled": compiled, "loaded": len(loaded), "probed": probed}
print(json.dumps(found | {"tokens": output.outputs[0].token_ids}))
"""


def start(folder: Path) -> dict[str, Any]:
    """Start an engine in a process of its own, with its caches in ``folder``, and count what it compiles."""
    caches = {"DETCOMPILE_CACHE": str(folder / "cache"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    settings = {"DETCOMPILE_KEEP_PROGRAMS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    environment = os.environ | caches | settings
    environment.pop("TRITON_CACHE_DIR", None)
    done = subprocess.run([sys.executable, "-c", START], env=environment, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    actual: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return actual


@pytest.mark.gpu
@NEEDS_CUDA
def test_a_second_start_compiles_and_probes_nothing(tmp_path: Path) -> None:
    first = start(tmp_path)
    assert first["compiled"] and first["probed"]
    second = start(tmp_path)
    assert (second["compiled"], second["probed"]) == ([], [])
    assert second["loaded"] and second["tokens"] == first["tokens"]
