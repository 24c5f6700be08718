"""Settings that every test shares: hypothesis profiles and the device fixture.

Draws are derandomized, so that a run of the suite repeats itself; `pytest --hypothesis-profile=explore` looks for
new counterexamples.
"""

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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """For `--dist loadgroup`; GPU machines may lack xdist, and the interpreter's processes run without it."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        file = item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group("models" if file.startswith(TOGETHER) else file))


NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(
    scope="session",  # one value a test: hypothesis refuses function-scoped fixtures
    params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_CUDA])],
)
def device(request: pytest.FixtureRequest) -> str:
    """Device type under test: "cpu", then "cuda" where there is one."""
    return request.param
