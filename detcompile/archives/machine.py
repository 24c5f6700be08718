"""Machine properties that a compiled program depends on: recorded at export, compared at load."""

import platform
from collections.abc import Mapping
from pathlib import Path

import torch
import triton

from detcompile import config
from detcompile.passes.programs.lanes import vector_isa
from detcompile.templates.cpu import library as cpu_library

# CPU flags in /proc/cpuinfo that Inductor's code for an instruction set needs.
VECTOR_FLAGS = {
    "avx2": {"avx2", "fma", "f16c"},
    "avx512": {"avx512f", "avx512dq", "avx512vl", "avx512bw", "fma"},
    "avx512_vnni": {"avx512_vnni"},
    "amx_tile": {"amx_tile", "amx_bf16", "amx_int8"},
}


def this_machine(device: torch.device) -> dict[str, str]:
    """Return the properties of this machine that a program compiled for ``device`` depends on."""
    machine = {"device": device.type, "platform": platform.machine(), "torch": torch.__version__}
    if device.type == "cpu":
        return machine | {"isa": cpu_library.isa(), "vectors": str(vector_isa())}
    major, minor = torch.cuda.get_device_capability(device)
    name = torch.cuda.get_device_name(device)
    return machine | {"gpu": name, "capability": f"{major}.{minor}", "triton": triton.__version__}


def obstacle(made: Mapping[str, str]) -> str:
    """Return why a program made on another machine cannot reproduce its bits here, and what to do; empty if it can."""
    if made["torch"] != torch.__version__:
        return f"it was made with torch {made['torch']}, this is {torch.__version__}: install that one, or export again"
    if made["platform"] != platform.machine():
        return f"it was made for {made['platform']}, this is {platform.machine()}: export it here"
    return _cpu_obstacle(made) if made["device"] == "cpu" else _gpu_obstacle(made)


def _cpu_obstacle(made: Mapping[str, str]) -> str:
    isa = made["isa"]
    available = cpu_library.supported_isas()
    if isa not in available:
        return f"it was made for a CPU with {isa}, this one has {', '.join(available)}: export it here"
    chosen = config.cpu_isa_override() or available[0]
    if chosen != isa:
        return f"it was made for {isa}, and {chosen} runs here: set DETCOMPILE_CPU_ISA={isa}, or export it here"
    kinds = made["vectors"].split()
    if not set(kinds) <= VECTOR_FLAGS.keys():
        here = str(vector_isa())
        return "" if here == made["vectors"] else f"it was made for {made['vectors']}, this is {here}: export it here"
    missing = sorted(set().union(*(VECTOR_FLAGS[kind] for kind in kinds)) - _cpu_flags())
    return f"its code needs {', '.join(missing)}, which this CPU lacks: export it here" if missing else ""


def _gpu_obstacle(made: Mapping[str, str]) -> str:
    if not torch.cuda.is_available():
        return f"it was made for {made['gpu']}, and there is no CUDA GPU here: export it for the CPU"
    here = this_machine(torch.device("cuda"))
    for name in ("gpu", "capability", "triton"):
        if made[name] != here[name]:
            return f"it was made for {name} {made[name]}, this is {here[name]}: export it here"
    return ""


def _cpu_flags() -> set[str]:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(errors="replace").splitlines() if cpuinfo.exists() else []
    return set(next((line for line in lines if line.startswith("flags")), "").split())
