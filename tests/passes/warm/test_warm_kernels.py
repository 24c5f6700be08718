"""A second process takes all programs, kernels and schedules from the caches of the first."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import NEEDS_CUDA
from tests.exhaustive import EXHAUSTIVE

# Inductor compiles its kernels in this process too, so that they are counted.
START = """
import json, sys

launched = []  # programs that this process and its libraries started

def note_process(event, given):
    if event == "subprocess.Popen":
        launched.append([str(part) for part in given[1]])

sys.addaudithook(note_process)

from unittest import mock
import torch, triton
from torch._dynamo.utils import counters
import detcompile
from detcompile import EngineConfig, SamplingParams
from detcompile.progress import listening
from detcompile.templates.device import gate
from tests.model_cases import random_model

compiled, loaded, probed, stages = [], [], [], []

class Listener:
    def begins(self, text):
        pass
    def ended(self, text, seconds):
        stages.append(text)

def note(*, src, cache_hit, **_):
    (loaded if cache_hit else compiled).append(src.name)

def probe(template, problem, *rest):
    probed.append(f"{template}: {problem}")
    return reference_bits(template, problem, *rest)

reference_bits = gate._reference_bits
triton.knobs.compilation.listener = note
with mock.patch.object(gate, "_reference_bits", probe), listening(Listener()):
    model = detcompile.compile(random_model("qwen3", torch.bfloat16, sys.argv[1]), max_context=512)
    engine = model.engine(EngineConfig(max_num_seqs=4, max_num_batched_tokens=64, num_blocks=64))
    prompts = [[3, 4, 5], [7] * 40]
    params = [SamplingParams(max_tokens=8, temperature=0.0), SamplingParams(max_tokens=8, seed=1, top_p=0.9)]
    outputs = engine.generate(prompts, params, progress=False)
counted = {"compiled": compiled, "loaded": len(loaded), "probed": probed, "launched": launched, "stages": stages}
generated = sum(count for name, count in counters["inductor"].items() if name.startswith("fxgraph_cache"))
counted |= {"traced": counters["stats"]["unique_graphs"], "generated": generated}
print(json.dumps(counted | {"tokens": [output.outputs[0].token_ids for output in outputs]}))
"""


def start(folder: Path, device: str) -> dict[str, Any]:
    """Start an engine in a process of its own, with its caches in ``folder``, and count what it compiles."""
    caches = {"DETCOMPILE_CACHE": str(folder / "cache"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    settings = {"DETCOMPILE_KEEP_PROGRAMS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    environment = os.environ | caches | settings
    environment.pop("TRITON_CACHE_DIR", None)
    command = [sys.executable, "-c", START, device]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    actual: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return actual


def compilations(launched: list[list[str]]) -> list[list[str]]:
    """Return the commands that compile something.

    Torch asks a compiler for its version, preprocesses a header to hash it, and loads what its probes of instruction
    sets once compiled; Triton asks for the installed libraries; platform.architecture() asks `file` about Python.
    """
    asks = {"--version", "-v", "-E"}
    others = {Path(sys.executable).name, "openssl", "ldconfig", "file"}
    return [command for command in launched if not asks & set(command) and Path(command[0]).name not in others]


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=EXHAUSTIVE),  # 60 CPU s: the first start compiles our C++
        pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_CUDA]),
    ],
)
def test_a_second_start_compiles_and_probes_nothing(device: str, tmp_path: Path) -> None:
    """No program is traced or generated, no compiler is started, and no schedule is compared with its reference."""
    first = start(tmp_path, device)
    assert compilations(first["launched"]) and first["traced"] and first["generated"]
    assert "no program is kept" in first["stages"]
    second = start(tmp_path, device)
    assert compilations(second["launched"]) == []
    assert (second["traced"], second["generated"], second["compiled"], second["probed"]) == (0, 0, [], [])
    assert not [text for text in second["stages"] if text.startswith(("capture 1", "certify", "compile region"))]
    assert second["tokens"] == first["tokens"]
    if device == "cuda":
        assert first["compiled"] and first["probed"] and second["loaded"]
