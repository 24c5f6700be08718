"""The reference's operations, computed by the C++ kernels of detcompile/templates/cpu/exact.

`Emulated` runs them in a separate program, built for any machine, through driver.cpp; `Native` in this process.
"""

import ctypes
import re
import shlex
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from detcompile.templates.cpu import library
from detcompile.templates.exact.attention import _factor
from detcompile.templates.exact.rows import FUNCTIONS, TOP
from tests.exact.definition import Array, F

DRIVER = Path(__file__).with_name("driver.cpp")
SOURCES = [*sorted(Path(library.__file__).with_name("exact").glob("*.cpp")), DRIVER]
_PROTOTYPE = re.compile(r"^EXPORT void (\w+)\(([^)]*)\)", re.MULTILINE)
PROTOTYPES = [match for source in SOURCES for match in _PROTOTYPE.findall(source.read_text())]
NUMBERS = {"int64_t": ctypes.c_int64, "int32_t": ctypes.c_int32, "float": ctypes.c_float}


def build(folder: Path, compiler: str, flags: str) -> Path:
    """Compile the kernels and the driver with the product's flags and these, and return the program."""
    lines = ["#include <cstdint>", '#define EXPORT extern "C"']
    lines += [f"EXPORT void {name}({arguments});" for name, arguments in PROTOTYPES]
    lines += ["#define KERNELS " + " ".join(f"KERNEL({name})" for name, _ in PROTOTYPES)]
    (folder / "declarations.h").write_text("\n".join(lines) + "\n")
    program = folder / "driver"
    command = [*shlex.split(compiler), *library._FLAGS, *shlex.split(flags), "-static", f"-I{folder}"]
    subprocess.run([*command, *map(str, SOURCES), "-o", str(program)], check=True)
    return program


class Machine(ABC):
    """The operations, each by a call of a kernel."""

    @abstractmethod
    def call(self, name: str, *arguments: Any) -> None:
        """Call a kernel; arrays that are not const are written."""

    def add(self, x: Array, y: Array) -> Array:
        return x + y

    def multiply(self, x: Array, y: Array) -> Array:
        return x * y

    def function(self, name: str, x: Array) -> Array:
        out = np.empty_like(x)
        self.call("detcompile_exact_function", x, out, x.size, FUNCTIONS.index(name), 1)
        return out

    def silu(self, x: Array) -> Array:
        return self.function("silu", x)

    def bf16(self, x: Array) -> Array:
        return self.function("bf16", x)

    def divide(self, x: Array, y: Array) -> Array:
        out = np.empty_like(x)
        self.call("detcompile_exact_divide", x, y, out, x.size, 1)
        return out

    def row_sum(self, x: Array) -> Array:
        out = np.empty(len(x), F)
        self.call("detcompile_exact_sum", x, out, *x.shape, 1)
        return out

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        x = np.ascontiguousarray(x)
        out, R = np.empty_like(x), x.shape[-1]
        self.call("detcompile_exact_rms_norm", x, weight, out, eps, x.size // R, R, 1)
        return out

    def layer_norm(self, x: Array, weight: Array, bias: Array, eps: float) -> Array:
        out, R = np.empty_like(x), x.shape[-1]
        self.call("detcompile_exact_layer_norm", x, weight, bias, out, eps, x.size // R, R, 1)
        return out

    def quantize(self, x: Array, digits: int, right: bool) -> tuple[Array, Array]:
        x = np.ascontiguousarray(x)
        planes, scale, R = np.empty((digits, *x.shape), np.int8), np.empty(x.shape[:-1], F), x.shape[-1]
        unit = TOP[1] if right else TOP[digits]
        self.call("detcompile_exact_quantize", x, planes, scale, unit, digits, x.size // R, R, 1)
        return planes, scale

    def linear(self, x: Array, digits: int, w: Array, w_scale: Array, bias: Array | None = None) -> Array:
        M, (D, N, K) = len(x), w.shape
        out = np.empty((M, N), F)
        x = np.ascontiguousarray(x)
        self.call("detcompile_exact_linear", x, w, w_scale, bias, out, None, None, M, N, K, digits, D, 1)
        return out

    def rope(self, x: Array, cos: Array, sin: Array) -> Array:
        a, b = np.split(x, 2, axis=-1)
        c, s = cos[:, None], sin[:, None]
        first = self.add(self.multiply(a, c), -self.multiply(b, s))
        return np.concatenate([first, self.add(self.multiply(b, c), self.multiply(a, s))], -1)

    def attention(
        self,
        q: Array,
        q_scale: Array,
        k: Array,
        k_scale: Array,
        v: Array,
        v_scale: Array,
        positions: Array,
        scale: float = 0.0,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Array | None = None,
        slopes: Array | None = None,
        chunk: int = 0,
    ) -> Array:
        """Attend over one page of keys; the queries are those of the last tokens."""
        (_, T, H, dim), (digits, S, G, width) = q.shape, v.shape
        assert positions.tolist() == list(range(S - T, S))
        caches = [
            np.concatenate([*planes, unit[..., None].view(np.int8)], -1)
            for planes, unit in ((k, k_scale), (v, v_scale))
        ]
        strides = np.array([stride for cache in caches for stride in (cache.nbytes, *cache.strides[:2])], np.int64)
        out = np.empty((T, H, width), F)
        sizes = np.array([T, 1, H, G, dim, width, digits, S, 1, 1, window, chunk], np.int64)
        self.call(
            "detcompile_exact_attention", q, q_scale, *caches, strides, np.array([0, T], np.int32),
            np.array([S], np.int32), np.zeros(1, np.int32), sinks, slopes, out, sizes,
            _factor(dim, scale, softcap > 0), softcap,
        )  # fmt: skip
        return out


class Native(Machine):
    """The operations of an instruction set of this machine; sums and products of elements are numpy's."""

    def __init__(self, isa: str) -> None:
        self._library = library.library(isa)

    def call(self, name: str, *arguments: Any) -> None:
        getattr(self._library, name)(
            *(value.ctypes.data if isinstance(value, np.ndarray) else value for value in arguments)
        )


class Emulated(Machine):
    """The operations in a process that runs a program of `build`."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._kernels = {name: (i, arguments.split(",")) for i, (name, arguments) in enumerate(PROTOTYPES)}

    def close(self) -> int:
        """End the process and return its status."""
        self._process.communicate()
        return self._process.returncode

    def call(self, name: str, *arguments: Any) -> None:
        index, prototype = self._kernels[name]
        assert len(arguments) == len(prototype), name
        message, written = [ctypes.c_int64(index)], []
        for declared, value in zip(prototype, arguments):
            kind = declared.strip().rpartition(" ")[0]
            if kind in NUMBERS:
                message.append(NUMBERS[kind](value))
                continue
            assert value is None or value.flags.c_contiguous, declared
            message.append(ctypes.c_int64(-1 if value is None else value.nbytes))
            if value is not None:
                message.append(value.tobytes())
                if not kind.startswith("const"):
                    written.append(value)
        pipe, answers = self._process.stdin, self._process.stdout
        assert pipe is not None and answers is not None
        pipe.write(b"".join(bytes(part) for part in message))
        pipe.flush()
        for array in written:
            array.reshape(-1).view(np.uint8)[:] = np.frombuffer(answers.read(array.nbytes), np.uint8)

    def add(self, x: Array, y: Array) -> Array:
        return self._elementwise("elementwise_add", x, y)

    def multiply(self, x: Array, y: Array) -> Array:
        return self._elementwise("elementwise_multiply", x, y)

    def _elementwise(self, name: str, x: Array, y: Array) -> Array:
        x, y = (np.ascontiguousarray(each) for each in np.broadcast_arrays(x, y))
        out = np.empty_like(x)
        self.call(name, x, y, out, x.size)
        return out
