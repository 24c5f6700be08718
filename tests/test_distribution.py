"""The wheel and the sdist that `python -m build` makes, installed away from the checkout (about 60 CPU seconds)."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import threading
import venv
import zipfile
from pathlib import Path

import httpx
import pytest

from tests.exhaustive import EXHAUSTIVE

ROOT = Path(__file__).parents[1]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "CHANGELOG.md", "CITATION.cff", "detcompile")

pytestmark = EXHAUSTIVE
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # which may name the checkout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both, built from a copy: setuptools leaves files beside its sources."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(built), str(source)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    return built


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a new environment that has the wheel; what the wheel requires is lent by this environment."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True, symlinks=True)
    [packages] = folder.glob("lib/python*/site-packages")
    [wheel] = built.glob("*.whl")
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-deps", wheel]
    subprocess.run(pip, check=True, env=ENVIRONMENT, capture_output=True, timeout=300)
    # A path in a .pth file is searched last, and its own .pth files, one of which names the checkout, are not read.
    (packages / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def test_both_hold_the_same_package(built: Path) -> None:
    [wheel], [sdist] = built.glob("*.whl"), built.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as file:
        packed = {name for name in file.namelist() if ".dist-info/" not in name}
    with tarfile.open(sdist) as file:
        names = {member.name.partition("/")[2] for member in file.getmembers() if member.isfile()}
    assert packed <= names and "detcompile/py.typed" in packed
    others = {name for name in names if not name.startswith("detcompile")}
    assert others == {*SOURCES, "PKG-INFO", "setup.cfg"} - {"detcompile"}


def test_the_demo_runs(installed: Path, tmp_path: Path) -> None:
    where = "import detcompile; print(detcompile.__file__)"
    command = [installed / "python", "-c", where]
    printed = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)
    assert Path(printed.stdout).is_relative_to(installed.parent), printed.stdout + printed.stderr
    command = [installed / "detcompile", "demo", "tiny", "--configurations", "2"]
    demo = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=500)
    assert demo.returncode == 0 and "composition" in demo.stdout, demo.stdout + demo.stderr


def test_the_server_answers(installed: Path, tmp_path: Path) -> None:
    command = [installed / "detcompile", "serve", "tiny", "--port", "0"]
    with subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            line = next(line for line in server.stderr if line.startswith("serving "))
            threading.Thread(target=list, args=(server.stderr,), daemon=True).start()  # else it waits for a full pipe
            [url] = re.findall(r"http://[\d.:]+", line)
            body = {"model": "tiny", "prompt": "def f(", "max_tokens": 4, "seed": 1}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status().json()
            assert answer["usage"]["completion_tokens"] > 0 and answer["system_fingerprint"]
        finally:
            server.terminate()
        assert server.wait(timeout=60) in (0, -15)
