"""Settings that every test shares: hypothesis profiles, what runs where and first, and the device fixture.

Hypothesis draws anew at every commit, from one seed that is printed at the end (tests/draws.py), so that
`DETCOMPILE_TEST_SEED=...` repeats the draws of another run. What failed is kept in .hypothesis and tried first. A test
draws as many examples as CI has time for; `pytest --hypothesis-profile=explore` looks for more counterexamples.
"""

import gc
import os
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

import detcompile.passes.named_backend  # noqa: F401 - a checkout that is not installed has no entry point
from tests.draws import VARIABLE, seed_of_run

# Tests compile anew: what they patch in this package is no part of a kept program's key. Those of kept programs, and
# commands that run in processes of their own, say otherwise.
os.environ["DETCOMPILE_KEEP_PROGRAMS"] = "0"
os.environ["DETCOMPILE_PROGRESS"] = "0"

# Where a CI is noticed, hypothesis would repeat itself and keep nothing: so each of these is said.
DRAWS = settings(
    derandomize=False,
    database=DirectoryBasedExampleDatabase(".hypothesis/examples"),
    print_blob=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("ci", DRAWS, max_examples=16)
settings.register_profile("explore", DRAWS, max_examples=500)
settings.load_profile("ci")

# Files that need the same models share a worker, and with it `tests.model_cases.compiled`; so do those that need the
# CPU library of every instruction set, which two workers would build at once.
TOGETHER = {
    "server": ("tests/serving/*",),
    "models": (
        "tests/architectures/*",
        "tests/commands/test_certificate_page.py",
        "tests/commands/test_tune_speculation.py",
        "tests/invariance/*",
        "tests/models/test_compiled.py",
        "tests/models/test_generation*",
        "tests/models/test_model_object.py",
        "tests/offline/*",
        "tests/passes/proof/test_certificate.py",
        "tests/runtime/requests/test_prompts.py",
        "tests/runtime/sampling/test_rejection.py",
        "tests/runtime/speculation/*",
        "tests/runtime/test_engine*",
        "tests/runtime/test_isolation.py",
        "tests/runtime/test_threads.py",
        "tests/test_repeat.py",
        "tests/test_schedulers.py",
        "tests/test_tiny_drafters.py",
        "tests/test_workers.py",
    ),
    "libraries": (
        "tests/templates/*cpu*",
        "tests/templates/matmul/test_amx.py",
        "tests/templates/matmul/test_batched.py",
        "tests/templates/matmul/test_gate.py",
        "tests/templates/test_cpp_dispatch.py",
        "tests/templates/test_real_sizes.py",
    ),
}
# They take a minute or more: begun last, one of them would leave the other workers idle.
LONG = (
    "models",
    "server",
    "tests/templates/test_triton_interpreter.py",
    "tests/commands/test_cli.py",
    "tests/parallel/test_tensor_parallel.py",
    "tests/passes/rewrites/test_rope.py",
    "libraries",
    "tests/passes/rewrites/test_merged_linears.py",
    "tests/models/test_export.py",
    "tests/test_examples.py",
    "tests/test_docs_code.py",
)
GPU_BYTES_OF_A_WORKER = 3 << 30


def pytest_configure(config: pytest.Config) -> None:
    """One seed for hypothesis and for all else that is drawn, unless `--hypothesis-seed` gives another."""
    if config.getoption("hypothesis_seed", None) is None and config.getoption("hypothesis_profile", None) != "explore":
        hypothesis.core.global_force_seed = seed_of_run()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"{VARIABLE}={seed_of_run()} repeats these draws")


def may_need_gpu(path: Path) -> bool:
    """Whether a file's tests may be marked as a GPU's: by the mark, or by the fixture that has it."""
    source = path.read_text()
    return "gpu" in source.lower() or "device" in source


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Of a GPU's tests alone, import no other file: not all that these import is on every GPU machine."""
    only = config.getoption("markexpr").startswith("gpu")
    return True if only and collection_path.suffix == ".py" and not may_need_gpu(collection_path) else None


def group_of(nodeid: str) -> str:
    """Of TOGETHER, or else the file."""
    file = nodeid.split("::", 1)[0]
    return next((group for group, files in TOGETHER.items() if any(fnmatch(file, own) for own in files)), file)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is LONG first, each group in one piece; the other files in their order."""
    hidden = {item.path for item in items if item.get_closest_marker("gpu")}
    assert all(map(may_need_gpu, hidden)), f"make gpu-test does not find the tests of {hidden}"
    groups = {item.nodeid: group_of(item.nodeid) for item in items}
    items.sort(key=lambda item: LONG.index(groups[item.nodeid]) if groups[item.nodeid] in LONG else len(LONG))


def pytest_collection_finish() -> None:
    """What was imported stays: the garbage collector would walk all of it again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 20, 20)


@pytest.hookimpl(optionalhook=True)  # without xdist there is no such hook
def pytest_xdist_auto_num_workers() -> int:
    """One a core, but as many as the first GPU has room for."""
    cores = len(os.sched_getaffinity(0))
    if not torch.cuda.is_available():
        return cores
    return min(cores, torch.cuda.get_device_properties(0).total_memory // GPU_BYTES_OF_A_WORKER)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of `--dist loadfile`: a worker takes a whole file, or all that are TOGETHER."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return Files(config, log)


NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(
    scope="session",  # one value a test: hypothesis refuses function-scoped fixtures
    params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_CUDA])],
)
def device(request: pytest.FixtureRequest) -> str:
    """Device type under test: "cpu", then "cuda" where there is one."""
    return request.param
