"""The public names, one name per module, and the contents of the wheel."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from torch._inductor.runtime.cache_dir_utils import triton_cache_dir
from torch._inductor.runtime.hints import DeviceProperties, HeuristicType
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from triton import Config, knobs

import detcompile
from detcompile import config

ROOT = Path(__file__).parents[1]
LINKS = ["passes", "runtime", "templates"]

IMPORT_EVERYTHING = """
import importlib.util, json, pkgutil, sys
import detcompile  # noqa: F401 (registers the backend)
for module in pkgutil.walk_packages(detcompile.__path__, "detcompile."):
    if not module.name.startswith("detcompile.trl") or importlib.util.find_spec("trl"):
        importlib.import_module(module.name)
print(json.dumps({name: module.__file__ for name, module in sys.modules.items() if getattr(module, "__file__", None)}))
"""


def test_tests_extra_installs_server_and_client():
    """Without them pytest would silently skip tests/serving."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"detcompile[serve]", "openai"} <= set(extras["test"])
    named = {re.split(r"[^\w-]", line)[0].replace("-", "_") for line in extras["serve"]}
    assert set(commands_serve_needs()) <= named


def commands_serve_needs() -> list[str]:
    source = (ROOT / "detcompile" / "commands" / "serve.py").read_text()
    return re.findall(r'"(\w+)"', source.split("NEEDED = (")[1].split(")")[0])


def _python(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_public_names_are_sorted_and_exist():
    assert detcompile.__all__ == sorted(set(detcompile.__all__))
    assert [name for name in detcompile.__all__ if not hasattr(detcompile, name)] == []


def test_importing_the_package_does_not_import_torch():
    finished = _python(
        "import os, sys\n"
        "os.environ.pop('TRITON_CACHE_DIR', None)\n"
        "import detcompile\n"
        "print('torch' in sys.modules, 'TRITON_CACHE_DIR' in os.environ)\n"
        "detcompile.Numerics"
    )
    assert (finished.returncode, finished.stdout) == (0, "False True\n"), finished.stderr
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        detcompile.nonsense  # noqa: B018


def test_torch_finds_backend_without_an_import():
    finished = _python(
        "import sys, torch\n"
        "module = torch.nn.LayerNorm(8).eval()\n"
        "x = torch.randn(3, 8)\n"
        "with torch.no_grad():\n"
        "    print(torch.compile(module, backend='detcompile')(x).shape, 'detcompile' in sys.modules)"
    )
    assert (finished.returncode, finished.stdout) == (0, "torch.Size([3, 8]) True\n"), finished.stderr


@pytest.mark.parametrize("given", [None, "of the caller"])
def test_all_kernels_use_one_assembler(given: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default Inductor uses torch's assembler, but only in processes where it compiles kernels itself."""
    ptxas = tmp_path / "backends/nvidia/bin/ptxas"
    ptxas.parent.mkdir(parents=True)
    ptxas.touch(0o755)
    actual = ModuleSpec("triton", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: actual)
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    if given is not None:
        monkeypatch.setenv("TRITON_PTXAS_PATH", given)
    config.pin_ptxas()
    assert os.environ["TRITON_PTXAS_PATH"] == (given or str(ptxas))
    ptxas.unlink()
    monkeypatch.delenv("TRITON_PTXAS_PATH")
    config.pin_ptxas()
    assert "TRITON_PTXAS_PATH" not in os.environ


@pytest.mark.parametrize("given", [None, "of the caller"])
def test_inductor_keeps_the_folder_of_compiled_kernels(
    given: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the variable is unset, Inductor's first kernel sets it, and Triton would then look elsewhere."""
    monkeypatch.setenv("DETCOMPILE_CACHE", str(tmp_path))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    if given is not None:
        monkeypatch.setenv("TRITON_CACHE_DIR", given)
    config.pin_kernel_cache()
    before = knobs.cache.dir
    device = DeviceProperties("cuda", 0, multi_processor_count=132, cc=90, warp_size=32)
    CachingAutotuner(
        test_public_names_are_sorted_and_exist,
        {"device": device},
        [Config({})],
        save_cache_hook=None,
        mutated_arg_names=[],
        optimize_mem=False,
        heuristic_type=HeuristicType.POINTWISE,
    )
    assert knobs.cache.dir == before == triton_cache_dir(0) == (given or str(tmp_path / "triton"))


def test_no_module_has_the_name_of_a_public_function():
    """`detcompile.name` would be the function or the module, depending on what was imported last."""
    functions = {name for name in detcompile.__all__ if not isinstance(getattr(detcompile, name), type)}
    assert functions & {path.stem for path in (ROOT / "detcompile").iterdir()} == set()


@pytest.mark.parametrize("link", LINKS)
def test_root_links_are_not_importable(link):
    assert (ROOT / link).resolve() == ROOT / "detcompile" / link
    failed = _python(f"import {link}")
    assert failed.returncode == 1
    assert f"ImportError: import detcompile.{link}, not {link}" in failed.stderr


def test_no_file_is_imported_under_two_names():
    finished = _python(IMPORT_EVERYTHING)
    assert finished.returncode == 0, finished.stderr
    files = json.loads(finished.stdout.splitlines()[-1])
    names: dict[Path, list[str]] = {}
    for name, file in files.items():
        if Path(file).resolve().is_relative_to(ROOT / "detcompile"):
            names.setdefault(Path(file).resolve(), []).append(name)
    left_out = set() if importlib.util.find_spec("trl") else set((ROOT / "detcompile" / "trl").glob("*.py"))
    assert names.keys() | left_out == set((ROOT / "detcompile").rglob("*.py"))
    assert [twice for twice in names.values() if len(twice) > 1] == []


def test_the_wheel_holds_the_package_its_data_and_nothing_else(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for file in ("pyproject.toml", "LICENSE", "README.md"):
        if (ROOT / file).exists():
            shutil.copy(ROOT / file, source)
    shutil.copytree(ROOT / "detcompile", source / "detcompile", ignore=shutil.ignore_patterns("__pycache__"))
    for link in LINKS:
        (source / link).symlink_to(f"detcompile/{link}")
    data_folders = {"cpu", "direct", "exact", "tiny", "draft", "medusa"}
    expected = {
        path.relative_to(source).as_posix()
        for path in (source / "detcompile").rglob("*")
        if path.is_file() and (path.suffix in {".html", ".py", ".typed"} or path.parent.name in data_folders)
    }
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run([*build, str(source)], check=True, capture_output=True, timeout=300)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == expected
    assert sum(path.stat().st_size for path in (ROOT / "detcompile" / "tiny").rglob("*") if path.is_file()) < 16_000_000
