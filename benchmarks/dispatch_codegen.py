"""What Inductor generates for the variants of dispatch_variants.py, on a machine without a GPU.

    python -m benchmarks.dispatch_codegen

The CUDA queries that code generation makes are answered as an H200 would; kernels are generated, never run or timed.
It serves the torch versions for which no GPU machine is at hand.
"""

import json
import unittest.mock as mock

import torch
import triton
from torch._dynamo.source import ConstantSource
from torch._inductor import config
from torch._inductor.codegen.multi_kernel import MultiKernelCall
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.scheduler import Scheduler
from torch._inductor.select_algorithm import AlgorithmSelectorCache
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from triton.backends.compiler import GPUTarget

from benchmarks.dispatch import describe, first_line
from benchmarks.dispatch_variants import PROGRAMS

__all__ = ["main"]

GENERATED = (
    "a_template_16",
    "b_size_hints",
    "c_range_dispatch",
    "d_branching_kernel",
    "f_own_op_fused",
    "f_own_op_unfused",
    "g_cond_over_templates",
)
KINDS = (("unbacked", False), ("unbacked", True), ("unbacked, hinted", False), ("backed", False))
H200 = DeviceProperties(
    type="cuda", index=0, multi_processor_count=132, cc=90, major=9, regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, warp_size=32,
)  # fmt: skip


class Driver:
    """Triton's driver for a GPU that is not there."""

    class utils:
        """Device properties, as Triton names them."""

        @staticmethod
        def get_device_properties(device):
            return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32, "max_num_regs": 65536}

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0

    def get_active_torch_device(self):
        return torch.device("cuda", 0)

    def is_active(self):
        return True


def fake_choices(choices, *arguments, **keywords):
    """Timings that make another choice win at each call, as a per-range benchmark may."""
    fake_choices.calls += 1
    templates = [choice for choice in choices if getattr(choice, "gm", True) is not None]
    order = {choice: (i + fake_choices.calls) % len(templates) + 1.0 for i, choice in enumerate(templates)}
    return {choice: order.get(choice, 1e3) for choice in choices}


fake_choices.calls = 0


def patches():
    """Answers to every question that code generation asks the device."""
    properties = mock.Mock(
        multi_processor_count=132, major=9, minor=0, total_memory=1 << 37, gcnArchName="", warp_size=32,
        regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
        shared_memory_per_block=49152, shared_memory_per_block_optin=232448,
    )  # fmt: skip
    properties.name = "H200"
    return [
        mock.patch.object(DeviceProperties, "create", classmethod(lambda cls, device: H200)),
        mock.patch("torch.cuda.is_available", lambda: True),
        mock.patch("torch.cuda.get_rng_state", torch.get_rng_state),
        mock.patch("torch.cuda.set_rng_state", lambda *state: None),
        mock.patch("torch.cuda.current_device", lambda: 0),
        mock.patch("torch.cuda.device_count", lambda: 1),
        mock.patch("torch.cuda.get_device_capability", lambda *device: (9, 0)),
        mock.patch("torch.cuda.get_device_properties", lambda *device: properties),
        mock.patch.object(Scheduler, "compile_kernel", lambda *a, **k: (None, mock.Mock())),
        mock.patch.object(Scheduler, "benchmark_codegened_module", lambda *a, **k: (1.0, "")),
        mock.patch.object(Scheduler, "benchmark_fused_nodes", lambda *a, **k: (1.0, "")),
        mock.patch.object(AlgorithmSelectorCache, "make_benchmark_fn", lambda *a, **k: fake_choices),
        mock.patch.object(AlgorithmSelectorCache, "make_precompile_fn", lambda *a, **k: lambda: {}),
        mock.patch.object(MultiKernelCall, "record_choice", staticmethod(lambda *a: None)),
    ]


def make_tokens(shape_env, kind):
    """The token count as a graph input's size: unbacked (with or without a hint) or backed."""
    if kind == "backed":
        symbol = shape_env.create_symbol(64, source=ConstantSource("T"), dynamic_dim=DimDynamic.DYNAMIC)
        return shape_env.create_symintnode(symbol, hint=64)
    tokens = shape_env.create_unbacked_symint()
    # The symbol belongs to an input, so no operation of the graph has to bind it.
    shape_env.pending_fresh_unbacked_symbols.clear()
    torch._check(tokens >= 1)
    if kind == "unbacked, hinted":
        shape_env.var_to_hint_override[tokens.node.expr] = 64
    return tokens


def generate(name, kind):
    """The wrapper source of one variant."""
    shape_env = ShapeEnv()
    fake_mode = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)
    with fake_mode:
        tokens = make_tokens(shape_env, kind)
        x, w, residual = (
            torch.empty(*size, device="cuda", dtype=torch.bfloat16)
            for size in ((tokens, 4096), (4096, 4096), (tokens, 4096))
        )
        arguments = [x, w.t(), residual]
        traced = make_fx(PROGRAMS[name], decomposition_table=select_decomp_table(), tracing_mode="real")(*arguments)
    graph = GraphLowering(traced, example_inputs=arguments, shape_env=shape_env)
    with V.set_graph_handler(graph), V.set_fake_mode(fake_mode), DebugContext(), V.set_real_inputs(arguments):
        graph.run(*arguments)
        code = graph.codegen()[0]
    return getattr(code, "value", code)


def main():
    """Print one JSON object: what each variant generates under this torch."""
    for patch in patches():
        patch.start()
    triton.runtime.driver.set_active(Driver())
    report = {"torch": torch.__version__}
    options = {"emulate_precision_casts": True, "compile_threads": 1}
    with config.patch(options):
        for tokens, aggressive in KINDS:
            config.aggressive_fusion = aggressive
            results = report[f"{tokens}, aggressive_fusion={aggressive}"] = {}
            for name in GENERATED:
                try:
                    results[name] = describe(generate(name, tokens))
                except Exception as error:  # an option that does not generate is an answer
                    results[name] = {"error": first_line(error)}
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
