"""`detcompile doctor` reports what this machine has, and what simulated machines lack."""

import errno
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import triton
from typer.testing import CliRunner

from detcompile.commands import cli
from detcompile.commands.inspection import machine as looking
from detcompile.commands.inspection import toolchain
from detcompile.commands.inspection.findings import DEPENDENCIES, Finding, findings
from detcompile.commands.inspection.machine import CPU, GPU, GPUs, Hub, Machine, look_at_cpu, look_at_gpus
from detcompile.commands.inspection.toolchain import Cache, Compilers, look_at_cache, look_at_compilers
from detcompile.templates.cpu import library
from detcompile.templates.cpu.shared_objects import compiler_version

ROOT = Path(__file__).parents[2]
SEEN = "import atexit, sys; atexit.register(lambda: print([n for n in sys.modules if n.startswith('detcompile.')]))"
HOPPER = GPU(name="NVIDIA H100", memory=80 << 30, capability=(9, 0))
GOOD = Machine(
    system="Linux x86_64",
    versions={"detcompile": "0.1.0", "python": "3.12.1", "torch": "2.13.0+cu130", "triton": "3.7.1"}
    | {"transformers": "5.17.0"},
    broken={},
    cpu=CPU(
        name="a CPU",
        cores=64,
        usable=64,
        memory=1 << 40,
        threads=64,
        available=1 << 39,
        isas=("amx", "avx512bf16", "avx512", "avx2", "portable"),
        isa="avx512",
        wanted_isa="avx512",
    ),
    gpus=GPUs(found=(HOPPER, HOPPER), cuda="13.0", driver="580.1", ptxas="ptxas 12.8"),
    compilers=Compilers(cxx="g++", version="g++ 12", failure="", c="/usr/bin/gcc", python_headers="/include"),
    cache=Cache(folder="/cache", num_bytes=5, free=1 << 40),
    hub=Hub(home="/hub", offline=True),
)
NO_GPU = GPUs(cuda=None)


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    """Clear the cache: compilers are checked once per process."""
    compiler_version.cache_clear()
    yield
    compiler_version.cache_clear()


def missing(actual: list[Finding]) -> set[str]:
    return {finding.about for finding in actual if finding.level == "missing"}


def lines_of(actual: list[Finding]) -> str:
    return "\n".join(f"{one.level} {one.about}: {one.text} | {one.advice}" for one in actual)


def diagnosed() -> tuple[int, dict[str, Any]]:
    """Exit code and JSON of the command, run here."""
    result = CliRunner().invoke(cli.app, ["doctor", "--json"])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, json.loads(result.stdout)


def test_this_machine_meets_requirements(tmp_path: Path) -> None:
    """Runs in a separate process that imports only the modules it checks."""
    cache = tmp_path / "not" / "there"
    code = f"{SEEN}; from detcompile.commands import cli; sys.argv[1:] = ['doctor', '--json']; cli.main()"
    environment = os.environ | {"DETCOMPILE_CACHE": str(cache)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    message, modules = done.stdout.splitlines()
    actual = json.loads(message)
    assert actual["ready"] is True and actual["machine"]["broken"] == {}
    assert actual["machine"]["versions"]["torch"] == torch.__version__
    assert actual["machine"]["cpu"]["isas"] == list(library.supported_isas())
    assert actual["machine"]["cache"]["folder"] == str(cache) and not cache.parent.exists()
    assert bool(actual["machine"]["gpus"]["found"]) == torch.cuda.is_available()
    assert "detcompile.api" not in modules and "detcompile.passes.graphs" not in modules


def test_missing_compiler_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/no/such/g++ -m64")
    with mock.patch.object(looking, "look_at_gpus", lambda *_: NO_GPU):
        code, actual = diagnosed()
    assert code == 1 and actual["ready"] is False
    finding = next(one for one in actual["findings"] if one["about"] == "C++ compiler")
    assert finding["level"] == "missing" and "/no/such/g++" in finding["advice"] and "CXX" in finding["advice"]


def test_broken_compiler_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "old-g++"
    requests, otherwise = "[ $1 = --version ] && echo old 1.0 && exit", "echo error: no OpenMP here >&2; exit 1"
    compiler.write_text(f"#!/bin/sh\n{requests}\n{otherwise}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    actual = look_at_compilers()
    assert actual.version == "old 1.0" and "error: no OpenMP here" in actual.failure
    assert missing(findings(replace(GOOD, gpus=NO_GPU, compilers=actual))) == {"C++ compiler"}
    assert missing(findings(replace(GOOD, compilers=actual))) == set()  # a GPU needs none of the CPU's kernels


def test_installed_compiler_compiles() -> None:
    actual = look_at_compilers()
    assert actual.failure == "" and actual.version == compiler_version()


def a_file(place: Path) -> None:
    place.write_text("")


def in_a_file(place: Path) -> None:
    place.parent.write_text("")


def open_to_all(place: Path) -> None:
    place.mkdir()
    place.chmod(0o777)


def open_inside(place: Path) -> None:
    (place / "cpu").mkdir(parents=True)
    (place / "cpu").chmod(0o777)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (a_file, "Not a directory"),
        (in_a_file, "Not a directory"),
        (open_to_all, "can be written by others"),
        (open_inside, "cpu can be written by others"),
    ],
)
def test_unusable_cache_is_reported(make, message, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "of a user" / "cache"
    if make is not in_a_file:
        place.parent.mkdir()
    make(place)
    monkeypatch.setenv("DETCOMPILE_CACHE", str(place))
    code, actual = diagnosed()
    assert code == 1
    finding = next(one for one in actual["findings"] if one["about"] == "cache" and one["level"] == "missing")
    assert (
        message in finding["advice"] and "DETCOMPILE_CACHE" in finding["advice"] and str(tmp_path) in finding["advice"]
    )


def test_unwritable_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DETCOMPILE_CACHE", str(tmp_path))
    assert look_at_cache().failure == ""
    refused = OSError(errno.EROFS, "Read-only file system")
    with mock.patch.object(toolchain.tempfile, "TemporaryFile", side_effect=refused):
        assert "Read-only file system" in look_at_cache().failure
    disk = SimpleNamespace(f_flag=os.ST_NOEXEC, f_bavail=1, f_blocks=2, f_bfree=1, f_frsize=1)
    with mock.patch.object(toolchain.os, "statvfs", lambda _: disk):
        assert "noexec" in look_at_cache().failure


def test_a_cache_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpu").mkdir(mode=0o755)
    (tmp_path / "cpu" / "kernels.so").write_bytes(b"x" * 1234)
    monkeypatch.setenv("DETCOMPILE_CACHE", str(tmp_path))
    actual = look_at_cache()
    assert (actual.num_bytes, actual.failure) == (1234, "") and actual.free > 0
    assert [path.name for path in tmp_path.rglob("*")] == ["cpu", "kernels.so"]


def test_broken_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    code, actual = diagnosed()
    assert code == 1 and list(actual["machine"]["broken"]) == ["tokenizers"]
    assert [one["about"] for one in actual["findings"] if one["level"] == "missing"] == ["tokenizers"]


def test_report_without_torch() -> None:
    assert look_at_cpu(None).isas == () and look_at_cpu(None).cores >= 1
    assert look_at_gpus(None, None).found == ()
    bare = replace(GOOD, broken={"torch": "ImportError: libc"}, cpu=look_at_cpu(None), gpus=NO_GPU)
    assert missing(findings(bare)) == {"torch"}


def test_gpus_match_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    properties = SimpleNamespace(name="NVIDIA A100", total_memory=40 << 30, major=8, minor=0)
    cuda = SimpleNamespace(
        is_available=lambda: True, device_count=lambda: 2, get_device_properties=lambda index: properties
    )
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release\nGCC 12.2.0\n")
    monkeypatch.setattr(looking, "DRIVER", driver)
    actual = look_at_gpus(SimpleNamespace(cuda=cuda, version=SimpleNamespace(cuda="12.8")), triton)
    assert actual.found == (GPU(name="NVIDIA A100", memory=40 << 30, capability=(8, 0)),) * 2
    assert (actual.cuda, actual.driver) == ("12.8", "570.86.15")
    assert actual.ptxas_is_tritons  # this process imported detcompile, which pins it


@pytest.mark.parametrize(("text", "cores"), [("max 100000\n", None), ("150000 100000\n", 1.5), ("nonsense", None)])
def test_cpu_quota_is_read(text: str, cores: float | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text(text)
    monkeypatch.setattr(looking, "QUOTAS", tmp_path)
    assert look_at_cpu(None).quota == cores


def with_cpu(**changes: object) -> Machine:
    return replace(GOOD, gpus=NO_GPU, cpu=replace(GOOD.cpu, **{"wanted_isa": None, **changes}))


def with_version(name: str, version: str) -> Machine:
    return replace(GOOD, versions=GOOD.versions | {name: version})


def with_gpu(*capability: int) -> Machine:
    return replace(GOOD, gpus=replace(GOOD.gpus, found=(GPU(name="a GPU", memory=1, capability=capability),)))


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        (GOOD, "fast GPU: NVIDIA H100 is a Hopper"),
        (with_gpu(10, 0), "slow GPU: a GPU (compute capability 10.0) is not a Hopper: all kernels are the plain ones"),
        (with_gpu(8, 6), "all kernels are the plain ones; they are compiled for it in the tests, no operation"),
        (with_gpu(8, 7), "all kernels are the plain ones; they were neither compiled for it nor run on it"),
        (with_gpu(7, 5), "no units for bfloat16 | take --dtype float16"),
        (replace(GOOD, gpus=NO_GPU), "slow GPU: no CUDA GPU: models run on the CPU"),
        (replace(GOOD, gpus=GPUs(driver="580.1")), "torch was built for CPUs: models run on the CPU | install a torch"),
        (replace(GOOD, gpus=GPUs(driver="580.1", cuda="13.0")), "does not see its GPU"),
        (replace(GOOD, gpus=replace(GOOD.gpus, ptxas_is_tritons=False)), "note ptxas: kernels are assembled by ptxas"),
        (replace(GOOD, compilers=replace(GOOD.compilers, c=None)), "missing C compiler: Triton needs one for"),
        (replace(GOOD, compilers=replace(GOOD.compilers, python_headers=None)), "missing Python headers"),
        (replace(GOOD, system="Darwin arm64"), "missing system: this is Darwin arm64"),
        (replace(GOOD, cache=replace(GOOD.cache, free=1 << 20)), "note cache: 0.0 GiB are free on the disk of /cache"),
        (replace(GOOD, programs_kept=False), "slow cache: DETCOMPILE_KEEP_PROGRAMS=0"),
        (with_version("torch", "2.16.0a0+git1234"), "note torch: 2.16.0a0+git1234 is outside the tested range"),
        (with_version("torch", "2.9.1"), "missing torch: 2.9.1 is older than 2.11"),
        (with_version("transformers", "5.25.1"), "note transformers: 5.25.1 is outside the tested range"),
        (with_version("python", "3.10.4"), "missing python: 3.10.4 is older than 3.11"),
        (with_cpu(isa="amx"), "note CPU: tiles add in a different order"),
        (with_cpu(isa="avx512bf16"), "fast CPU: the C++ kernels take AVX-512, and its dot products"),
        (with_cpu(isa="avx2", isas=("avx2", "portable")), "slow CPU: the C++ kernels take AVX2"),
        (with_cpu(isa="portable", isas=("portable",)), "slow CPU: the C++ kernels use only"),
        (with_cpu(isa=None, wanted_isa="avx9"), "missing CPU: DETCOMPILE_CPU_ISA=avx9, and this CPU runs amx, "),
        (with_cpu(isa="avx2", wanted_isa="avx2"), "note CPU: DETCOMPILE_CPU_ISA=avx2 restricts the kernels to less"),
        (with_cpu(usable=2), "torch computes in 64 threads, and this process is granted 2 of 64 cores"),
        (with_cpu(quota=1.5, threads=1), "slow CPU: 1.5 cores compile and answer"),
        (with_cpu(quota=1.5), "set OMP_NUM_THREADS=1"),
    ],
)
def test_findings_are_explained(machine: Machine, message: str) -> None:
    actual = findings(machine)
    assert message in lines_of(actual)
    assert ("missing " in message) == bool(missing(actual))
    levels = [finding.level for finding in actual]
    assert levels == sorted(levels, key=["missing", "slow", "fast", "note"].index)


def test_good_machine_has_no_problems() -> None:
    actual = findings(GOOD)
    assert missing(actual) == set() and [one.about for one in actual if one.level == "slow"] == []
    assert sum(one.about == "GPU" for one in actual) == 1  # two alike are told once


def test_text_and_json_reports_agree() -> None:
    with mock.patch("detcompile.commands.doctor.look_at_machine", lambda: GOOD):
        result = CliRunner().invoke(cli.app, ["doctor"])
    assert result.exit_code == 0 and "Everything that is needed is here." in result.stdout
    for word in ("torch 2.13.0+cu130", "NVIDIA H100", "driver 580.1", "/cache", "HF_HOME /hub, offline", "for avx512"):
        assert word in result.stdout
    broken = replace(GOOD, broken={"torch": "ImportError: [libc]"})
    with mock.patch("detcompile.commands.doctor.look_at_machine", lambda: broken):
        result = CliRunner().invoke(cli.app, ["doctor"])
    assert result.exit_code == 1 and "missing     torch: it cannot be imported (ImportError: [libc])" in result.stdout


def test_version_ranges_match_installed_metadata() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {"python": ("3.11", None)}
    assert project["requires-python"] == ">=3.11"
    for line in project["dependencies"]:
        actual = re.match(r"([a-z]+)>=([\d.]+)(?:,<([\d.]+))?", line)
        if actual:
            declared[actual[1]] = (actual[2], actual[3])
    assert declared == DEPENDENCIES
