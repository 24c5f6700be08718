"""Train over several processes: digests of the weights, and the time of a step beside plain FSDP2's.

    torchrun --nproc-per-node=4 -m benchmarks.train_sharded --json OUT --model-shape 8b --layers 8 --steps 20

A step is a global batch of sequences of one length, every rank's share in some micro-batches, then clip_grad_norm_ and
AdamW. Ranks are GPUs over NCCL, or processes over gloo where there is no GPU.

ours    detcompile.trainer under trainer.shard: sha256 of all weights after the steps, for each of --splits, each with
        another assignment of sequences to ranks; digests are comparable across numbers of ranks.
plain   the same Hugging Face model, its layers compiled by torch.compile, under fully_shard with float32 masters,
        bfloat16 computation and float32 reduction, torch's clip_grad_norm_ and AdamW.
reduce  reduce-scatter of float64 multiples of 2^-44, of float32 and of bfloat16: time, and whether float64 is exact.
"""

import argparse
import gc
import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import detcompile
from benchmarks.cpu import cpu_name
from detcompile.training.optimizer import local_part
from detcompile.training.sharding import whole

COMMON = {"max_position_embeddings": 4096, "bos_token_id": None, "eos_token_id": None, "head_dim": 128}


def _shape(sizes: tuple[int, int, int], heads: tuple[int, int], tied: bool, **other: int) -> dict[str, Any]:
    named = zip(("num_hidden_layers", "hidden_size", "intermediate_size"), sizes)
    named_heads = zip(("num_attention_heads", "num_key_value_heads"), heads)
    return COMMON | {"vocab_size": 151936, "tie_word_embeddings": tied, **dict(named), **dict(named_heads)} | other


SHAPES = {
    "nano": _shape((2, 64, 160), (4, 2), tied=False, head_dim=16, vocab_size=160),
    "0.6b": _shape((28, 1024, 3072), (16, 8), tied=True),
    "1.7b": _shape((28, 2048, 6144), (16, 8), tied=True),
    "4b": _shape((36, 2560, 9728), (32, 8), tied=True),
    "8b": _shape((36, 4096, 12288), (32, 8), tied=False),
}
SIZES = (1 << 16, 1 << 20, 1 << 24, 1 << 27)  # elements of a reduce-scatter, on all ranks; the last two on GPUs
LEARNING_RATE = 1e-4


class Work(NamedTuple):
    """A run: its arguments, and the rank and device of this process."""

    arguments: argparse.Namespace
    device: torch.device
    rank: int
    ranks: int
    vocab_size: int

    def groups(self, split: int) -> list[list[int]]:
        """Return this rank's micro-batches as numbers of sequences; each split assigns them differently."""
        numbers = list(range(self.arguments.sequences))
        numbers = numbers[split - 1 :] + numbers[: split - 1]
        if split > 1:
            numbers.reverse()
        mine = numbers[self.rank :: self.ranks]
        return [mine[place::split] for place in range(split)]

    def sequences(self, step: int) -> Tensor:
        """Return the global batch of a step, [sequences, length] int64, the same on every rank."""
        generator = torch.Generator().manual_seed(step)
        shape = self.arguments.sequences, self.arguments.length
        return torch.randint(self.vocab_size, shape, generator=generator).to(self.device)

    @property
    def predicted(self) -> int:
        """Return the number of tokens of the global batch by which the loss is divided."""
        return int(self.arguments.sequences * (self.arguments.length - 1))


def build(arguments: argparse.Namespace, device: torch.device) -> PreTrainedModel:
    """Build the model in bfloat16 with the same weights on every rank and at every call."""
    if arguments.model_shape == "tiny":
        return detcompile.load_model("tiny", dtype=torch.bfloat16, device=device)
    sizes = dict(SHAPES[arguments.model_shape])
    if arguments.layers:
        sizes["num_hidden_layers"] = arguments.layers
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **sizes), dtype=torch.bfloat16).eval()


def mesh_of(arguments: argparse.Namespace, device: torch.device) -> DeviceMesh:
    """Return a mesh of all ranks, or of two replicas with half of them as shards each."""
    ranks = dist.get_world_size()
    if arguments.mesh == "fsdp":
        return init_device_mesh(device.type, (ranks,))
    return init_device_mesh(device.type, (2, ranks // 2), mesh_dim_names=("replicate", "shard"))


def ours(work: Work) -> Iterator[dict[str, Any]]:
    trainer = detcompile.trainer(build(work.arguments, work.device), progress=work.rank == 0)
    if work.arguments.mesh != "none":
        trainer.shard(mesh_of(work.arguments, work.device))
    parameters = dict(trainer.named_parameters())

    def backward(ids: Tensor) -> None:
        (-trainer.logprobs(ids).sum() / work.predicted).backward()

    def optimizer() -> torch.optim.Optimizer:
        return detcompile.AdamW(parameters.values(), lr=LEARNING_RATE)

    yield from _splits(work, parameters, backward, trainer.clip_grad_norm_, optimizer)


def plain(work: Work) -> Iterator[dict[str, Any]]:
    model = build(work.arguments, work.device).float()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = None if work.arguments.mesh == "none" else mesh_of(work.arguments, work.device)
    for layer in model.model.layers:
        layer.compile()
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    parameters = dict(model.named_parameters())

    @torch.compile
    def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
        targets = ids[:, 1:].flatten()
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets, reduction="sum")

    def backward(ids: Tensor) -> None:
        logits = model(ids, use_cache=False).logits
        (loss_of(logits, ids) * (work.ranks / work.predicted)).backward()  # FSDP2 divides by the ranks

    def clip(norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(parameters.values(), norm)

    def optimizer() -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters.values(), lr=LEARNING_RATE, fused=True)

    yield from _splits(work, parameters, backward, clip, optimizer)


def _splits(
    work: Work,
    parameters: dict[str, Tensor],
    backward: Callable[[Tensor], None],
    clip: Callable[[float], Tensor],
    optimizer: Callable[[], torch.optim.Optimizer],
) -> Iterator[dict[str, Any]]:
    """Run the steps with each split into micro-batches, from the same weights."""
    first = {name: local_part(parameter.detach()).to("cpu", copy=True) for name, parameter in parameters.items()}
    for split in work.arguments.splits:
        with torch.no_grad():
            for name, parameter in parameters.items():
                local_part(parameter).copy_(first[name])
        adam, seconds = optimizer(), []
        if work.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for step in range(work.arguments.steps):
            ids = work.sequences(step)
            started = _now(work.device)
            adam.zero_grad()
            for group in work.groups(split):
                backward(ids[group])
            norm = clip(1.0)
            adam.step()
            seconds.append(_now(work.device) - started)
        yield {
            "micro-batches a rank": split,
            "sha256": digest(parameters),
            "norm of the last gradient": float(whole(norm)),
            "ms a step": 1e3 * statistics.median(seconds[min(3, len(seconds) - 1) :]),
            "peak GiB": torch.cuda.max_memory_allocated() / 2**30 if work.device.type == "cuda" else None,
        }
        del adam


def digest(parameters: dict[str, Tensor]) -> str:
    """Return the sha256 of all weights, gathered by every rank."""
    hasher = hashlib.sha256()
    for name, parameter in sorted(parameters.items()):
        hasher.update(name.encode() + whole(parameter.detach()).cpu().numpy().tobytes())
    return hasher.hexdigest()


def reduce_scatters(work: Work) -> Iterator[dict[str, Any]]:
    for size in SIZES[: None if work.device.type == "cuda" else 2]:
        size -= size % work.ranks
        row: dict[str, Any] = {"elements": size}
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            generator = torch.Generator(work.device).manual_seed(work.rank)
            draw = torch.randint(-(1 << 40), 1 << 40, (size,), generator=generator, device=work.device)
            given = (draw.double() * 2.0**-44).to(dtype)
            result = given.new_empty(size // work.ranks)
            seconds = []
            for _ in range(8):
                dist.barrier()
                started = _now(work.device)
                dist.reduce_scatter_tensor(result, given)
                seconds.append(_now(work.device) - started)
            key = str(dtype).removeprefix("torch.")
            row |= {f"{key} us": 1e6 * statistics.median(seconds[2:]), f"{key} bytes": given.nbytes}
            if dtype is torch.float64 and size <= 1 << 24:
                every = given.new_empty(work.ranks, size)
                dist.all_gather_into_tensor(every.view(-1), given)
                mine = every.view(work.ranks, work.ranks, -1)[:, work.rank]
                exact = torch.tensor(torch.equal(mine.mul(2.0**44).long().sum(0).double() * 2.0**-44, result))
                row["exact"] = bool(_least(exact, work))
        yield row


def _least(flag: Tensor, work: Work) -> int:
    counted = flag.int().to(work.device)
    dist.all_reduce(counted, op=dist.ReduceOp.MIN)
    return int(counted)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


PARTS = {"ours": ours, "plain": plain, "reduce": reduce_scatters}


def model_arguments(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of the options for the report's path and the model."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--commit", default="")
    parser.add_argument("--model-shape", choices=["tiny", *SHAPES], default="8b", help="tiny: the embedded model")
    parser.add_argument("--layers", type=int, help="number of layers; default: all of the shape")
    return parser


def begin(cuda_backend: str) -> tuple[torch.device, dict[str, Any]]:
    """Join torchrun's ranks; return this rank's device, and the report's description of all of them."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(cuda_backend if cuda else "gloo")
    hardware = torch.cuda.get_device_name() if cuda else cpu_name()
    return device, {"hardware": hardware, "ranks": dist.get_world_size(), "torch": torch.__version__}


def parsed() -> argparse.Namespace:
    parser = model_arguments(__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--sequences", type=int, default=64, help="sequences of the global batch")
    parser.add_argument("--length", type=int, default=1024, help="tokens a sequence")
    parser.add_argument("--splits", type=lambda text: list(map(int, text.split(","))), default=[1, 2, 4])
    parser.add_argument("--mesh", choices=["fsdp", "hsdp", "none"], default="fsdp", help="none: one rank, unsharded")
    parser.add_argument("--parts", default=",".join(PARTS))
    arguments = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if arguments.sequences % (ranks * max(arguments.splits)):
        parser.error(f"--sequences {arguments.sequences} are not {ranks} ranks times each of {arguments.splits}")
    return arguments


def main() -> None:
    arguments = parsed()
    device, world = begin("nccl")
    vocab_size = SHAPES.get(arguments.model_shape, {}).get("vocab_size", 4096)
    work = Work(arguments, device, dist.get_rank(), dist.get_world_size(), vocab_size)
    report: dict[str, Any] = {name: value for name, value in vars(arguments).items() if name != "json"}
    report |= world | {"backend": dist.get_backend()}
    for part in arguments.parts.split(","):
        report[part] = []
        for row in PARTS[part](work):
            report[part].append(row)
            if work.rank == 0:
                print(part, row, flush=True)
                arguments.json.write_text(json.dumps(report, indent=1))
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
