"""torch.ops.detcompile_direct: CPU operations that are called without Python.

A call through Python takes longer than many kernels take for one token (docs/log/kernels.md). cpu/direct/ops.cpp is
compiled against the installed torch on first use. It calls the same kernels as cpu_library. Calls that are not plain go
to the operation's usual implementation, so bits and exceptions are the same.
"""

import ctypes
import functools
import hashlib
import threading
import warnings
from pathlib import Path

import torch

import detcompile.templates.ops  # noqa: F401 (registers torch.ops.detcompile)
from detcompile import config
from detcompile.errors import CompilerNotFound, StorageError
from detcompile.storage import cache_folder
from detcompile.templates.cpu import library as cpu_library
from detcompile.templates.cpu.shared_objects import build, compiler_version, is_intact
from detcompile.torch_internals.operators import OpOverload, schema_of

_BUILDING = threading.Lock()
_LIBRARY = torch.library.Library("detcompile_direct", "DEF")

RECORD_KERNEL = "record_kernel(int function, Tensor[] tensors, int[] arguments) -> ()"
OPS = ("matmul", "rms_norm", "layer_norm", "paged_attention")  # struct Kernels of ops.cpp

_SOURCES = Path(__file__).parent / "cpu"
_TORCH = Path(torch.__file__).parent
_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", f"-I{_TORCH / 'include'}")
# A statically linked libstdc++ must not clash with torch's: docs/export.md, "A crash and its cause"
_LIBRARIES = (f"-L{_TORCH / 'lib'}", "-ltorch_cpu", "-lc10", "-Wl,--exclude-libs,ALL")


@functools.cache
def direct_ops() -> dict[OpOverload, OpOverload]:
    """Map operations of torch.ops.detcompile to their direct versions.

    Empty, with a warning, if they cannot be compiled; the operations are then called through Python.
    """
    if direct_library() is None:
        return {}
    _LIBRARY.define(RECORD_KERNEL)
    return {_overload("detcompile", name): _define(name) for name in OPS}


@functools.cache
def direct_library() -> ctypes.CDLL | None:
    """Load the direct operations; return None, with a warning, if they cannot be compiled.

    A process loads them once: a second copy, from another cache folder, would replace the operations of the first.
    """
    try:
        loaded = ctypes.CDLL(str(build_direct_ops()))
    except (CompilerNotFound, StorageError, OSError) as error:
        warnings.warn(f"CPU operations are called through Python, which is slower: {error}", stacklevel=3)
        return None
    kernels = (getattr(cpu_library.library(), f"detcompile_{name}") for name in OPS)
    addresses = [ctypes.cast(kernel, ctypes.c_void_p) for kernel in kernels]
    loaded.detcompile_bind((ctypes.c_void_p * len(OPS))(*addresses))
    return loaded


def build_direct_ops() -> Path:
    """Compile the direct operations unless they are cached, and return the shared object.

    Raises:
        CompilerNotFound, StorageError: as shared_objects.build.
    """
    names = (str(torch.__version__), str(torch.version.git_version), config.cxx_compiler(), compiler_version(), *_FLAGS)
    digest = hashlib.sha256(" ".join((*names, *_LIBRARIES)).encode())
    source = _SOURCES / "direct" / "ops.cpp"
    for path in (source, _SOURCES / "kernels.h", _SOURCES / "matmul_call.h"):
        digest.update(path.read_bytes())
    path = cache_folder("cpu") / f"direct-{digest.hexdigest()[:24]}.so"
    with _BUILDING:
        if not is_intact(path):
            build(path, [source], _FLAGS, _LIBRARIES)
    return path


def _define(name: str) -> OpOverload:
    original = _overload("detcompile", name)
    schema = str(schema_of(original)).removeprefix("detcompile::")
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(f"detcompile_direct::{name}", original, lib=_LIBRARY)
    return _overload("detcompile_direct", name)


def _overload(namespace: str, name: str) -> OpOverload:
    overload: OpOverload = getattr(getattr(torch.ops, namespace), name).default
    return overload
