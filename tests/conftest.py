"""Settings that every test shares: hypothesis profiles, what runs where and first, and the device fixture.

Draws are derandomized, so that a run of the suite repeats itself; `pytest --hypothesis-profile=explore` looks for
new counterexamples.
"""

import gc
from fnmatch import fnmatch
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "repeat", derandomize=True, deadline=None, max_examples=16, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "explore", deadline=None, max_examples=500, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeat")

# Files that need the same models share a worker, and with it `tests.models.compiled`; so do those that need the CPU
# library of every instruction set, which two workers would build at once.
TOGETHER = {
    "models": (
        "tests/architectures/*",
        "tests/invariance/*",
        "tests/passes/test_certificate.py",
        "tests/runtime/test_acceptance.py",
        "tests/runtime/test_drafters.py",
        "tests/runtime/test_engine*",
        "tests/runtime/test_speculation*",
        "tests/runtime/test_tree_drafting.py",
        "tests/test_certificate_page.py",
        "tests/test_compiled.py",
        "tests/test_repeat.py",
        "tests/test_schedulers.py",
        "tests/test_tiny_drafters.py",
        "tests/test_tune_speculation.py",
        "tests/test_workers.py",
    ),
    "libraries": ("tests/templates/test_[!t]*",),  # all but Triton's and the tuner's
}
# They take a minute or more: begun last, one of them would leave the other workers idle.
LONG = (
    "models",
    "tests/templates/test_triton_interpreter.py",
    "tests/test_cli.py",
    "tests/parallel/test_tensor_parallel.py",
    "tests/passes/test_rope.py",
    "libraries",
    "tests/passes/test_siblings.py",
    "tests/test_export.py",
    "tests/test_examples.py",
)


def group_of(nodeid: str) -> str:
    """Of TOGETHER, or else the file."""
    file = nodeid.split("::", 1)[0]
    return next((group for group, files in TOGETHER.items() if any(fnmatch(file, own) for own in files)), file)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is LONG first, each group in one piece; the other files in their order."""
    groups = {item.nodeid: group_of(item.nodeid) for item in items}
    items.sort(key=lambda item: LONG.index(groups[item.nodeid]) if groups[item.nodeid] in LONG else len(LONG))


def pytest_collection_finish() -> None:
    """What was imported stays: the garbage collector would walk all of it again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 20, 20)


@pytest.hookimpl(optionalhook=True)  # without xdist there is no such hook
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
