"""Settings that every test shares: hypothesis profiles and the device fixture.

Draws are derandomized, so that a run of the suite repeats itself; `pytest --hypothesis-profile=explore` looks for
new counterexamples.
"""

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

# Files whose tests compile the same models share a worker, and with it `tests.models.compiled`.
TOGETHER = ("tests/architectures/", "tests/invariance/")


@pytest.hookimpl(optionalhook=True)  # without xdist there is no such hook
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of `--dist loadfile`: a worker takes a whole file, or all that are TOGETHER."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "models" if nodeid.startswith(TOGETHER) else super()._split_scope(nodeid)

    return Files(config, log)


NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(
    scope="session",  # one value a test: hypothesis refuses function-scoped fixtures
    params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_CUDA])],
)
def device(request: pytest.FixtureRequest) -> str:
    """Device type under test: "cpu", then "cuda" where there is one."""
    return request.param
