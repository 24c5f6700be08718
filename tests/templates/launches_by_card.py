"""Compile every Triton kernel for NVIDIA GPUs that this machine does not have, and print the result as JSON.

The operations' GPU code runs on fake CUDA tensors of a model's sizes. Triton gets a driver without a device: a launch
specializes and compiles as on the GPU, up to ptxas, and stops there. An operation with a gate runs under the reference
schedule, then under its candidates in the gate's order up to the first that compiles and fits into shared memory.
For families in SLOW only split schedules are tried, which have a second kernel.

With ``translate DTYPE``, Triton only translates kernels to its intermediate representation, for sm_90, with operands of
that dtype. Each operation then runs under one candidate of each kind, attention also with each option of its scores,
and in float16 each operation without each optional operand. The result is the names of the kernels and what failed.
"""

import functools
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from detcompile.templates import registration

OPERATIONS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {}  # the GPU's code and the declared operands
_define = registration.define


def _keep(schema: str, operands: dict[str, Any], **given: Any) -> None:
    OPERATIONS[schema.partition("(")[0]] = given["cuda"], operands
    _define(schema, operands, **given)


registration.define = _keep  # before the operations' modules are imported

from detcompile.templates.collectives import gather_gpu, overlapped, peer_memory  # noqa: E402
from detcompile.templates.collectives import gpu as collectives  # noqa: E402
from detcompile.templates.device import gate, launcher  # noqa: E402
from detcompile.templates.tokens import block_copies_gpu, gumbel, next_tokens_gpu  # noqa: E402
from detcompile.templates.training import pointwise  # noqa: E402
from tests.templates import test_directed_calls as calls  # noqa: E402

SHARED_KB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # of a program; CUDA C++ Programming Guide
SLOW = ("attention", "packed_attention_backward")  # families of kernels that take seconds to compile
MULTIPROCESSORS = {80: 108, 86: 84, 89: 142, 90: 132, 100: 148, 120: 188}


class DoesNotFit(Exception):
    """A kernel needs more shared memory than the GPU has."""


class Driver:
    """A Triton driver for a GPU that does not exist here."""

    card = 90

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.card, 32)

    def get_current_device(self) -> int:
        return self.card  # Triton keeps kernels by device

    def get_current_stream(self, device: int) -> int:
        return 0


DRIVER = Driver()
DTYPE = torch.bfloat16
shared_bytes: dict[str, int] = {}  # for this GPU, the least of each launch
failures: list[str] = []


def kernel_name(kernel: JITFunction) -> str:
    return f"{kernel.__module__.removeprefix('detcompile.templates.')}.{kernel.__name__}"


def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
    kernel = _run(self, *args, grid=grid, warmup=True, **named)
    name = kernel_name(self)
    shared_bytes[name] = min(shared_bytes.get(name, kernel.metadata.shared), kernel.metadata.shared)
    if kernel.metadata.shared > SHARED_KB[DRIVER.card] << 10:
        raise DoesNotFit(f"{name} takes {kernel.metadata.shared} bytes of shared memory")


_run, tensor = JITFunction.run, torch.tensor


class Translated(Exception):
    """A kernel has its intermediate representation."""


def translate(self: JITFunction, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
    shared_bytes[kernel_name(self)] = 0
    with suppress(Translated):
        _run(self, *args, grid=grid, warmup=True, **named)


def stop_after(make_ir: Callable[..., Any]) -> Callable[..., Any]:
    def made(source: Any, *args: Any) -> None:
        make_ir(source, *args)
        raise Translated

    return made


def part(x: torch.Tensor, index: Any) -> torch.Tensor:
    """Return x[index]; torch's indexing needs the GPU."""
    indices, dim = index if isinstance(index, tuple) else (index,), 0
    if Ellipsis in indices:
        at = indices.index(Ellipsis)
        left = x.dim() - sum(one is not None for one in indices) + 1
        indices = (*indices[:at], *[slice(None)] * left, *indices[at + 1 :])
    for one in indices:
        if one is None:
            x = x.unsqueeze(dim)
        elif isinstance(one, torch.Tensor):
            return torch.ops.aten.index.Tensor(x, [None] * dim + [one])
        elif isinstance(one, int):
            x, dim = x.select(dim, one), dim - 1
        else:
            x = torch.ops.aten.slice.Tensor(x, dim, one.start, one.stop, one.step or 1)
        dim += 1
    return x


@contextmanager
def card(number: int) -> Iterator[None]:
    """Make torch and Triton see a GPU of compute capability number / 10."""
    DRIVER.card = number
    shared_bytes.clear()
    properties = SimpleNamespace(multi_processor_count=MULTIPROCESSORS[number])
    for module in [module for name, module in sys.modules.items() if name.startswith("detcompile.templates")]:
        for value in list(vars(module).values()):
            getattr(value, "cache_clear", lambda: None)()
    with (
        mock.patch.object(torch.cuda, "get_device_capability", lambda *_: divmod(number, 10)),
        mock.patch.object(torch.cuda, "get_device_properties", lambda *_: properties),
        mock.patch.object(FakeTensor, "__getitem__", part, create=True),
        mock.patch.object(FakeTensor, "__setitem__", lambda *_: None, create=True),
        mock.patch.object(
            FakeTensor,
            "contiguous",
            lambda t: t if t.is_contiguous() else t.clone(memory_format=torch.contiguous_format),
            create=True,
        ),
        mock.patch.object(torch, "tensor", lambda *a, device="cuda:0", **k: tensor(*a, device="cpu", **k).to(device)),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False),
        mock.patch.object(FakeTensor, "data_ptr", lambda t: t.storage_offset() * t.element_size(), create=True),
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(
            launcher._Launcher,
            "_launch",
            lambda it, grid, args, named: it._kernel.run(*args, grid=grid, warmup=True, **named),
        ),
        FakeTensorMode(),
        torch.device("cuda:0"),
    ):
        yield


def launch(case: Callable[[], Any], name: str, result: dict[str, Any], every_kind: bool) -> None:
    """Run a case under the reference schedules, then under the candidates up to the first that runs, or of every kind.

    Gates inside the first gate's schedules use their references. The reference of exact products is the host, which
    launches nothing: their candidate takes its place.
    """
    offered: dict[str, list[Any]] = {}  # by family, the reference first

    def reference(family: Any, problem: Any) -> Any:
        return family.reference(problem) or family.candidates(problem)[0]

    def choose(number: int) -> Callable[..., Any]:
        def schedule(self: Any, problem: Any, device: Any) -> Any:
            known = offered.setdefault(self.family, [reference(self, problem), *self.candidates(problem)])
            return known[number] if next(iter(offered)) == self.family else reference(self, problem)

        return schedule

    try:
        with mock.patch.object(gate.Gate, "schedule", choose(0)):
            case()
    except Exception as error:  # compilers raise anything
        failures.append(f"sm_{DRIVER.card} {name}: {type(error).__name__}: {str(error)[:300]}")
    for family, (_, *candidates) in list(offered.items())[:1]:
        problem = f"{family}: {name}"
        result["candidates"][problem], result["first"][problem] = [str(one) for one in candidates], None
        kinds: set[tuple[str, ...]] = set()
        for number, candidate in enumerate(candidates, 1):
            kind = tuple(re.findall("[a-z_]{3,}", str(candidate)))  # its name without numbers
            if kind in kinds if every_kind else family in SLOW and not getattr(candidate, "split", False):
                continue
            kinds.add(kind)
            try:
                with mock.patch.object(gate.Gate, "schedule", choose(number)):
                    case()
            except Exception as error:
                result["refused"].append(f"{problem}, {candidate}: {type(error).__name__}: {str(error)[:200]}")
                continue
            result["first"][problem] = result["first"][problem] or str(candidate)
            if not every_kind:
                break


def operation(name: str, make: Callable[..., Any], sizes: dict[str, int], changes: dict[str, Any]) -> None:
    """Call an operation's GPU code with operands of DTYPE; a tuple among the changes is an operand's shape."""
    cuda, operands = OPERATIONS[name]
    plain = make(**sizes)
    given = plain | changes
    for operand, value in given.items():
        if isinstance(value, tuple):
            given[operand] = zeros(*value, dtype=plain[operand].dtype)
        if isinstance(value, torch.dtype):
            given[operand] = DTYPE
    for operand, value in given.items():
        if (
            isinstance(value, torch.Tensor)
            and value.dtype is torch.float32
            and "float32" not in operands.get(operand, "")
        ):
            given[operand] = value.to(DTYPE)
    cuda(*(given.get(argument.name, argument.default_value) for argument in arguments_of(name)))


def arguments_of(name: str) -> list[Any]:
    arguments: list[Any] = getattr(torch.ops.detcompile, name).default._schema.arguments
    return arguments


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device="cuda:0")


def copied_blocks() -> None:
    block_copies_gpu.copy_blocks_cuda(zeros(4, 64, 16, 8, 128, dtype=torch.bfloat16), zeros(3, 4, dtype=torch.int64))


def sampled_tokens() -> None:
    gumbel.gumbel_argmax_cuda(zeros(4, 32768), zeros(4, 5, dtype=torch.int64))
    next_tokens_gpu.likeliest_cuda(zeros(4, 32768, dtype=torch.bfloat16))
    next_tokens_gpu.fill_pending_cuda(*(zeros(64, dtype=torch.int64) for _ in range(3)))


def training_step() -> None:
    step = pointwise.AdamWStep(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=2)
    pointwise.adamw_cuda(*(zeros(4096) for _ in range(4)), zeros(4096, dtype=torch.bfloat16), step)
    pointwise.rounded_gradient_cuda(zeros(4096, dtype=torch.float64))


def collective() -> None:
    boxes, ids = tuple(zeros(1 << 20) for _ in range(2)), zeros(64, dtype=torch.int64)
    flags, epochs = zeros(1 << 16, dtype=torch.int32), zeros(256, dtype=torch.int32)
    memory = peer_memory.PeerMemory(rank=0, boxes=boxes, flags=flags, flag_addresses=ids[:2], epochs=epochs)
    sizes = 64, 4096
    reduction = collectives.Reduction(
        zeros(*sizes), None, zeros(*sizes, dtype=torch.bfloat16), (2,), zeros(*sizes, dtype=torch.bfloat16)
    )
    for two_shot in (False, True):
        collectives.reduce_over_peers(memory, reduction, two_shot)
    landing = peer_memory.Landing(partials=(zeros(2, 1 << 20),) * 2, sums=boxes)
    overlapped._gather(memory, landing, reduction, 32 * 4096)
    gather_gpu.columns_over_peers(memory, zeros(*sizes, dtype=torch.bfloat16), 8192)
    gather_gpu.rows_over_peers(memory, zeros(*sizes, dtype=torch.bfloat16), ids)


ROWS = {"M": 64, "R": 4096}
ATTENTION = {"Hq": 32, "Hkv": 8, "D": 128, "Dv": 128}
PAGED = ATTENTION | {"T": 64, "blocks": 64, "size": 16}
EXACT_PAGED = {key: value for key, value in PAGED.items() if key != "Dv"}
PRODUCT = {"M": 64, "N": 4096, "K": 4096}
RECURRENT = {"T": 64, "C": 1024}
BY_128 = {"radices": [2, 2], "group": 128, "rows": 1, "scales": (32, 4096), "zeros": None}  # int4_decode.py's
PLAIN_SCORES = {"softcap": 0.0, "sinks": None, "alibi_slopes": None, "relative_bias": None}  # as for Hopper's kernels
CASES: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("matmul", PRODUCT, {"radices": []}),
    ("matmul", PRODUCT | {"M": 1024}, {"radices": [], "bias": None, "residual": None}),
    ("matmul", PRODUCT | {"M": 4}, {"radices": []}),
    ("matmul", PRODUCT | {"M": 4}, {"radices": [2, 2]}),
    ("matmul", PRODUCT | {"M": 4}, {"radices": [2, 2, 2, 2, 2]}),
    ("batched_matmul", {"B": 2, "M": 64, "N": 64, "K": 128}, {}),
    ("gated_matmul", PRODUCT, {}),
    ("gated_matmul", PRODUCT | {"M": 4}, {}),
    ("silu_mul", {"M": 64, "F": 4096}, {}),
    ("rms_norm", ROWS, {}),
    ("layer_norm", ROWS, {}),
    ("row_sum", ROWS, {}),
    ("row_var_mean", ROWS, {}),
    ("softmax", ROWS, {"radices": []}),
    ("softmax", {"M": 64, "R": 32768}, {"radices": [2]}),
    ("log_softmax", ROWS, {"radices": []}),
    ("logsumexp", ROWS, {"radices": []}),
    ("embedding", {"V": 32768, "D": 4096, "T": 64}, {}),
    ("expert_matmul", {"T": 64, "C": 2, "E": 8, "N": 2048, "K": 2048}, {"radices": []}),
    ("expert_matmul", {"T": 4, "C": 2, "E": 8, "N": 2048, "K": 2048}, {"radices": []}),
    ("expert_matmul", {"T": 2048, "C": 2, "E": 8, "N": 2048, "K": 2048}, {"radices": []}),
    ("dequant_matmul", PRODUCT | {"M": 4}, {"radices": []}),
    ("dequant_matmul", PRODUCT | {"M": 4}, BY_128),
    ("dequant_matmul", PRODUCT | {"M": 1024}, {"radices": []}),
    ("paged_attention", PAGED, PLAIN_SCORES),
    ("paged_attention", PAGED | {"T": 4}, PLAIN_SCORES | {"block_table": (2, 256)}),
    ("rope_cache", PAGED | {"E": 128}, {}),
    ("packed_attention", ATTENTION | {"T": 64}, PLAIN_SCORES),
    ("packed_attention_backward", ATTENTION | {"T": 64}, PLAIN_SCORES),
    ("causal_conv", RECURRENT | {"W": 4}, {}),
    ("wkv", RECURRENT, {}),
    ("running_max", RECURRENT, {}),
    ("linear_recurrence", {"T": 64, "G": 16, "H": 16, "K": 128, "V": 128}, {}),
    ("token_logprobs", {"M": 64, "V": 32768}, {}),
    ("token_logprobs_backward", {"M": 64, "V": 32768}, {}),
    ("rms_norm_backward", ROWS, {}),
    ("layer_norm_backward", ROWS, {}),
    ("softmax_backward", ROWS, {}),
    ("token_matmul", {"T": 64, "N": 1024, "K": 1024}, {}),
    ("token_sum", {"T": 64, "N": 1024}, {}),
    ("token_scatter", {"T": 64, "D": 1024}, {}),
    ("exact_divide", ROWS, {}),
    ("exact_expert_linear", {"T": 64, "C": 2, "E": 8, "N": 2048, "K": 2048}, {}),
    ("exact_function", ROWS, {}),
    ("exact_sum", ROWS, {}),
    ("exact_softmax", {"M": 64, "V": 64}, {}),
    ("exact_rms_norm", ROWS, {}),
    ("exact_layer_norm", ROWS, {}),
    ("exact_quantize", ROWS, {}),
    ("exact_linear", PRODUCT, {}),
    ("exact_linear", PRODUCT | {"M": 4}, {}),
    ("exact_fused_linear", PRODUCT, {}),
    ("exact_paged_attention", EXACT_PAGED, {}),
    ("exact_paged_attention", EXACT_PAGED | {"T": 4, "size": 64}, {}),
    ("exact_rotated_attention", EXACT_PAGED | {"E": 128}, {}),
    ("exact_dense_attention", {"B": 2, "T": 64, "Hq": 32, "Hkv": 8, "D": 128}, {}),
]  # fmt: skip


OPTIONS: list[dict[str, Any]] = [  # of attention's scores: all, each alone, and windows
    {},
    *({name: value for name, value in PLAIN_SCORES.items() if name != option} for option in PLAIN_SCORES),
    *(PLAIN_SCORES | {window: 32} for window in ("sliding_window", "attention_chunk")),
]


def run_cases(cases: list[tuple[str, dict[str, int], dict[str, Any]]], every_kind: bool = False) -> dict[str, Any]:
    """Run cases on the GPU that torch and Triton see."""
    result: dict[str, Any] = {"candidates": {}, "first": {}, "refused": []}
    for name, sizes, changes in cases:
        make = calls.softmax if name == "log_softmax" else getattr(calls, name)
        case = functools.partial(operation, name, make, sizes, changes)
        launch(case, f"{name} {sizes} {changes}", result, every_kind)
    for alone in (copied_blocks, sampled_tokens, training_step, collective):
        launch(alone, alone.__name__, result, every_kind)
    return result | {"kernels": dict(shared_bytes)}


def translated(dtype: torch.dtype) -> dict[str, Any]:
    """Translate the kernels of all cases and options."""
    global DTYPE
    DTYPE = dtype
    attention = [(name, sizes) for name, sizes, changes in CASES if changes is PLAIN_SCORES]
    cases = [*CASES, *((*one, options) for one, options in itertools.product(attention, OPTIONS))]
    if dtype is torch.float16:
        cases += [(*case[:2], case[2] | {operand: None}) for case in CASES for operand in optional_operands(case[0])]
    with (
        mock.patch.object(ASTSource, "make_ir", stop_after(ASTSource.make_ir)),
        mock.patch.object(GluonASTSource, "make_ir", stop_after(GluonASTSource.make_ir)),
        card(90),
        mock.patch.object(JITFunction, "run", translate),
    ):
        result = run_cases(cases, every_kind=True)
    return {"translated": sorted(result["kernels"]), "failures": failures + result["refused"]}


def optional_operands(name: str) -> list[str]:
    """Return the operands that may be absent; exact_rotated_attention has either both norms or none."""
    names = [argument.name for argument in arguments_of(name) if argument.type.kind() == "OptionalType"]
    norms = ("q_weight", "k_weight") if name == "exact_rotated_attention" else ()
    return [operand for operand in names if operand not in norms]


def main() -> None:
    driver.set_active(DRIVER)
    result: dict[str, Any] = {"slow": SLOW, "failures": failures, "cards": {}}
    if sys.argv[1] == "translate":
        result = translated(getattr(torch, sys.argv[2]))
    else:
        for number in map(int, sys.argv[1:]):
            with card(number):
                result["cards"][number] = run_cases(CASES)
            print(json.dumps({number: result["cards"][number], "failures": failures}), flush=True)  # for a killed run
    kernels = {
        kernel_name(value)
        for name, module in list(sys.modules.items())
        if name.startswith("detcompile.templates")
        for value in vars(module).values()
        if isinstance(value, JITFunction) and value.__name__.endswith("_kernel")
    }
    print(json.dumps(result | {"kernels": sorted(kernels)}))


if __name__ == "__main__":
    main()
