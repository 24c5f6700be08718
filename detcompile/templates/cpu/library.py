"""The CPU templates as one shared library per instruction set, compiled on first use.

The sources beside this file are plain C++17 with a C ABI. A library's name is the hash of its sources, its flags and
the compiler's version; shared_objects builds and checks it. All instruction sets produce the same bits, except bfloat16
products with amx, which have a different order (numerics.matmul_order). Dot products of bfloat16 pairs and tiles are
used only if a probe on this machine agrees with their written-out orders.
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
    _TILES: _AVX512 | {"avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8"},
    _PAIRS: _AVX512 | {"avx512_bf16", "avx512_vnni"},  # no CPU has bfloat16 without int8, pairs or tiles
    "avx512": _AVX512,
    "avx2": {"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"},
    "portable": set[str](),
}
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-ffp-contract=off", "-fvisibility=hidden", "-fno-gnu-unique")
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # of Linux on x86-64: ARCH_REQ_XCOMP_PERM
_adopted: dict[str, Path] = {}  # libraries compiled on another machine, by instruction set
_loaded: dict[str, Path] = {}  # libraries that this process runs, by instruction set
_BUILDING = threading.Lock()  # a thread of compile() builds while the model is captured
_MOST_RADICES, _MOST_LEAVES = 16, 1 << 20  # nodes[] in rowsum.h; kernels visit the leaves one by one


class _Pointer(ctypes.c_void_p):
    """A pointer argument of a kernel: a tensor, whose data it points to, None, or an object of ctypes."""

    @classmethod
    def from_param(cls, value: Any) -> Any:
        return super().from_param(value.data_ptr() if isinstance(value, torch.Tensor) else value)


_NUMBERS = {
    "int64_t": ctypes.c_int64,
    "int32_t": ctypes.c_int32,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}
_PROTOTYPE = re.compile(r"^EXPORT (void|int64_t) (\w+)\(([^)]*)\)", re.MULTILINE)
# Training kernels take 5 of 17 CPU seconds to compile. They and the exact ones are separate libraries, built when a
# kernel of theirs is first called.
_SERVING, _TRAINING, _EXACT = "", "training", "exact"
_TRAINING_SOURCES = ("packed_attention.cpp", "pointwise_training.cpp", "row_gradients.cpp")
# Integer dot products, by the CPU's flag: in the exact library alone, whose bits no instruction set changes
_EXACT_FLAGS = {"avx512_vnni": "-mavx512vnni", "amx_int8": "-mamx-int8", "asimddp": "-march=armv8.2-a+dotprod"}


class _Kernels(ctypes.CDLL):
    """An instruction set's library, which loads the training or exact ones when a kernel of theirs is first called."""

    isa = ""

    def __getattr__(self, name: str) -> Any:
        if self.isa and name.startswith("detcompile_"):
            for part in (_TRAINING, _EXACT):
                if name in _signatures(part):
                    setattr(self, name, getattr(_part_of(self.isa, part), name))
                    return self.__dict__[name]
        return super().__getattr__(name)


def _signatures(part: str) -> dict[str, tuple[type[ctypes.c_int64] | None, list[Any]]]:
    """Return each exported function's result type and argument types, parsed from its source.

    Arguments that are not numbers are pointers, for which a call passes tensors or None.
    """
    signatures = {}
    for source in _sources(part):
        for result, name, taken in _PROTOTYPE.findall(source.read_text()):
            kinds = [argument.strip().rpartition(" ")[0] for argument in taken.split(",") if argument.strip()]
            arguments = [_NUMBERS.get(kind, _Pointer) for kind in kinds]
            signatures[name] = (None if result == "void" else ctypes.c_int64, arguments)
    return signatures


def isa() -> str:
    """Return the instruction set of the CPU templates: amx, avx512bf16, avx512, avx2 or portable.

    Raises:
        InvalidInput: config.cpu_isa_override() names one that this machine lacks, or one whose probe fails.
    """
    override = config.cpu_isa_override()
    available = supported_isas()
    if override is None:
        return next(name for name in available if not _faults(name))
    if override not in available:
        raise InvalidInput(
            f"DETCOMPILE_CPU_ISA={override!r}: this machine runs {', '.join(available)}. Set one of them, or unset it."
        )
    if _faults(override):
        operands = "tiles" if override == _TILES else "pairs"
        raise InvalidInput(
            f"DETCOMPILE_CPU_ISA={override!r}: this CPU's dot product of bfloat16 {operands} does not round in the"
            f" required order ({_faults(override)} results of the probe differ). "
            f"Set {available[available.index(override) + 1]}, or unset it."
        )
    return override


def isa_of(device: torch.device) -> str:
    """Return isa() for a CPU, where it affects bits; an empty string for other devices."""
    return isa() if device.type == "cpu" else ""


@functools.cache
def pair_faults() -> int:
    """Return how many results of this CPU's bfloat16 pair dot product differ from two FMAs, in a fixed probe."""
    return int(_probe(_PAIRS, "pairs").detcompile_pair_faults())


@functools.cache
def tile_faults() -> int:
    """Return how many results of this CPU's bfloat16 tile product differ from orders.EvenOdd, in a fixed probe."""
    return int(_probe(_TILES, "tiles").detcompile_tile_faults())


@functools.cache
def supported_isas() -> tuple[str, ...]:
    """Return the instruction sets that this machine and the templates support, widest first."""
    names = [name for name, needs in _ISA_NEEDS.items() if needs <= _cpu_flags()]
    return tuple(name for name in names if name != _TILES or _tiles_permitted())


@functools.cache
def source_digest() -> str:
    """Return the SHA-256 of the C++ sources and compiler flags, in hex."""
    return _digest_of(_SOURCES, " ".join((*_FLAGS, *_ISA_FLAGS.values())))


def _digest_of(folder: Path, flags: str) -> str:
    digest = hashlib.sha256(flags.encode())
    for path in sorted(folder.iterdir()):
        if path.suffix in (".cpp", ".h"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def library(name: str | None = None) -> ctypes.CDLL:
    """Return an instruction set's kernels (default: isa()) with typed functions; compile them if not cached.

    Raises:
        CompilerNotFound: they are not cached and cannot be compiled.
        StorageError: the cache is full, cannot be written, or is writable by other users.
    """
    return _default_library() if name is None else _library(name)


def library_bytes(name: str) -> bytes:
    """Return the content of the shared object that library(name) loads, for ``adopt``; compile it if not cached."""
    library(name)
    return _library_file(name).read_bytes()


def adopt(name: str, content: bytes) -> None:
    """Make library(name) load this shared object from another machine instead of compiling one.

    Raises:
        InvalidInput: a different library for this instruction set is already loaded.
        StorageError: as ``library``.
    """
    path = cache_folder("cpu") / f"{name}-{hashlib.sha256(content).hexdigest()[:24]}-adopted.so"
    if _loaded.get(name, path) != path and _loaded[name].read_bytes() != content:
        raise InvalidInput(
            f"this process runs CPU templates for {name} from another compiler: load the archive in a process that"
            " has not compiled anything"
        )
    if name in _loaded:
        return
    if not is_intact(path):
        with naming(path, CACHE_ADVICE):
            put(path, content)
    _adopted[name] = path


def thread_count() -> int:
    """Return the number of threads that a kernel may use; bits do not depend on it."""
    return torch.get_num_threads()


def address(tensor: torch.Tensor | None) -> int:
    """Return the address of a tensor's data, for a struct of the C ABI (0 for None)."""
    return 0 if tensor is None else tensor.data_ptr()


def dtype_code(tensor: torch.Tensor | None) -> int:
    """Return the code of a tensor's dtype in the C ABI (0 for None).

    Raises:
        InvalidInput: a dtype other than float32, bfloat16 or float16.
    """
    if tensor is None:
        return 0
    code = DTYPE_CODES.get(tensor.dtype)
    if code is None:
        raise InvalidInput(f"{tensor.dtype}: the CPU templates take float32, bfloat16 and float16. Convert it first.")
    return code


@functools.cache
def radices_address(radices: tuple[int, ...]) -> int:
    """Return the address of the radices for the C ABI, valid for the life of the process; raises as radices_array."""
    return ctypes.addressof(radices_array(radices))


@functools.cache
def radices_array(radices: tuple[int, ...]) -> ctypes.Array[ctypes.c_int64]:
    """Return radices as an array for the C ABI.

    Raises:
        NumericsError: a radix below 1, too many radices or too many leaves.
    """
    if any(radix < 1 for radix in radices) or len(radices) > _MOST_RADICES or math.prod(radices) > _MOST_LEAVES:
        raise NumericsError(
            f"radices {radices}: at most {_MOST_RADICES} are allowed, each at least 1, with a product of at most"
            f" {_MOST_LEAVES}. Take them from Numerics.radices."
        )
    return (ctypes.c_int64 * len(radices))(*radices)


def _faults(name: str) -> int:
    return tile_faults() if name == _TILES else pair_faults() if name == _PAIRS else 0


@functools.cache
def _cpu_flags() -> set[str]:
    """Return what Linux calls flags of an x86 CPU, and features of an ARM one."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(errors="replace").splitlines() if cpuinfo.exists() else []
    return set(next((line for line in lines if line.startswith(("flags", "Features"))), "").split())


@functools.cache
def _tiles_permitted() -> bool:
    """Return True if Linux permits AMX tiles for this process; since 5.16 it requires a request."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0


@functools.cache
def _default_library() -> ctypes.CDLL:
    return _library(isa())


@functools.cache
def _library(name: str) -> ctypes.CDLL:
    if name == _TILES and not _tiles_permitted():  # the first tile instruction would kill the process
        raise InvalidInput("amx: Linux does not permit AMX tiles in this process. Use the instruction set of isa().")
    path = _library_file(name)
    loaded = _load(path, name, _SERVING)
    loaded.isa = name
    _loaded[name] = path
    return loaded


@functools.cache
def _part_of(name: str, part: str) -> ctypes.CDLL:
    path = _library_file(name)
    version = f"-{_digest_of(_SOURCES / _EXACT, ' '.join(_isa_flags(name, part)))[:12]}" if part == _EXACT else ""
    return _load(path.with_name(f"{part}{version}-{path.name}"), name, part)


def _load(path: Path, name: str, part: str) -> _Kernels:
    with _BUILDING:
        if not is_intact(path):
            with stage(f"compile the CPU {f'{part} ' if part else ''}kernels for {name}"):
                build(path, _sources(part), [*_FLAGS, *_isa_flags(name, part)])
    loaded = _Kernels(str(path))
    for function, (result, arguments) in _signatures(part).items():
        getattr(loaded, function).restype = result
        getattr(loaded, function).argtypes = arguments
    return loaded


def _sources(part: str) -> list[Path]:
    """Return the sources of a library, largest first: as many are compiled at once as there are cores."""
    sources = list((_SOURCES / _EXACT if part == _EXACT else _SOURCES).glob("*.cpp"))
    if part != _EXACT:
        sources = [source for source in sources if (source.name in _TRAINING_SOURCES) == (part == _TRAINING)]
    return sorted(sources, key=lambda source: (-source.stat().st_size, source.name))


def _probe(name: str, source: str) -> ctypes.CDLL:
    """Return a library with the probe in ``source``: the kernels' library if it is built, else the probe alone.

    isa() needs the probe before the kernels are built; building them takes seconds, which capture can overlap.
    """
    if is_intact(_library_file(name)):
        return library(name)
    path = cache_folder("cpu") / f"probe-{_library_file(name).name}"
    if not is_intact(path):
        build(path, [_SOURCES / f"{source}.cpp"], [*_FLAGS, *_isa_flags(name)])
    return ctypes.CDLL(str(path))


def _isa_flags(name: str, part: str = _SERVING) -> list[str]:
    x86 = platform.machine() in ("x86_64", "AMD64")
    features = _ISA_NEEDS[name] if x86 else _cpu_flags()
    more = [flag for feature, flag in _EXACT_FLAGS.items() if part == _EXACT and feature in features]
    return [*shlex.split(_ISA_FLAGS[name] if x86 else ""), *more]


def _library_file(name: str) -> Path:
    if name in _adopted:
        return _adopted[name]
    key = hashlib.sha256(f"{source_digest()} {name} {config.cxx_compiler()} {compiler_version()}".encode()).hexdigest()
    return cache_folder("cpu") / f"{name}-{key[:24]}.so"
