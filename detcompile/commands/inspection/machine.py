"""What is here: versions, CPU, GPUs, compilers, cache and settings, as facts. What they mean is in ``findings``.

Packages are imported by name and one by one, so that one that is missing or broken is a fact as well.
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

__all__ = ["CPU", "GPU", "GPUs", "Hub", "Machine", "look_at_cpu", "look_at_gpus", "look_at_machine"]

PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy")
CPUINFO = Path("/proc/cpuinfo")
DRIVER = Path("/proc/driver/nvidia/version")
DRIVER_DEVICES = (Path("/dev/nvidiactl"), Path("/proc/driver/nvidia/gpus"))
QUOTAS = Path("/sys/fs/cgroup")  # version 2: cpu.max; version 1: two files in cpu/
PROBED = ("amx", "avx512bf16")  # taken only where a compiled probe finds their dot products as the orders say
QUERY = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


@dataclass(frozen=True, kw_only=True)
class CPU:
    """The processor.

    Attributes:
        cores: cores of the machine, as the system counts them.
        usable: cores that this process may run on.
        quota: cores' worth of time that the cgroup grants; None if it grants all.
        threads: threads that torch computes with; None without torch.
        memory: bytes of the machine's memory.
        available: bytes that this process can still take; None without torch.
        isas: instruction sets that our C++ kernels have code for here, widest first; none without torch.
        isa: the instruction set that they take; None if what DETCOMPILE_CPU_ISA names is not to be had.
        wanted_isa: what DETCOMPILE_CPU_ISA says.
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

    @property
    def isa_is_probed(self) -> bool:
        """Whether a probe of the first compile() may still turn the instruction set down."""
        return self.isa in PROBED


@dataclass(frozen=True, kw_only=True)
class GPU:
    """One GPU: its name, bytes of memory and compute capability."""

    name: str
    memory: int
    capability: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class GPUs:
    """The GPUs, and what runs them.

    Attributes:
        cuda: the CUDA version that torch was built for; None of a build for CPUs.
        driver: version of NVIDIA's driver; None where there is none.
        ptxas: the assembler that kernels are made with, and its version; None without Triton.
        ptxas_is_tritons: whether the assembler comes with Triton, to which detcompile pins it.
    """

    found: tuple[GPU, ...] = ()
    cuda: str | None = None
    driver: str | None = None
    ptxas: str | None = None
    ptxas_is_tritons: bool = True


@dataclass(frozen=True, kw_only=True)
class Hub:
    """Hugging Face's settings: the folder of its cache, and whether it is told to stay off the network."""

    home: str
    offline: bool


@dataclass(frozen=True, kw_only=True)
class Machine:
    """All that ``look_at_machine`` finds.

    Attributes:
        versions: versions by package; None of one that is not installed.
        broken: packages that cannot be imported, and why.
        programs_kept: compile() keeps programs for the next start.
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
    """Everything, in a few seconds, most of which torch's import takes."""
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
    """The processor; less is known of it without torch, which is None then."""
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
    """The GPUs that torch sees, and what runs them; None for a package that cannot be imported."""
    found: tuple[GPU, ...] = ()
    if torch is not None and torch.cuda.is_available():
        every = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        found = tuple(GPU(name=one.name, memory=one.total_memory, capability=(one.major, one.minor)) for one in every)
    tool = getattr(getattr(getattr(triton, "knobs", None), "nvidia", None), "ptxas", None)
    own = Path(triton.__file__).parent if triton is not None else None
    return GPUs(
        found=found,
        cuda=None if torch is None else torch.version.cuda,
        driver=_driver(),
        ptxas=None if tool is None else f"{tool.path} {tool.version}",
        ptxas_is_tritons=tool is None or own is None or Path(tool.path).is_relative_to(own),
    )


def _imported(name: str, broken: dict[str, str]) -> Any:
    """The module; or None, and the reason in ``broken``."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # a broken installation raises what it likes
        broken[name] = f"{type(error).__name__}: {error}"
        return None


def _version(name: str, module: Any) -> str | None:
    own = getattr(module, "__version__", None)
    if own is not None:
        return str(own)
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    """Version of NVIDIA's driver; "unknown" where there is one that does not say."""
    if DRIVER.exists() and (said := re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", DRIVER.read_text(errors="replace"))):
        return said[1]
    try:
        done = subprocess.run(QUERY, capture_output=True, text=True, check=True, timeout=20)
        return done.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown" if any(device.exists() for device in DRIVER_DEVICES) else None


def _quota() -> float | None:
    """Cores' worth of time that the container's cgroup grants; None if it grants all, or there is no file to say."""
    try:
        if (QUOTAS / "cpu.max").exists():
            granted, period = (QUOTAS / "cpu.max").read_text().split()
        else:
            granted, period = ((QUOTAS / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(granted) / int(period) if int(granted) > 0 else None
    except (OSError, ValueError):  # "max" is no number
        return None
