"""Findings of `detcompile doctor`: what is missing on a machine, and what will be slow or fast."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from detcompile.commands.inspection.machine import GPU, Machine
from detcompile.releases import TESTED, numbers

Level = Literal["missing", "slow", "fast", "note"]
LEVELS: tuple[Level, ...] = ("missing", "slow", "fast", "note")
DEPENDENCIES: dict[str, tuple[str, str | None]] = {"python": ("3.11", None), **TESTED}  # (from, below)
GIB = 1 << 30
LEAST_FREE = GIB  # free bytes on the cache's disk; kernels and a few programs take some hundred MB
COMPILED_FOR = ((8, 0), (8, 6), (8, 9), (10, 0), (12, 0))  # besides Hopper, by tests/templates/test_cards.py
FEW_CORES = 4
INSTALL = "run `pip install .` in the project's folder"


@dataclass(frozen=True)
class Finding:
    """One finding.

    Attributes:
        level: "missing" if detcompile cannot work without it; "slow" and "fast" affect speed; "note" is information.
        about: the part of the machine.
        text: what the machine has or lacks, and why it matters.
        advice: what to do; empty if nothing.
    """

    level: Level
    about: str
    text: str
    advice: str = ""


def findings(machine: Machine) -> list[Finding]:
    """Return all findings, missing ones first."""
    results = [finding for rule in RULES for finding in rule(machine)]
    return sorted(results, key=lambda finding: LEVELS.index(finding.level))


def _packages(machine: Machine) -> Iterator[Finding]:
    if not machine.system.startswith("Linux"):
        yield Finding("missing", "system", f"this is {machine.system}; detcompile runs on Linux", "use Linux")
    for name, reason in machine.broken.items():
        yield Finding("missing", name, f"it cannot be imported ({reason})", INSTALL)
    for name, (least, below) in DEPENDENCIES.items():
        version = machine.versions.get(name)
        if version is None or name in machine.broken:
            continue
        if numbers(version) < numbers(least):
            yield Finding("missing", name, f"{version} is older than {least}", f"install {name} {least} or later")
        elif below is not None and numbers(version) >= numbers(below):
            text = f"{version} is outside the tested range, {least} to below {below}: compile() probes it"
            advice = f"install {name} below {below}, or run `detcompile verify` on your model before you rely on it"
            yield Finding("note", name, text, advice)


def _gpus(machine: Machine) -> Iterator[Finding]:
    gpus = machine.gpus
    for gpu in dict.fromkeys(gpus.found):
        yield _gpu(gpu)
    if gpus.found and machine.compilers.c is None:
        text = "Triton needs one for launchers of GPU kernels, and neither gcc, clang nor the compiler in CC is here"
        advice = "install gcc (Debian, Ubuntu: apt-get install gcc), or name a C compiler in CC"
        yield Finding("missing", "C compiler", text, advice)
    if gpus.found and not gpus.ptxas_is_tritons:
        text = f"kernels are assembled by {gpus.ptxas}, as TRITON_PTXAS_PATH says: it is part of the fingerprint"
        yield Finding("note", "ptxas", text, "unset TRITON_PTXAS_PATH to use Triton's, for others' fingerprints")
    if not gpus.found and gpus.driver is not None:
        why = "torch was built for CPUs" if gpus.cuda is None else f"torch for CUDA {gpus.cuda} does not see its GPU"
        advice = "install a torch for CUDA" if gpus.cuda is None else "see whether CUDA_VISIBLE_DEVICES hides it"
        yield Finding("slow", "GPU", f"NVIDIA's driver {gpus.driver} is here, and {why}: models run on the CPU", advice)
    elif not gpus.found:
        yield Finding("slow", "GPU", "no CUDA GPU: models run on the CPU")


def _gpu(gpu: GPU) -> Finding:
    capability = "{}.{}".format(*gpu.capability)
    if gpu.capability[0] == 9:
        text = f"{gpu.name} is a Hopper: 16-bit products and attention take the kernels made for it"
        return Finding("fast", "GPU", text)
    text = f"{gpu.name} (compute capability {capability}) is not a Hopper: all kernels are the plain ones"
    if gpu.capability in COMPILED_FOR:
        text += "; they are compiled for it in the tests, no operation is refused, and none was run on such a GPU"
    else:
        text += "; they were neither compiled for it nor run on it"
    if gpu.capability[0] < 8:
        return Finding("slow", "GPU", f"{text}, and it has no units for bfloat16", "take --dtype float16")
    return Finding("slow", "GPU", text)


def _cpu(machine: Machine) -> Iterator[Finding]:
    cpu = machine.cpu
    if cpu.wanted_isa is not None and cpu.isas and cpu.isa is None:
        text = f"DETCOMPILE_CPU_ISA={cpu.wanted_isa}, and this CPU runs {', '.join(cpu.isas)}"
        yield Finding("missing", "CPU", text, "set one of these, or unset it")
    if cpu.isas and cpu.isa is not None:
        yield from _isa(cpu.isa, cpu.isas)
        if cpu.isa != cpu.isas[0]:
            text = f"DETCOMPILE_CPU_ISA={cpu.isa} restricts the kernels to less than this CPU's {cpu.isas[0]}"
            yield Finding("note", "CPU", text, "unset it to use the widest")
    granted = min(cpu.usable, cpu.quota) if cpu.quota else cpu.usable
    if cpu.threads is not None and cpu.threads > granted:
        text = f"torch computes in {cpu.threads} threads, and this process is granted {granted:g} of {cpu.cores} cores"
        yield Finding("slow", "CPU", text, f"set OMP_NUM_THREADS={max(1, int(granted))}; no bit depends on it")
    if not machine.gpus.found and granted < FEW_CORES:
        yield Finding("slow", "CPU", f"{granted:g} cores compile and answer; large models are slow with few")


def _isa(isa: str, isas: tuple[str, ...]) -> Iterator[Finding]:
    """Yield findings about the instruction set of the C++ kernels."""
    if isa == "amx":
        text = "the C++ kernels take AVX-512, and AMX's tiles for bfloat16 once compile()'s probe has passed"
        yield Finding("fast", "CPU", text)
        text = "tiles add in a different order: bfloat16 bits differ from those of CPUs without AMX"
        advice = f"if these must agree, set DETCOMPILE_CPU_ISA={isas[1]} here, which is slower"
        yield Finding("note", "CPU", text, advice)
    elif isa == "avx512bf16":
        text = "the C++ kernels take AVX-512, and its dot products of bfloat16 once compile()'s probe has passed"
        yield Finding("fast", "CPU", text)
    elif isa == "avx512":
        yield Finding("fast", "CPU", "the C++ kernels take AVX-512")
    elif isa == "avx2":
        text = "the C++ kernels take AVX2, whose vectors are half as wide as AVX-512's; their bits are the same"
        yield Finding("slow", "CPU", text)
    else:
        text = "the C++ kernels use only this architecture's basic vectors; their bits are the same"
        yield Finding("slow", "CPU", text)


def _compilers(machine: Machine) -> Iterator[Finding]:
    compilers = machine.compilers
    if compilers.failure:
        level: Level = "note" if machine.gpus.found else "missing"
        text = "the CPU's kernels and programs cannot be compiled; only exported models run on the CPU"
        yield Finding(level, "C++ compiler", text, compilers.failure)
    if compilers.python_headers is None:
        text = "Python.h is not here: neither Inductor's CPU programs nor Triton's launchers compile"
        yield Finding("missing", "Python headers", text, "install them (Debian, Ubuntu: apt-get install python3-dev)")


def _cache(machine: Machine) -> Iterator[Finding]:
    cache = machine.cache
    if cache.failure:
        text = "compiled kernels and programs cannot be kept in it, and compile() fails"
        yield Finding("missing", "cache", text, cache.failure)
    elif cache.free < LEAST_FREE:
        text = f"{cache.free / GIB:.1f} GiB are free on the disk of {cache.folder}"
        yield Finding("note", "cache", text, "free space there, or set DETCOMPILE_CACHE to a folder with room")
    if not machine.programs_kept:
        text = "DETCOMPILE_KEEP_PROGRAMS=0: every start recompiles its model"
        yield Finding("slow", "cache", text, "unset it to start in seconds the second time")


RULES: tuple[Callable[[Machine], Iterator[Finding]], ...] = (_packages, _compilers, _cache, _gpus, _cpu)
