"""Environment variables. No other module reads the environment.

| variable | default | meaning |
|---|---|---|
| DETCOMPILE_CACHE | ~/.cache/detcompile | compiled kernels, tuner decisions, programs |
| DETCOMPILE_KEEP_PROGRAMS | 1 | 0: compile() neither reads nor writes the programs in the cache |
| DETCOMPILE_ANY_RELEASE | 0 | 1: compile under untested releases of torch, transformers and triton, without a probe |
| DETCOMPILE_PROGRESS | 1 | 0: compile() shows no stages on standard error |
| DETCOMPILE_CPU_ISA | the widest the machine has | amx, avx512bf16, avx512, avx2 or portable |
| DETCOMPILE_PEER_MEMORY | 1 | 0: sums and gathers over ranks use NCCL even if GPUs map each other's memory |
| DETCOMPILE_SHARED_GPUS | 0 | 1: several ranks may share one GPU: slow, for comparing bits |
| DETCOMPILE_INT8_TENSOR_CORES | 1 | 0: exact arithmetic multiplies digits with bfloat16 tensor cores, same bits |
| TORCHINDUCTOR_SIZE_ASSERTS | 0 | 1: a compiled model asserts the sizes and strides of its tensors |
| CXX | g++ | C++ compiler for the CPU templates |
| CC | gcc, or clang | C compiler that Triton builds the launchers of GPU kernels with |
| TRITON_PTXAS_PATH | Triton's | assembler of GPU kernels; part of the fingerprint |
| TRITON_CACHE_DIR | triton in DETCOMPILE_CACHE | compiled GPU kernels |
"""

import contextlib
import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from detcompile.errors import InvalidInput, StorageError


def cache_directory() -> Path:
    """Return the folder for artifacts that can be rebuilt at any time.

    Raises:
        StorageError: DETCOMPILE_CACHE is not set, and this user has no home folder.
    """
    named = os.environ.get("DETCOMPILE_CACHE")
    try:
        return Path(named) if named else Path.home() / ".cache" / "detcompile"
    except RuntimeError as error:
        raise StorageError("this user has no home folder for a cache: set DETCOMPILE_CACHE to one") from error


def cpu_isa_override() -> str | None:
    """Return the CPU instruction set forced by the user, or None to use the widest available."""
    return os.environ.get("DETCOMPILE_CPU_ISA")


def cxx_compiler() -> str:
    """Return the command that compiles C++17, and C++20 against torch's headers."""
    return os.environ.get("CXX", "g++")


def c_compiler() -> str | None:
    """Return the C compiler command for Triton's kernel launchers; None lets Triton pick gcc or clang."""
    return os.environ.get("CC")


def compiler_environment(folder: str) -> dict[str, str]:
    """Return the environment for a C++ compiler: temporary files in ``folder``, messages in English."""
    return os.environ | {"TMPDIR": folder, "LC_ALL": "C"}


def inductor_folder() -> Path:
    """Return TORCHINDUCTOR_CACHE_DIR, or the temporary folder if it is not set."""
    return Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or tempfile.gettempdir())


def settle_symmetric_memory() -> None:
    """Turn NVLink multicast off, and let ranks share a GPU if DETCOMPILE_SHARED_GPUS allows it.

    Variables that the caller has set stay unchanged.
    """
    settings = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}
    if gpus_shared():
        settings["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    for variable, value in settings.items():
        os.environ.setdefault(variable, value)


def gpus_shared() -> bool:
    """Return whether several ranks may share one GPU. NCCL cannot do that, so gloo replaces it."""
    return os.environ.get("DETCOMPILE_SHARED_GPUS", "0") == "1"


def pin_ptxas() -> None:
    """Use Triton's ptxas for all kernels of this process, unless the caller chose another one.

    Otherwise Inductor switches to torch's ptxas once it compiles a kernel in this process, but not if another process
    compiled it. Kernels would then come from different assemblers, and fingerprints would differ.
    """
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin is not None:
        ptxas = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "ptxas"
        if os.access(ptxas, os.X_OK):
            os.environ.setdefault("TRITON_PTXAS_PATH", str(ptxas))


def pin_kernel_cache() -> None:
    """Keep compiled GPU kernels in one folder across processes, unless the caller chose another one.

    Inductor changes TRITON_CACHE_DIR when it first loads a kernel. Kernels that Triton compiled earlier would lie in
    another folder, and a process that loads Inductor's kernels first would compile them again.
    """
    with contextlib.suppress(StorageError):  # raised again when the cache is used
        os.environ.setdefault("TRITON_CACHE_DIR", str(cache_directory() / "triton"))


def int8_tensor_cores() -> bool:
    """Return whether exact arithmetic may use a GPU's int8 tensor cores."""
    return os.environ.get("DETCOMPILE_INT8_TENSOR_CORES", "1") != "0"


def peer_memory_allowed() -> bool:
    """Return whether kernels may write into the memory of other GPUs."""
    return os.environ.get("DETCOMPILE_PEER_MEMORY", "1") != "0"


def engine_secret() -> bytes:
    """Return the secret shared by the server and engines on other machines; empty if not set."""
    return os.environ.get("DETCOMPILE_ENGINE_SECRET", "").encode()


class Place(NamedTuple):
    """The position of a process in a torchrun job.

    Attributes:
        rank, size: index of the process, and number of processes.
        local_rank, local_size: the same on this machine.
        host, port: address of the rendezvous store.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    port: int


def place_of_torchrun() -> Place:
    """Return this process's position in its torchrun job.

    Raises:
        InvalidInput: torchrun did not start this process.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    try:
        rank, size, local_rank, local_size, port = (int(os.environ[name]) for name in names)
        return Place(rank, size, local_rank, local_size, os.environ["MASTER_ADDR"], port)
    except (KeyError, ValueError) as error:
        variables = ", ".join((*names, "MASTER_ADDR"))
        raise InvalidInput(f"{error}: torchrun sets {variables}: start this process with torchrun") from error


def visible_gpus(first: int, count: int) -> str:
    """Return ``count`` visible GPUs from index ``first`` on, in the syntax of CUDA_VISIBLE_DEVICES."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = map(str, range(first + count)) if named is None else filter(None, map(str.strip, named.split(",")))
    return ",".join([*names][first : first + count])


def show_gpus(names: str) -> None:
    """Restrict this process to these GPUs. Call it before CUDA is initialized."""
    os.environ["CUDA_VISIBLE_DEVICES"] = names


def progress_shown() -> bool:
    """Return whether compile() shows progress by default."""
    return os.environ.get("DETCOMPILE_PROGRESS", "1") != "0"


def programs_kept() -> bool:
    """Return whether compile() reads and writes compiled programs in the cache."""
    return os.environ.get("DETCOMPILE_KEEP_PROGRAMS", "1") != "0"


def any_release() -> bool:
    """Return whether untested releases of torch, transformers and triton are taken as they are."""
    return os.environ.get("DETCOMPILE_ANY_RELEASE", "0") == "1"


def environment_of_probe() -> dict[str, str]:
    """Return the environment for a process that tries an untested release: modules from where this one takes them."""
    return environment_without_programs() | {
        "DETCOMPILE_ANY_RELEASE": "1",
        "DETCOMPILE_PROGRESS": "0",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }


def environment_without_programs() -> dict[str, str]:
    """Return the environment for a process that ignores cached programs."""
    return os.environ | {"DETCOMPILE_KEEP_PROGRAMS": "0"}


def sizes_asserted() -> bool:
    """Return whether a compiled model asserts the sizes and strides of its tensors.

    Inductor does so by default, which costs a tenth of a decode step on a CPU. Most tests turn it on.
    """
    return os.environ.get("TORCHINDUCTOR_SIZE_ASSERTS", "0") == "1"
