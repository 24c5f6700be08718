"""Collects facts about this machine: versions, CPU, GPUs, compilers, cache and settings.

Packages are imported one by one, so that a missing or broken one is reported too. ``findings`` interprets the facts.
"""

import importlib
import importlib.metadata
import os
import platform
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from detcompile import __version__, config
from detcompile.commands.inspection.toolchain import Cache, Compilers, look_at_cache, look_at_compilers

PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy")
CPUINFO = Path("/proc/cpuinfo")
DRIVER = Path("/proc/driver/nvidia/version")
DRIVER_DEVICES = (Path("/dev/nvidiactl"), Path("/proc/driver/nvidia/gpus"))
QUOTAS = Path("/sys/fs/cgroup")  # version 2: cpu.max; version 1: two files in cpu/
QUERY = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


@dataclass(frozen=True, kw_only=True)
class CPU:
    """The processor.

    Attributes:
        cores: logical cores of the machine.
        usable: cores that this process may run on.
        quota: CPU quota of the cgroup, in cores; None if unlimited.
        threads: torch's number of threads; None without torch.
        memory: the machine's memory in bytes.
        available: bytes that this process can still allocate; None without torch.
        isas: instruction sets that the C++ kernels support here, widest first; empty without torch.
        isa: the instruction set in use; None if the one in DETCOMPILE_CPU_ISA is not supported.
        wanted_isa: value of DETCOMPILE_CPU_ISA.
    """

    name: str
    cores: int
    usable: int
    memory: int
    quota: float | None = None
    threads: int | None = None
    available: int | None = None
    isas: tuple[str, ...] = ()
    isa: str | None = None
    wanted_isa: str | None = None


@dataclass(frozen=True, kw_only=True)
class GPU:
    """One GPU: its name, bytes of memory and compute capability."""

    name: str
    memory: int
    capability: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class GPUs:
    """The GPUs and their software.

    Attributes:
        cuda: CUDA version of the torch build; None for a CPU build.
        driver: version of NVIDIA's driver; None without a driver.
        ptxas: path and version of the assembler; None without Triton.
        ptxas_is_tritons: whether it is Triton's own assembler, which detcompile uses by default.
    """

    found: tuple[GPU, ...] = ()
    cuda: str | None = None
    driver: str | None = None
    ptxas: str | None = None
    ptxas_is_tritons: bool = True


@dataclass(frozen=True, kw_only=True)
class Hub:
    """Hugging Face's settings: the folder of its cache, and whether it is offline."""

    home: str
    offline: bool


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The facts about a machine.

    Attributes:
        versions: version of each package; None if it is not installed.
        broken: packages that cannot be imported, with the reason.
        programs_kept: whether compile() caches programs.
    """

    system: str
    versions: dict[str, str | None]
    broken: dict[str, str]
    cpu: CPU
    gpus: GPUs
    compilers: Compilers
    cache: Cache
    hub: Hub | None
    programs_kept: bool = field(default=True)


def look_at_machine() -> Machine:
    """Collect all facts. Takes a few seconds, mostly for importing torch."""
    broken: dict[str, str] = {}
    modules = {name: _imported(name, broken) for name in (*PACKAGES, "huggingface_hub.constants")}
    torch, constants = modules["torch"], modules["huggingface_hub.constants"]
    versions: dict[str, str | None] = {"detcompile": __version__, "python": platform.python_version()}
    return Machine(
        system=f"{platform.system()} {platform.machine()}",
        versions=versions | {name: _version(name, modules[name]) for name in PACKAGES},
        broken={name: reason for name, reason in broken.items() if name in PACKAGES},
        cpu=look_at_cpu(torch),
        gpus=look_at_gpus(torch, modules["triton"]),
        compilers=look_at_compilers(),
        cache=look_at_cache(),
        hub=None if constants is None else Hub(home=constants.HF_HOME, offline=constants.HF_HUB_OFFLINE),
        programs_kept=config.programs_kept(),
    )


def look_at_cpu(torch: Any) -> CPU:
    """Return the CPU; some fields stay empty if ``torch`` is None."""
    lines = CPUINFO.read_text(errors="replace").splitlines() if CPUINFO.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    known: dict[str, Any] = {
        "name": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count() or 1,
        "usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "quota": _quota(),
        "wanted_isa": config.cpu_isa_override(),
    }
    if torch is None:
        return CPU(**known)
    isas = importlib.import_module("detcompile.templates.cpu.library").supported_isas()
    wanted = known["wanted_isa"]
    taken = isas[0] if wanted is None else wanted if wanted in isas else None
    available = importlib.import_module("detcompile.runtime.device_memory").available_memory()
    return CPU(**known, threads=torch.get_num_threads(), available=available, isas=isas, isa=taken)


def look_at_gpus(torch: Any, triton: Any) -> GPUs:
    """Return the GPUs that torch sees. Arguments are None for packages that cannot be imported."""
    gpus: tuple[GPU, ...] = ()
    if torch is not None and torch.cuda.is_available():
        every = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        gpus = tuple(GPU(name=one.name, memory=one.total_memory, capability=(one.major, one.minor)) for one in every)
    tool = getattr(getattr(getattr(triton, "knobs", None), "nvidia", None), "ptxas", None)
    package = Path(triton.__file__).parent if triton is not None else None
    return GPUs(
        found=gpus,
        cuda=None if torch is None else torch.version.cuda,
        driver=_driver(),
        ptxas=None if tool is None else f"{tool.path} {tool.version}",
        ptxas_is_tritons=tool is None or package is None or Path(tool.path).is_relative_to(package),
    )


def _imported(name: str, broken: dict[str, str]) -> Any:
    """Import a module; on failure return None and record the reason in ``broken``."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # a broken installation may raise anything
        broken[name] = f"{type(error).__name__}: {error}"
        return None


def _version(name: str, module: Any) -> str | None:
    version = getattr(module, "__version__", None)
    if version is not None:
        return str(version)
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    """Return the version of NVIDIA's driver: None without a driver, "unknown" if the version cannot be read."""
    if DRIVER.exists() and (match := re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", DRIVER.read_text(errors="replace"))):
        return match[1]
    try:
        done = subprocess.run(QUERY, capture_output=True, text=True, check=True, timeout=20)
        return done.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown" if any(device.exists() for device in DRIVER_DEVICES) else None


def _quota() -> float | None:
    """Return the CPU quota of the cgroup in cores; None if it is unlimited or unknown."""
    try:
        if (QUOTAS / "cpu.max").exists():
            granted, period = (QUOTAS / "cpu.max").read_text().split()
        else:
            granted, period = ((QUOTAS / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(granted) / int(period) if int(granted) > 0 else None
    except (OSError, ValueError):  # "max" is not a number
        return None
