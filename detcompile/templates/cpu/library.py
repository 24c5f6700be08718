"""The CPU templates as one shared library per instruction set, compiled on first use.

The sources beside this file are plain C++17 with a C ABI. A library is named by the hash of its sources, its flags and
the compiler's version, and is built and checked by shared_objects. All instruction sets give the same bits, but for
products of bfloat16 with amx, which have an order of their own (numerics.matmul_order). The dot products of bfloat16
pairs and of tiles are used only on a machine where they were compared with their orders, written out.
"""

import ctypes
import functools
import hashlib
import math
import platform
import re
import shlex
import threading
from pathlib import Path
from typing import Any

import torch

from detcompile import config
from detcompile.errors import InvalidInput, NumericsError
from detcompile.progress import stage
from detcompile.storage import CACHE_ADVICE, cache_folder, naming, put
from detcompile.templates.cpu.shared_objects import build, compiler_version, is_intact

__all__ = [
    "DTYPE_CODES",
    "adopt",
    "dtype_code",
    "isa",
    "isa_of",
    "library",
    "library_bytes",
    "pair_faults",
    "radices_address",
    "radices_array",
    "source_digest",
    "supported_isas",
    "thread_count",
    "tile_faults",
]

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # enum Dtype of simd.h

_SOURCES = Path(__file__).parent
_TILES, _PAIRS = "amx", "avx512bf16"
_ISA_FLAGS = {
    _TILES: "-march=x86-64-v4 -mavx512bf16 -mamx-tile -mamx-bf16",
    _PAIRS: "-march=x86-64-v4 -mavx512bf16",
    "avx512": "-march=x86-64-v4",
    "avx2": "-march=x86-64-v3",
    "portable": "-march=x86-64",
}
_AVX512 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_ISA_NEEDS = {
    _TILES: _AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16"},
    _PAIRS: _AVX512 | {"avx512_bf16"},
    "avx512": _AVX512,
    "avx2": {"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"},
    "portable": set[str](),
}
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-ffp-contract=off", "-fvisibility=hidden", "-fno-gnu-unique")
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # of Linux on x86-64: ARCH_REQ_XCOMP_PERM
_adopted: dict[str, Path] = {}  # by instruction set: what another machine compiled
_loaded: dict[str, Path] = {}  # by instruction set: what this process runs
_BUILDING = threading.Lock()  # a thread of compile() builds while the model is captured
_MOST_RADICES, _MOST_LEAVES = 16, 1 << 20  # nodes[] in rowsum.h; kernels take each leaf in turn

_NUMBERS = {
    "int64_t": ctypes.c_int64,
    "int32_t": ctypes.c_int32,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}
_PROTOTYPE = re.compile(r"^EXPORT (void|int64_t) (\w+)\(([^)]*)\)", re.MULTILINE)
# Kernels of training alone, 5 of 17 CPU seconds to compile: a library of their own, built when one is first called.
_TRAINING = ("packed_attention.cpp", "pointwise_training.cpp", "row_gradients.cpp")


class _Kernels(ctypes.CDLL):
    """The library of an instruction set, which loads the kernels of training when one is first called."""

    isa = ""

    def __getattr__(self, name: str) -> Any:
        if self.isa and name.startswith("detcompile_") and name in _signatures(training=True):
            setattr(self, name, getattr(_training_kernels(self.isa), name))
            return self.__dict__[name]
        return super().__getattr__(name)


def _signatures(training: bool) -> dict[str, tuple[type[ctypes.c_int64] | None, list[Any]]]:
    """Return the result and the arguments of each exported function, by its source; what is no number is an address."""
    found = {}
    for source in _sources(training):
        for result, name, taken in _PROTOTYPE.findall(source.read_text()):
            kinds = [argument.strip().rpartition(" ")[0] for argument in taken.split(",") if argument.strip()]
            arguments = [_NUMBERS.get(kind, ctypes.c_void_p) for kind in kinds]
            found[name] = (None if result == "void" else ctypes.c_int64, arguments)
    return found


def isa() -> str:
    """The instruction set the CPU templates run with: amx, avx512bf16, avx512, avx2 or portable.

    Raises:
        InvalidInput: config.cpu_isa_override() names none that this machine has, or one whose bits are not ours.
    """
    override = config.cpu_isa_override()
    available = supported_isas()
    if override is None:
        return next(name for name in available if not _faults(name))
    if override not in available:
        raise InvalidInput(
            f"DETCOMPILE_CPU_ISA={override!r}: this machine runs {', '.join(available)}. Set one of these, or unset it."
        )
    if _faults(override):
        operands = "tiles" if override == _TILES else "pairs"
        raise InvalidInput(
            f"DETCOMPILE_CPU_ISA={override!r}: this CPU's dot product of bfloat16 {operands} rounds unlike its order,"
            f" written out ({_faults(override)} of the probe's results differ). "
            f"Set {available[available.index(override) + 1]}, or unset it."
        )
    return override


def isa_of(device: torch.device) -> str:
    """isa() where it decides bits, on a CPU; empty for any other device."""
    return isa() if device.type == "cpu" else ""


@functools.cache
def pair_faults() -> int:
    """How many results of this CPU's dot product of bfloat16 pairs differ from two multiply-adds, in a fixed probe."""
    return int(_probe(_PAIRS, "pairs").detcompile_pair_faults())


@functools.cache
def tile_faults() -> int:
    """How many results of this CPU's product of bfloat16 tiles differ from orders.EvenOdd, in a fixed probe."""
    return int(_probe(_TILES, "tiles").detcompile_tile_faults())


@functools.cache
def supported_isas() -> tuple[str, ...]:
    """Instruction sets of this machine that the templates have code for, widest first."""
    cpuinfo = Path("/proc/cpuinfo")
    flags: set[str] = set()
    if cpuinfo.exists():
        lines = cpuinfo.read_text(errors="replace").splitlines()
        flags = set(next((line for line in lines if line.startswith("flags")), "").split())
    names = [name for name, needs in _ISA_NEEDS.items() if needs <= flags]
    return tuple(name for name in names if name != _TILES or _tiles_permitted())


@functools.cache
def source_digest() -> str:
    """SHA-256 of the C++ sources and the flags they are compiled with, in hex."""
    digest = hashlib.sha256(" ".join((*_FLAGS, *_ISA_FLAGS.values())).encode())
    for path in sorted(_SOURCES.iterdir()):
        if path.suffix in (".cpp", ".h"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def library(name: str | None = None) -> ctypes.CDLL:
    """The kernels for an instruction set (default: isa()), with typed functions; compiled if the cache lacks them.

    Raises:
        CompilerNotFound: they are not in the cache and cannot be compiled.
        StorageError: the cache is full, cannot be written, or is not this user's alone.
    """
    return _default_library() if name is None else _library(name)


def library_bytes(name: str) -> bytes:
    """The shared object that library(name) loads, whole, as ``adopt`` takes it; compiled if the cache lacks it."""
    library(name)
    return _library_file(name).read_bytes()


def adopt(name: str, content: bytes) -> None:
    """Make library(name) load this shared object, which another machine compiled, instead of compiling one.

    Raises:
        InvalidInput: a library for this instruction set, compiled otherwise, was loaded before.
        StorageError: as ``library``.
    """
    path = cache_folder("cpu") / f"{name}-{hashlib.sha256(content).hexdigest()[:24]}-adopted.so"
    if _loaded.get(name, path) != path and _loaded[name].read_bytes() != content:
        raise InvalidInput(
            f"this process runs CPU templates for {name} that another compiler made: load the archive in a process"
            " that compiled nothing"
        )
    if name in _loaded:
        return
    if not is_intact(path):
        with naming(path, CACHE_ADVICE):
            put(path, content)
    _adopted[name] = path


def thread_count() -> int:
    """Threads a kernel may use; the bits do not depend on it."""
    return torch.get_num_threads()


def dtype_code(tensor: torch.Tensor | None) -> int:
    """Code of a tensor's dtype in the C ABI (0 for an absent tensor).

    Raises:
        InvalidInput: a dtype other than float32, bfloat16 and float16.
    """
    if tensor is None:
        return 0
    code = DTYPE_CODES.get(tensor.dtype)
    if code is None:
        raise InvalidInput(f"{tensor.dtype}: the CPU templates take float32, bfloat16 and float16. Convert it first.")
    return code


@functools.cache
def radices_address(radices: tuple[int, ...]) -> int:
    """Where radices lie for the C ABI, for the life of the process; raises as radices_array."""
    return ctypes.addressof(radices_array(radices))


@functools.cache
def radices_array(radices: tuple[int, ...]) -> ctypes.Array[ctypes.c_int64]:
    """Radices for the C ABI.

    Raises:
        NumericsError: a radix below 1, or more leaves than any row has use for.
    """
    if any(radix < 1 for radix in radices) or len(radices) > _MOST_RADICES or math.prod(radices) > _MOST_LEAVES:
        raise NumericsError(
            f"radices {radices}: at most {_MOST_RADICES}, each at least 1, with a product of at most {_MOST_LEAVES}."
            " Take them from Numerics.radices."
        )
    return (ctypes.c_int64 * len(radices))(*radices)


def _faults(name: str) -> int:
    return tile_faults() if name == _TILES else pair_faults() if name == _PAIRS else 0


@functools.cache
def _tiles_permitted() -> bool:
    """Whether Linux lets this process, its threads and forks, use AMX's tiles; it wants to be asked (since 5.16)."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0


@functools.cache
def _default_library() -> ctypes.CDLL:
    return _library(isa())


@functools.cache
def _library(name: str) -> ctypes.CDLL:
    if name == _TILES and not _tiles_permitted():  # its first instruction would end the process
        raise InvalidInput("amx: Linux lets this process use no tiles. Take the instruction set that isa() chooses.")
    path = _library_file(name)
    loaded = _load(path, name, training=False)
    loaded.isa = name
    _loaded[name] = path
    return loaded


@functools.cache
def _training_kernels(name: str) -> ctypes.CDLL:
    path = _library_file(name)
    return _load(path.with_name(f"training-{path.name}"), name, training=True)


def _load(path: Path, name: str, training: bool) -> _Kernels:
    with _BUILDING:
        if not is_intact(path):
            with stage(f"compile the CPU's kernels{' of training' if training else ''} for {name}"):
                build(path, _sources(training), [*_FLAGS, *_isa_flags(name)])
    loaded = _Kernels(str(path))
    for function, (result, arguments) in _signatures(training).items():
        getattr(loaded, function).restype = result
        getattr(loaded, function).argtypes = arguments
    return loaded


def _sources(training: bool) -> list[Path]:
    """Return the sources of a library, the largest first: as many are compiled at once as there are cores."""
    sources = [source for source in _SOURCES.glob("*.cpp") if (source.name in _TRAINING) == training]
    return sorted(sources, key=lambda source: (-source.stat().st_size, source.name))


def _probe(name: str, source: str) -> ctypes.CDLL:
    """Return a library that has the probe in ``source``: all kernels where they are built, else the probe alone.

    isa() needs the probe before kernels are built, which takes seconds that a model's capture can run in.
    """
    if is_intact(_library_file(name)):
        return library(name)
    path = cache_folder("cpu") / f"probe-{_library_file(name).name}"
    if not is_intact(path):
        build(path, [_SOURCES / f"{source}.cpp"], [*_FLAGS, *_isa_flags(name)])
    return ctypes.CDLL(str(path))


def _isa_flags(name: str) -> list[str]:
    return shlex.split(_ISA_FLAGS[name]) if platform.machine() in ("x86_64", "AMD64") else []


def _library_file(name: str) -> Path:
    if name in _adopted:
        return _adopted[name]
    key = hashlib.sha256(f"{source_digest()} {name} {config.cxx_compiler()} {compiler_version()}".encode()).hexdigest()
    return cache_folder("cpu") / f"{name}-{key[:24]}.so"
