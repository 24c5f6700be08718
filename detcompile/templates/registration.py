"""define: register an operation of torch.ops.detcompile whose calls are checked against a declaration.

A declaration describes each tensor and integer argument. An integer has a range; a tensor has a line of words:

    float M K            a dtype of DTYPES, then the size of each dim; a name has one value in all operands
    x N K                the dtype of operand x
    float ... R>0        any leading dims, equal wherever `...` is used; R >= 1
    int32 S+1            S plus 1
    int64 *              any further dims, at the start or the end
    contiguous int32 S   the layout: `contiguous`, or `unit` for a last dim of stride 1

Some checks need no declaration. All tensors are on one device. Each storage is as large as its sizes and strides
require (it was not freed). A written tensor has no overlapping elements and is not another operand. The radices and the
result dtypes have kernels. The CPU kernels check values (slots, lengths, ids) before they write. On a GPU values are
not checked, because the host would have to wait.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from detcompile.errors import InvalidInput
from detcompile.templates.cpu import library as cpu_library

LIBRARY = torch.library.Library("detcompile", "FRAGMENT")

_FLOAT = frozenset(cpu_library.DTYPE_CODES)
DTYPES = {
    "float": _FLOAT,
    "floating": _FLOAT | {torch.float64},
    "float32": frozenset({torch.float32}),
    "int8": frozenset({torch.int8}),
    "int16": frozenset({torch.int16}),
    "int32": frozenset({torch.int32}),
    "int64": frozenset({torch.int64}),
    "ids": frozenset({torch.int32, torch.int64}),
    "integer": frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}),
    "quantized": frozenset({torch.uint8, torch.int8, torch.float8_e4m3fn}),
    "any": frozenset(value for value in vars(torch).values() if isinstance(value, torch.dtype)),
}
_LAYOUTS = {"contiguous": "not {0}.is_contiguous()", "unit": "shape[-1] != 1 != {0}.stride(-1)"}  # true if violated
_ARGUMENT = re.compile(r"([\w()!?\[\]]+) (\w+)(?:=[^,]*)?(?:, |$)")  # type and name in a schema
_SIZE = re.compile(r"([A-Za-z]*)([+-]?\d+)?(>0)?")


def define(
    schema: str,
    operands: Mapping[str, str | range],
    *,
    cpu: Callable[..., Any],
    cuda: Callable[..., Any],
    fake: Callable[..., Any],
    tags: Sequence[torch.Tag] = (),
) -> None:
    """Register an operation whose calls are checked.

    Args:
        schema: name, arguments and results, in torch.library's syntax.
        operands: the declaration of each tensor or integer argument, by name.
        cpu: the implementation on a CPU; like ``cuda`` it takes the schema's arguments by position.
        cuda: the implementation on a GPU.
        fake: returns empty results; sizes of its arguments may be symbolic.
        tags: tags besides pt2_compliant_tag.
    """
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    declaration = _Declaration(schema, operands)
    op, check = declaration.op, declaration.compiled()
    LIBRARY.impl(op, _behind(check, cpu), "CPU")
    LIBRARY.impl(op, _behind(check, cuda), "CUDA")
    # No comparisons for fakes: sizes may be symbolic, and a comparison would specialize them
    torch.library.register_fake(f"detcompile::{op}", _behind(declaration.require_one_device, fake), lib=LIBRARY)


def _behind(check: Callable[..., None], run: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        check(*arguments)
        return run(*arguments)

    return call


@dataclass(frozen=True, slots=True)
class _Operand:
    """Requirements on a tensor argument.

    Attributes:
        dtypes: the allowed dtypes, or the name of the operand whose dtype it must have.
        layout: a key of _LAYOUTS, or "".
        dims: the dims as declared.
        leading: "..." or "*" if leading dims may precede the sizes, else "".
        sizes: (name or "", offset, minimum) of each other dim.
        is_open: True if more dims may follow.
    """

    name: str
    dtypes: frozenset[torch.dtype] | str
    layout: str
    dims: tuple[str, ...]
    leading: str
    sizes: tuple[tuple[str, int, int], ...]
    is_open: bool

    @classmethod
    def parse(cls, name: str, text: str) -> "_Operand":
        """Parse a tensor's declaration."""
        layout, words = "", text.split()
        if words[0] in _LAYOUTS:
            layout, *words = words
        dtype, *dims = words
        leading = dims[0] if dims and dims[0] in ("...", "*") else ""
        is_open = len(dims) > 1 and dims[-1] == "*"
        parts = [_SIZE.fullmatch(dim) for dim in dims[bool(leading) : len(dims) - is_open]]
        assert all(parts), f"{name}: {text!r}"
        sizes = tuple((part[1], int(part[2] or 0), int(bool(part[3]))) for part in parts if part)
        return cls(name, DTYPES.get(dtype, dtype), layout, tuple(dims), leading, sizes, is_open)

    def compiled(self, bound: set[str]) -> tuple[list[str], list[str]]:
        """Return expressions over the operand and its `shape` that are true if it is invalid, and size assignments.

        Args:
            bound: names of sizes assigned so far; updated in place.
        """
        wrong: list[str] = []
        assigned: list[str] = []
        count = len(self.sizes)
        same = isinstance(self.dtypes, str)
        wrong.append(f"{self.name}.dtype " + (f"is not {self.dtypes}.dtype" if same else f"not in {self.name}_allowed"))
        wrong.append(f"len(shape) {'<' if self.leading or self.is_open else '!='} {count}")
        if self.leading == "...":
            part = f"shape[:{-count}]" if count else "shape"
            (wrong if "leading" in bound else assigned).append(f"leading {'!=' if 'leading' in bound else '='} {part}")
            bound.add("leading")
        for i, (size, offset, least) in enumerate(self.sizes):
            dim = f"shape[{i - count if self.leading else i}]"
            if offset + least > 0:
                wrong.append(f"{dim} < {offset + least}")
            if not size or size in bound:
                wrong.append(f"{dim} != {size or 0} + {offset}")
            else:
                assigned.append(f"{size} = {dim} - {offset}")
                bound.add(size)
        if self.layout:
            wrong.append(_LAYOUTS[self.layout].format(self.name))
        return wrong, assigned

    def described(self, known: Mapping[str, Any]) -> str:
        """Describe the required tensor, for an error message."""
        dtypes = [known[self.dtypes].dtype] if isinstance(self.dtypes, str) else sorted(self.dtypes, key=str)
        dtype = "of any dtype" if self.dtypes is DTYPES["any"] else " or ".join(map(str, dtypes))
        layout = {"contiguous": "contiguous ", "unit": "of unit last stride, "}.get(self.layout, "")
        sizes = [f"{name} = {known[name]}" for name in dict.fromkeys(name for name, *_ in self.sizes) if name in known]
        return f"{layout}{dtype} [{', '.join(self.dims)}]" + (f" with {', '.join(sizes)}" if sizes else "")


class _Declaration:
    """The declared arguments of an operation."""

    def __init__(self, schema: str, operands: Mapping[str, str | range]) -> None:
        self.op, _, rest = schema.partition("(")
        self._kinds = {name: kind for kind, name in _ARGUMENT.findall(rest.partition(") -> ")[0])}
        expected = {name for name, kind in self._kinds.items() if kind.startswith("Tensor") or kind == "int"}
        assert expected == set(operands), f"{schema}: declare {expected}, not {set(operands)}"
        self._tensors = {name: _Operand.parse(name, text) for name, text in operands.items() if isinstance(text, str)}
        self._ranges = {name: allowed for name, allowed in operands.items() if isinstance(allowed, range)}

    def compiled(self) -> Callable[..., None]:
        """Return a function of the arguments that raises InvalidInput if they violate the declaration.

        It is generated code: interpreting the declaration on every call would take longer than many kernels.
        """
        lines = [f"def check({', '.join(f'{name}=None' for name in self._kinds)}):"]  # torch omits trailing defaults
        names: dict[str, Any] = {"refuse": self._refuse, "refuse_written": self._refuse_written, "results": _FLOAT}
        names |= {"lacks_memory": _lacks_memory, "shares_memory": _shares_memory}
        names["check_radices"] = cpu_library.radices_array
        names |= {f"{name}_allowed": allowed for name, allowed in self._ranges.items()}
        names |= {f"{name}_allowed": operand.dtypes for name, operand in self._tensors.items()}
        bound: set[str] = set()
        for name, kind in self._kinds.items():
            if name in self._tensors:
                lines += self._compiled_tensor(name, set(bound) if "?" in kind else bound)
            elif name in self._ranges:
                lines.append(f" if {name} is not None and {name} not in {name}_allowed: refuse({name!r}, locals())")
            elif kind.startswith("ScalarType"):
                lines.append(f" if {name} is not None and {name} not in results: refuse({name!r}, locals())")
            elif kind == "int[]":
                lines.append(f" if {name}: check_radices(tuple({name}))")
        required = [name for name in self._tensors if "?" not in self._kinds[name]]
        for name in (name for name, kind in self._kinds.items() if "!" in kind):
            others = "".join(f"{other}.data_ptr(), " for other in required if other != name)
            again = f"(start := {name}.data_ptr()) and start in ({others})"
            lines.append(f" if shares_memory({name}) or {again}: refuse_written({name!r}, locals())")
        exec("\n".join(lines), names)
        check: Callable[..., None] = names["check"]
        return check

    def _compiled_tensor(self, name: str, bound: set[str]) -> list[str]:
        wrong, assigned = self._tensors[name].compiled(bound)
        first = next(iter(self._tensors))
        wrong.append(f"{name}.device != {first}.device" if name != first else "False")
        return [
            f" if {name} is not None:",
            f"  shape = {name}.shape",
            f"  if {' or '.join(wrong)} or lacks_memory({name}): refuse({name!r}, locals())",
            *(f"  {line}" for line in assigned),
        ]

    def require_one_device(self, *arguments: Any) -> None:
        """Raise InvalidInput unless all tensors are on one device."""
        tensors = {name: value for name, value in zip(self._kinds, arguments) if isinstance(value, Tensor)}
        if len({tensor.device for tensor in tensors.values()}) > 1:
            places = ", ".join(f"{name} on {tensor.device}" for name, tensor in tensors.items())
            raise InvalidInput(f"detcompile::{self.op}: {places}. Move them to one device.")

    def _refuse(self, name: str, known: Mapping[str, Any]) -> NoReturn:
        """Raise the error for an invalid argument; ``known`` has the arguments and the sizes bound so far."""
        value, where = known[name], f"detcompile::{self.op}: {name}"
        if name in self._ranges:
            allowed = self._ranges[name]
            steps = f"a multiple of {allowed.step} " if allowed.step > 1 else ""
            raise InvalidInput(f"{where} = {value} must be {steps}from {allowed[0]} to {allowed[-1]}.")
        if not isinstance(value, Tensor):
            raise InvalidInput(f"{where} = {value}: results are float32, bfloat16 or float16. Convert them afterwards.")
        self.require_one_device(*(known[argument] for argument in self._kinds))
        if _lacks_memory(value):
            held = value.untyped_storage().nbytes()
            raise InvalidInput(
                f"{where} {tuple(value.shape)} has a storage of only {held} bytes: it was freed or resized. Allocate it"
                " again."
            )
        raise InvalidInput(
            f"{where} is {value.dtype} {tuple(value.shape)} of strides {value.stride()}; it must be "
            f"{self._tensors[name].described(known)}. Convert or reshape it."
        )

    def _refuse_written(self, name: str, known: Mapping[str, Any]) -> NoReturn:
        others = [other for other in self._tensors if known[other] is not None and other != name]
        same = [other for other in others if known[other].data_ptr() == known[name].data_ptr()]
        fault = f"has the memory of {same[0]}" if same else "has elements that share memory"
        raise InvalidInput(f"detcompile::{self.op}: output {name} {fault}. Pass a copy.")


def _lacks_memory(tensor: Tensor) -> bool:
    """Return True if the tensor's storage is smaller than its sizes and strides require."""
    if tensor.is_contiguous():
        size = tensor.nbytes
    else:
        size = (1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))) * tensor.itemsize
    return size > 0 and tensor.untyped_storage().nbytes() < size + tensor.storage_offset() * tensor.itemsize


def _shares_memory(tensor: Tensor) -> bool:
    """Return True if elements may overlap: some stride is not larger than the span of all smaller strides."""
    if tensor.is_contiguous():
        return False
    reach = 1
    for stride, n in sorted((stride, n) for stride, n in zip(tensor.stride(), tensor.shape) if n > 1):
        if stride < reach:
            return True
        reach += (n - 1) * stride
    return False
