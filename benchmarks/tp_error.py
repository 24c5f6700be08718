"""Compare errors under tensor parallelism, against float64: our tree of fp32 sums, and plain torch's all_reduce.

    python -m benchmarks.tp_error --commit $(git rev-parse --short HEAD) [--sizes 2,4]

On CPUs over gloo. A row-parallel product as RowwiseParallel computes it (each rank's share rounded to the dtype, added
by the library) beside ours; then the logits of small llamas, sharded by parallelize_module along its plan beside
compile(tp=...). Inputs are normal, or have heavy tails (a hundred times wider), and so have the llama's weights.

An error is the root of the mean square of (y - exact) / max(|exact|, median |exact|). Writes
benchmarks/results/tp-error-<hardware>-<commit>.json.
"""

import argparse
import json
import math
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

import detcompile
from benchmarks.cpu import cpu_name
from benchmarks.tbik import STYLES
from detcompile import Numerics
from detcompile.parallel import tensor_parallel

__all__ = ["KINDS", "Errors", "errors_of_logits", "errors_of_products"]

ours = torch.ops.detcompile
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
KINDS = ("normal", "heavy")
M, N, K = 64, 96, 2048
LLAMA = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
}


class Errors(NamedTuple):
    """The errors of one case: ours, and plain torch's."""

    ours: float
    plain: float


@torch.no_grad()
def errors_of_products(tp: int) -> dict[str, Errors]:
    """Return errors of a row-parallel product [M, K] x [K, N] over the ranks of this group, by dtype and kind."""
    ranks = tensor_parallel(tp)
    above, below = Numerics().split_radices(tp)
    share = ranks.share(K)
    errors = {}
    for dtype in DTYPES:
        for kind in KINDS:
            x, w = _draw(kind, (M, K), dtype, 1), _draw(kind, (N, K), dtype, 2)
            exact = x.double() @ w.double().t()
            tree = ours.matmul_all_reduce(x[:, share], w[:, share], None, None, below, above, ranks.group, dtype)
            plain = torch.nn.functional.linear(x[:, share], w[:, share])
            dist.all_reduce(plain)
            errors[f"{str(dtype).removeprefix('torch.')}, {kind}"] = Errors(_error(tree, exact), _error(plain, exact))
    return errors


@torch.no_grad()
def errors_of_logits(
    tp: int, draws: int = 1, dtype: torch.dtype = torch.bfloat16, num_layers: int = LLAMA["num_hidden_layers"]
) -> Errors:
    """Return errors of the logits [4, 48, V] of ``draws`` llamas with heavy tails, over the ranks of this group."""
    draws_errors = [_errors_of_a_llama(tp, draw, dtype, num_layers) for draw in range(draws)]
    return Errors(*(math.sqrt(sum(error**2 for error in errors) / draws) for errors in zip(*draws_errors)))


def _errors_of_a_llama(tp: int, draw: int, dtype: torch.dtype, num_layers: int) -> Errors:
    ids = torch.randint(0, LLAMA["vocab_size"], (4, 48), generator=torch.Generator().manual_seed(3))
    exact = _llama(draw, dtype, num_layers).double()(ids, use_cache=False).logits
    tree = detcompile.compile(_llama(draw, dtype, num_layers), tp=tp, max_context=256)(ids).logits
    plain = _llama(draw, dtype, num_layers)
    assert plain.config.base_model_tp_plan is not None
    styles = {f"model.{name}": STYLES[style]() for name, style in plain.config.base_model_tp_plan.items()}
    parallelize_module(plain, init_device_mesh("cpu", (tp,)), styles)
    return Errors(_error(tree, exact), _error(plain(ids, use_cache=False).logits, exact))


def _draw(kind: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    if kind == "heavy":
        values = values / torch.rand(shape, generator=generator).clamp_min(1e-4).sqrt()
    return values.to(dtype)


def _llama(draw: int, dtype: torch.dtype, num_layers: int) -> LlamaForCausalLM:
    model = LlamaForCausalLM(LlamaConfig(**LLAMA | {"num_hidden_layers": num_layers})).eval()
    for seed, weight in enumerate(model.parameters()):
        if weight.dim() == 2:
            weight.copy_(_draw("heavy", tuple(weight.shape), torch.float32, 100 * draw + seed) / weight.shape[1] ** 0.5)
    return model.to(dtype)


def _error(y: Tensor, exact: Tensor) -> float:
    size = exact.abs().clamp_min(exact.abs().median())
    return float(((y.double() - exact) / size).square().mean().sqrt())


def _rank(rank: int, tp: int, draws: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=tp)
    by_case = errors_of_products(tp) | {"logits, bfloat16": errors_of_logits(tp, draws)}
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps({case: errors._asdict() for case, errors in by_case.items()}))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--sizes", default="2,4")
    parser.add_argument("--draws", type=int, default=8, help="llamas whose errors are combined")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    report = {"commit": arguments.commit, "hardware": cpu_name(), "torch": torch.__version__, "M, N, K": (M, N, K)}
    report["draws"] = arguments.draws
    for tp in map(int, arguments.sizes.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(_rank, (tp, arguments.draws, folder), nprocs=tp)
            report[f"tp={tp}"] = json.loads(Path(folder, "found.json").read_text())
    arguments.out.mkdir(parents=True, exist_ok=True)
    name = f"tp-error-{cpu_name().replace(' ', '-').lower()}-{arguments.commit}.json"
    (arguments.out / name).write_text(json.dumps(report, indent=1))
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
