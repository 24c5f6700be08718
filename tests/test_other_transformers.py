"""Another tested release of transformers gives the same logits, arguments and adapters.

It costs about 95 CPU seconds and 300 MB in a temporary folder. Other releases of torch are run by `make canary`.
"""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from detcompile.passes.release_probe import LOGITS
from tests.exhaustive import EXHAUSTIVE

ROOT = Path(__file__).parents[1]
RELEASES = {"5.17": ("transformers==5.24.0", "huggingface-hub==2.4.0"), "5.24": ("transformers==5.17.0",)}
TESTS = (
    "tests/models/test_model_object.py",
    "tests/passes/adapters/test_attention_classes.py",
    "tests/runtime/dense/test_generation_arguments.py",
)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables of a process that imports the other transformers."""
    installed = ".".join(version("transformers").split(".")[:2])
    if installed not in RELEASES:
        pytest.skip(f"no other release is chosen beside transformers {installed}")
    folder = tmp_path_factory.mktemp("other")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target"]
    done = subprocess.run(
        [*install, str(folder / "packages"), *RELEASES[installed]], capture_output=True, text=True, timeout=600
    )
    if done.returncode:
        reason = (done.stderr.strip() or "no message").splitlines()[-1]
        pytest.skip(f"pip cannot install {' '.join(RELEASES[installed])}: {reason}")
    assert not (folder / "packages" / "torch").exists()
    paths = os.pathsep.join([str(folder / "packages"), str(ROOT)])
    return os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "DETCOMPILE_CACHE": str(folder / "cache")}


def run(arguments: list[str], environment: dict[str, str]) -> str:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


@EXHAUSTIVE
def test_logits_are_the_stored_ones(environment: dict[str, str]) -> None:
    reported = run(["-c", "import transformers; print(transformers.__version__)"], environment)
    assert reported.strip() != version("transformers")
    digests = json.loads(run(["-m", "detcompile.commands.tiny_logits"], environment).splitlines()[-1])
    assert digests == {dtype: LOGITS[dtype] for dtype in digests} and digests


@EXHAUSTIVE
def test_short_set_passes(environment: dict[str, str]) -> None:
    run(["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *TESTS], environment)
