"""Settings that all tests share: the cache, hypothesis profiles, the budget, and the device fixture.

Compiled programs and kernels are kept in .cache/tests of the checkout, so that a second run compiles nothing whose
sources have not changed. A test that patches the package recompiles (tests/patches.py).

Hypothesis draws differently at every commit, from one seed that is printed at the end (tests/draws.py), so
`DETCOMPILE_TEST_SEED=...` repeats the draws of another run. Failing examples are kept in .hypothesis and tried first. A
test draws as many examples as CI has time for; `pytest --hypothesis-profile=explore` looks for more counterexamples.
"""

import gc
import os
import re
import zlib
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

import detcompile.passes.backend  # noqa: F401 - a checkout that is not installed has no entry point
from detcompile import config
from detcompile.passes import program_source
from tests.budget import Budget
from tests.draws import VARIABLE, seed_of_run
from tests.patches import Patches

ROOT = Path(__file__).parents[1]
CACHE = ROOT / ".cache" / "tests"
os.environ.setdefault("DETCOMPILE_CACHE", str(CACHE / "detcompile"))
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(CACHE / "inductor"))
os.environ["DETCOMPILE_PROGRESS"] = "0"
# Child processes import this checkout from any folder, and packages from the same places as this process.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))

PATCHES = Patches()


def programs_kept() -> bool:
    """Replace `detcompile.config.programs_kept` where models are compiled."""
    return config.programs_kept() and not PATCHES.changed()


program_source.programs_kept = programs_kept

# Under CI, hypothesis would otherwise repeat its draws and keep no examples.
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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", help="run one part of the chosen tests: 3/16 takes the fourth of 16")
    parser.addoption("--budget", action="store_true", help="fail beyond the limits of tests/budget.py")


def pytest_configure(config: pytest.Config) -> None:
    """Draw from one seed, unless `--hypothesis-seed` gives another, and count what the tests cost."""
    config.pluginmanager.register(Budget(checked=config.getoption("budget")))
    if config.getoption("hypothesis_seed", None) is None and config.getoption("hypothesis_profile", None) != "explore":
        hypothesis.core.global_force_seed = seed_of_run()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"{VARIABLE}={seed_of_run()} repeats these draws")


MARKS_GPU_TESTS = re.compile(
    r"needs_\w*(gpu|cuda|triton)|mark\.gpu|(def test_\w+|fixture\b.*\ndef \w+)\([^)]*\bdevice\b", re.IGNORECASE
)


def may_need_gpu(path: Path) -> bool:
    """Return whether a file's tests may be marked for GPUs: by a mark, or by the fixture that has it."""
    return MARKS_GPU_TESTS.search(path.read_text()) is not None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """If only GPU tests are selected, skip other files: a GPU machine may lack their imports."""
    only = config.getoption("markexpr").startswith("gpu")
    return True if only and collection_path.suffix == ".py" and not may_need_gpu(collection_path) else None


def unit_of(item: pytest.Item) -> str:
    """Return what the rotation keeps together: a file, or the tests of one case of a file marked `by_case`."""
    marker = item.get_closest_marker("exhaustive")
    file, case = item.nodeid.partition("::")[0], item.nodeid.partition("[")[2]
    return f"{file}[{case}" if marker is not None and marker.kwargs.get("by_case") else file


@pytest.hookimpl(trylast=True)  # after -m has deselected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part = config.getoption("part")
    if part is not None:
        index, _, count = part.partition("/")
        items[:] = [item for item in items if zlib.crc32(unit_of(item).encode()) % int(count) == int(index)]
    hidden = {item.path for item in items if item.get_closest_marker("gpu")}
    assert all(map(may_need_gpu, hidden)), f"make gpu-test does not find the tests of {hidden}"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    PATCHES.record()


def pytest_collection_finish() -> None:
    """Freeze imported objects: the garbage collector would walk them again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 20, 20)


@pytest.fixture
def keep_patched_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep programs although the test patches the package: for tests of kept programs, whose patches change none."""
    monkeypatch.setattr(program_source, "programs_kept", config.programs_kept)


NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(
    scope="session",  # one value a test: hypothesis refuses function-scoped fixtures
    params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_CUDA])],
)
def device(request: pytest.FixtureRequest) -> str:
    """Device type under test: "cpu", then "cuda" if there is one."""
    return request.param
