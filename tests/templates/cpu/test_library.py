"""The compiled CPU templates: cached, rebuilt when damaged, shared by processes, refused without a compiler."""

import fcntl
import os
import subprocess
import sys
import time

import pytest
import torch

from detcompile.errors import CompilerNotFound, InvalidInput
from detcompile.templates.cpu import library as cpu_library
from detcompile.templates.cpu import shared_objects

# Compiles the smallest library, embedding alone, so that a build takes a moment; `build` is what library() calls.
SMALL_BUILD = """
import sys, pathlib
from detcompile.templates.cpu import library as cpu_library
cpu_library._SOURCES = pathlib.Path(sys.argv[1])
assert cpu_library.library("portable").detcompile_embedding(None, 0, None, 8, None, 0, 1, 4, 1) == -1
"""


@pytest.fixture
def sources(tmp_path):
    folder = tmp_path / "sources"
    folder.mkdir()
    for path in cpu_library._SOURCES.iterdir():
        if path.suffix == ".h" or path.name == "embedding.cpp":
            (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.fixture
def build(sources, tmp_path, monkeypatch):
    """Loads the small library from a cache of the test's own, as a new process would."""

    def load():
        for cached in caches:
            cached.cache_clear()
        return cpu_library._library.__wrapped__("portable")

    caches = (cpu_library.source_digest, shared_objects.compiler_version)
    monkeypatch.setenv("DETCOMPILE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cpu_library, "_SOURCES", sources)
    yield load
    for cached in caches:
        cached.cache_clear()


def test_this_machine_runs_portable_code_at_least():
    assert cpu_library.supported_isas()[-1] == "portable"
    assert cpu_library.isa() in cpu_library.supported_isas()
    assert shared_objects.compiler_version() and len(cpu_library.source_digest()) == 64


def test_an_unknown_isa_is_refused(monkeypatch):
    monkeypatch.setenv("DETCOMPILE_CPU_ISA", "avx9000")
    with pytest.raises(InvalidInput, match=r"DETCOMPILE_CPU_ISA='avx9000': this machine runs .*portable"):
        cpu_library.isa()


def test_a_dot_product_of_pairs_that_rounds_otherwise_is_not_used(monkeypatch):
    monkeypatch.setattr(cpu_library, "supported_isas", lambda: ("avx512bf16", "avx512", "portable"))
    monkeypatch.setattr(cpu_library, "pair_faults", lambda: 3)
    monkeypatch.delenv("DETCOMPILE_CPU_ISA", raising=False)
    assert cpu_library.isa() == "avx512"
    monkeypatch.setenv("DETCOMPILE_CPU_ISA", "avx512bf16")
    with pytest.raises(InvalidInput, match=r"'avx512bf16': .*does not round in .*\(3 results .*differ\)\. Set avx512"):
        cpu_library.isa()
    monkeypatch.setattr(cpu_library, "pair_faults", lambda: 0)
    assert cpu_library.isa() == "avx512bf16"


def test_the_probe_of_the_dot_product_of_pairs_sees_its_absence():
    assert cpu_library.library("portable").detcompile_pair_faults() == -1


def test_a_product_of_tiles_that_rounds_otherwise_is_not_used(monkeypatch):
    monkeypatch.setattr(cpu_library, "supported_isas", lambda: ("amx", "avx512bf16", "avx512", "portable"))
    monkeypatch.setattr(cpu_library, "tile_faults", lambda: 3)
    monkeypatch.setattr(cpu_library, "pair_faults", lambda: 0)
    monkeypatch.delenv("DETCOMPILE_CPU_ISA", raising=False)
    assert cpu_library.isa() == "avx512bf16"
    monkeypatch.setattr(cpu_library, "pair_faults", lambda: 5)
    assert cpu_library.isa() == "avx512"
    monkeypatch.setenv("DETCOMPILE_CPU_ISA", "amx")
    with pytest.raises(InvalidInput, match=r"'amx': .*tiles does not round .*\(3 results .*differ\)\. Set avx512bf16"):
        cpu_library.isa()
    monkeypatch.setattr(cpu_library, "tile_faults", lambda: 0)
    assert cpu_library.isa() == "amx"


def test_tiles_that_linux_does_not_permit_are_no_instruction_set_of_this_machine(monkeypatch):
    monkeypatch.setattr(cpu_library, "_tiles_permitted", lambda: False)
    assert "amx" not in cpu_library.supported_isas.__wrapped__()
    with pytest.raises(InvalidInput, match="does not permit AMX tiles"):
        cpu_library._library.__wrapped__("amx")


def test_the_instruction_set_decides_bits_on_a_cpu_alone():
    assert cpu_library.isa_of(torch.device("cpu")) == cpu_library.isa()
    assert cpu_library.isa_of(torch.device("cuda")) == ""


def test_exact_kernels_alone_use_integer_dot_products(monkeypatch):
    monkeypatch.setattr(cpu_library.platform, "machine", lambda: "x86_64")
    assert "-mavx512vnni" in cpu_library._isa_flags("avx512bf16", "exact")
    assert cpu_library._isa_flags("avx512", "exact") == ["-march=x86-64-v4"]
    assert "-mamx-int8" in cpu_library._isa_flags("amx", "exact")
    monkeypatch.setattr(cpu_library.platform, "machine", lambda: "aarch64")
    for features, flags in (({"fp", "asimd"}, []), ({"fp", "asimd", "asimddp"}, ["-march=armv8.2-a+dotprod"])):
        monkeypatch.setattr(cpu_library, "_cpu_flags", lambda features=features: features)
        assert cpu_library._isa_flags("portable", "exact") == flags
        assert cpu_library._isa_flags("portable") == []


def test_the_probe_of_the_product_of_tiles_sees_its_absence():
    assert cpu_library.library("portable").detcompile_tile_faults() == -1


def test_processes_that_ask_at_once_build_one_library_once(sources, tmp_path):
    compiler, runs = tmp_path / "compiler", tmp_path / "runs"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {runs}\nexec {os.environ.get("CXX", "g++")} "$@"\n')
    compiler.chmod(0o755)
    environment = {**os.environ, "DETCOMPILE_CACHE": str(tmp_path), "CXX": str(compiler)}
    command = [sys.executable, "-c", SMALL_BUILD, str(sources)]
    processes = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    for process in processes:
        errors = process.communicate()[1]
        assert process.returncode == 0, errors
    assert [path.suffix for path in (tmp_path / "cpu").iterdir()] == [".so"]
    assert sum(" -c " in line for line in runs.read_text().splitlines()) == len(list(sources.glob("*.cpp")))


def test_a_build_waits_for_another_ones_end_and_not_for_ever(build, tmp_path, monkeypatch):
    (tmp_path / "cache" / "cpu").mkdir(parents=True)
    holder = os.open(tmp_path / "cache" / "cpu", os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    monkeypatch.setattr(shared_objects, "_LONGEST_WAIT", 0.2)
    start = time.monotonic()
    build()
    assert time.monotonic() - start >= 0.2
    os.close(holder)


@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped", "foreign"])
def test_a_damaged_library_is_rebuilt(build, tmp_path, damage):
    build()
    (path,) = (tmp_path / "cache" / "cpu").iterdir()
    intact = path.read_bytes()
    flipped = bytearray(intact)
    flipped[len(intact) // 2] ^= 1
    damaged = {
        "truncated": intact[: len(intact) // 2],
        "empty": b"",
        "flipped": bytes(flipped),
        "foreign": b"#!/bin/sh\n",
    }
    path.unlink()  # the loaded file must stay as it is
    path.write_bytes(damaged[damage])
    assert build().detcompile_embedding(None, 0, None, 8, None, 0, 1, 4, 1) == -1
    assert path.read_bytes() == intact


def test_an_intact_library_is_not_built_again(build, tmp_path):
    build()
    (path,) = (tmp_path / "cache" / "cpu").iterdir()
    before = path.stat().st_mtime_ns
    build()
    assert path.stat().st_mtime_ns == before


def test_another_source_gets_another_library(build, sources, tmp_path):
    build()
    with (sources / "embedding.cpp").open("a") as file:
        file.write("// changed\n")
    build()
    assert len(list((tmp_path / "cache" / "cpu").iterdir())) == 2


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_a_missing_compiler_is_named(build, monkeypatch, compiler):
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(
        CompilerNotFound, match=rf"compiled on first use, but the C\+\+ compiler '{compiler}' .*apt-get install"
    ):
        build()


def test_sources_that_do_not_compile_show_the_compiler_s_words(build, sources, tmp_path):
    (sources / "embedding.cpp").write_text("int main() { return undeclared; }\n")
    with pytest.raises(CompilerNotFound, match=r"(?s)could not be compiled.*undeclared"):
        build()
    assert list((tmp_path / "cache" / "cpu").iterdir()) == []
