"""Everything read from the environment, once, and nowhere else.

| variable | default | meaning |
|---|---|---|
| DETCOMPILE_CACHE | ~/.cache/detcompile | compiled kernels, tuner decisions, programs |
| DETCOMPILE_KEEP_PROGRAMS | 1 | 0: compile() neither reads nor writes the programs in the cache |
| DETCOMPILE_PROGRESS | 1 | 0: compile() shows no stages on standard error |
| DETCOMPILE_CPU_ISA | the widest the machine has | amx, avx512bf16, avx512, avx2 or portable |
| DETCOMPILE_PEER_MEMORY | 1 | 0: sums and gathers over ranks go by NCCL also where GPUs map each other's memory |
| DETCOMPILE_SHARED_GPUS | 0 | 1: several ranks may take one GPU, which is slow, and for comparing bits |
| TORCHINDUCTOR_SIZE_ASSERTS | 0 | 1: a compiled model asserts the sizes and strides of its tensors |
| CXX | g++ | C++ compiler for the CPU templates |
| CC | gcc, or clang | C compiler that Triton builds the launchers of GPU kernels with |
| TRITON_PTXAS_PATH | the one that comes with Triton | assembler of GPU kernels; part of the fingerprint |
| TRITON_CACHE_DIR | triton in DETCOMPILE_CACHE | compiled GPU kernels |
"""

import contextlib
import importlib.util
import os
import tempfile
from pathlib import Path
from typing import NamedTuple

from detcompile.errors import InvalidInput, StorageError

__all__ = [
    "c_compiler",
    "cache_directory",
    "compiler_environment",
    "cpu_isa_override",
    "cxx_compiler",
    "environment_without_programs",
    "gpus_shared",
    "peer_memory_allowed",
    "pin_kernel_cache",
    "pin_ptxas",
    "programs_kept",
    "progress_shown",
    "settle_symmetric_memory",
    "sizes_asserted",
]


def cache_directory() -> Path:
    """Folder for artifacts that can be rebuilt at any time.

    Raises:
        StorageError: none is named, and this user has no home folder.
    """
    named = os.environ.get("DETCOMPILE_CACHE")
    try:
        return Path(named) if named else Path.home() / ".cache" / "detcompile"
    except RuntimeError as error:
        raise StorageError("this user has no home folder for a cache: set DETCOMPILE_CACHE to one") from error


def cpu_isa_override() -> str | None:
    """The instruction set forced by the user, or None to take the widest available."""
    return os.environ.get("DETCOMPILE_CPU_ISA")


def cxx_compiler() -> str:
    """Command that compiles C++17, and C++20 against torch's headers."""
    return os.environ.get("CXX", "g++")


def c_compiler() -> str | None:
    """Command that Triton builds the launchers of GPU kernels with; None lets it take gcc, or clang."""
    return os.environ.get("CC")


def compiler_environment(folder: str) -> dict[str, str]:
    """Environment for a C++ compiler: it keeps its own files in ``folder`` and complains in English."""
    return os.environ | {"TMPDIR": folder, "LC_ALL": "C"}


def inductor_folder() -> Path:
    """Where torch's Inductor writes, as far as it was said."""
    return Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or tempfile.gettempdir())


def settle_symmetric_memory() -> None:
    """Have communicators and memory opened without NVLink multicast, and on one GPU by several ranks where they may.

    What the caller has set in the environment stays.
    """
    settings = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}
    if gpus_shared():
        settings["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    for variable, value in settings.items():
        os.environ.setdefault(variable, value)


def gpus_shared() -> bool:
    """Whether several ranks may take one GPU. NCCL refuses that; gloo then carries what kernels do not."""
    return os.environ.get("DETCOMPILE_SHARED_GPUS", "0") == "1"


def pin_ptxas() -> None:
    """Have one assembler for all kernels of this process, unless the caller decided.

    Otherwise Inductor puts torch's in the place of Triton's once it has compiled a kernel in this process, but not
    where another process did: kernels would come from either, and fingerprints would differ.
    """
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin is not None:
        ptxas = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "ptxas"
        if os.access(ptxas, os.X_OK):
            os.environ.setdefault("TRITON_PTXAS_PATH", str(ptxas))


def pin_kernel_cache() -> None:
    """Keep compiled GPU kernels in one folder in this process and in later ones, unless the caller decided.

    Inductor sets the variable to a folder of its own when it first loads a kernel in this process. Kernels that Triton
    compiled before that lie elsewhere, and a process that loads Inductor's kernels earlier compiles them again.
    """
    with contextlib.suppress(StorageError):  # raised again where the cache is needed
        os.environ.setdefault("TRITON_CACHE_DIR", str(cache_directory() / "triton"))


def peer_memory_allowed() -> bool:
    """Whether kernels may write into the memory of other GPUs."""
    return os.environ.get("DETCOMPILE_PEER_MEMORY", "1") != "0"


def engine_secret() -> bytes:
    """What an engine of another machine proves to have to its front, and what the front asks for; empty: not set."""
    return os.environ.get("DETCOMPILE_ENGINE_SECRET", "").encode()


class Place(NamedTuple):
    """What torchrun tells a process that it has started.

    Attributes:
        rank: number of the process among all. size: how many they are.
        local_rank: number of the process on this machine. local_size: how many are here.
        host: address of the store where they meet. port: where the store listens.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    port: int


def place_of_torchrun() -> Place:
    """The place that torchrun gives to this process.

    Raises:
        InvalidInput: torchrun has not started it.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    try:
        rank, size, local_rank, local_size, port = (int(os.environ[name]) for name in names)
        return Place(rank, size, local_rank, local_size, os.environ["MASTER_ADDR"], port)
    except (KeyError, ValueError) as error:
        told = ", ".join((*names, "MASTER_ADDR"))
        raise InvalidInput(f"{error}: torchrun tells a process {told}: start this one with torchrun") from error


def visible_gpus(first: int, count: int) -> str:
    """Some of the GPUs that this process may see, as CUDA_VISIBLE_DEVICES names them; none where that is empty."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = map(str, range(first + count)) if named is None else filter(None, map(str.strip, named.split(",")))
    return ",".join([*names][first : first + count])


def show_gpus(names: str) -> None:
    """Let this process, in which CUDA has not begun, see these GPUs alone."""
    os.environ["CUDA_VISIBLE_DEVICES"] = names


def progress_shown() -> bool:
    """Whether compile() shows its stages, where the call does not say."""
    return os.environ.get("DETCOMPILE_PROGRESS", "1") != "0"


def programs_kept() -> bool:
    """Whether compile() keeps programs in the cache, and takes those that it finds there."""
    return os.environ.get("DETCOMPILE_KEEP_PROGRAMS", "1") != "0"


def environment_without_programs() -> dict[str, str]:
    """Environment of a process that compiles anew whatever is kept."""
    return os.environ | {"DETCOMPILE_KEEP_PROGRAMS": "0"}


def sizes_asserted() -> bool:
    """Whether a compiled model asserts the sizes and strides of its tensors. Inductor's own default is yes, and costs a
    tenth of a token's step on a CPU; all but a few tests have it."""
    return os.environ.get("TORCHINDUCTOR_SIZE_ASSERTS", "0") == "1"
