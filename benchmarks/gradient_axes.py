"""Distinct digests of one batch's gradients and of the weights after a step, over all ways to compute them.

    python -m benchmarks.gradient_axes --json OUT [--model qwen3] [--worlds 1,2,3]

24 sequences of 2 to 130 tokens, in three orders, go to the ranks by turns, and each rank reads its share in 1 to 8
micro-batches, packed or padded; ranks hold the parameters whole (one rank), by FSDP2 and by HSDP, over gloo; layers are
kept or computed again in the backward. Beside detcompile's trainer, plain torch: the Hugging Face model in bfloat16,
and FSDP2 over its layers with float32 masters and reductions. Writes its JSON after each world.
"""

import argparse
import hashlib
import json
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import detcompile
from benchmarks.cpu import cpu_name
from detcompile.training.sharding import whole
from tests.model_cases import MAX_CONTEXT, random_model
from tests.training.cases import padded, sequences

__all__ = ["Layout", "layouts"]

LENGTHS = tuple(random.Random(3).sample(range(2, 131), 24))
MESHES = ((), (1,), (2,), (3,), (2, 1), (2, 2))


class Layout(NamedTuple):
    """How one rank reads its share of the batch."""

    order: str
    micro: tuple[tuple[int, ...], ...]  # numbers of sequences
    recompute: bool


def layouts(rank: int, ranks: int) -> Iterator[Layout]:
    """What a rank computes, in the same order and as often as the others."""
    count = len(LENGTHS)
    orders = {
        "as given": list(range(count)),
        "shuffled": random.Random(5).sample(range(count), count),
        "by length": sorted(range(count), key=lambda number: LENGTHS[number]),
    }
    for name, order in orders.items():
        mine = order[rank::ranks]
        for splits in range(1, min(8, count // ranks) + 1):
            micro = tuple(tuple(mine[place::splits]) for place in range(splits))
            yield Layout(name, micro, False)
            if name == "shuffled" and splits in (1, 5):
                yield Layout(name, micro, True)


def backward(model: Any, ours: bool, micro: Sequence[Sequence[int]]) -> None:
    """Add the gradients of minus the mean log-probability, weighted by token."""
    rows = sequences(LENGTHS)
    for group in micro:
        ids, mask = padded([rows[number] for number in group])
        if ours:
            logprobs = model.logprobs(ids, mask)
        else:
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
            logprobs = logits.log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
        weight = torch.zeros(logprobs.shape)
        for place, number in enumerate(group):
            weight[place, : LENGTHS[number] - 1] = torch.linspace(0.5, 1.5, LENGTHS[number] - 1)
        (-(logprobs * weight).sum() / sum(LENGTHS)).backward()


def digest(tensors: Mapping[str, Tensor]) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        content = whole(tensor.detach()).contiguous()
        found.update(name.encode() + content.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def of_layouts(model: Any, ours: bool, rank: int, ranks: int) -> Iterator[dict[str, Any]]:
    """The digests of each layout; the model has its weights again afterwards."""
    parameters = {name: held for name, held in model.named_parameters() if held.requires_grad}
    kept = {name: held.detach().clone() for name, held in parameters.items()}
    for layout in layouts(rank, ranks):
        if layout.recompute and not ours:
            continue
        for block in model.blocks if ours else ():
            block.recompute = layout.recompute
        optimizer = (detcompile.AdamW if ours else torch.optim.AdamW)(parameters.values(), lr=1e-3)
        optimizer.zero_grad()
        backward(model, ours, layout.micro)
        found = {"gradients": digest({name: held.grad for name, held in parameters.items()})}
        optimizer.step()
        yield {**layout._asdict(), "micro": len(layout.micro), **found, "weights": digest(parameters)}
        with torch.no_grad():
            for name, held in parameters.items():
                held.copy_(kept[name])


def shard_plainly(model: nn.Module, mesh: Any) -> None:
    """FSDP2 as torch has it, adding losses over ranks."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    modules: list[Any] = [*model.model.layers, model]  # type: ignore[union-attr, list-item]
    for module in modules:
        fully_shard(module, mesh=mesh, mp_policy=policy)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def of_rank(rank: int, mesh: tuple[int, ...], name: str, trainer: Any, folder: str) -> None:
    torch.set_num_threads(1)
    ranks = int(torch.tensor(mesh).prod()) if mesh else 1
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    plain: Any = random_model(name, torch.bfloat16)
    if mesh:
        devices = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard")[-len(mesh) :])
        trainer.shard(devices)
        shard_plainly(plain := plain.float(), devices)
    found = {
        "detcompile": list(of_layouts(trainer, True, rank, ranks)),
        "torch": list(of_layouts(plain, False, rank, ranks)),
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def counted(report: Mapping[str, Any]) -> dict[str, Any]:
    """How many layouts there were and how many digests, of every world and of all together."""
    counts: dict[str, Any] = {}
    for who in ("detcompile", "torch"):
        rows = {world: found[who] for world, found in report["worlds"].items()}
        rows["all"] = [row for found in rows.values() for row in found]
        counts[who] = {
            world: {"layouts": len(found)} | {key: len({row[key] for row in found}) for key in ("gradients", "weights")}
            for world, found in rows.items()
        }
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--commit", default="")
    parser.add_argument("--model", default="qwen3", help="one whose layers are model.layers")
    parser.add_argument("--worlds", default=",".join("x".join(map(str, mesh)) or "alone" for mesh in MESHES))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    trainer = detcompile.trainer(random_model(arguments.model, torch.bfloat16), max_context=MAX_CONTEXT)
    report: dict[str, Any] = {"commit": arguments.commit, "hardware": cpu_name(), "torch": torch.__version__}
    report |= {"model": arguments.model, "lengths": LENGTHS, "worlds": {}}
    for world in arguments.worlds.split(","):
        mesh = () if world == "alone" else tuple(map(int, world.split("x")))
        ranks = int(torch.tensor(mesh).prod()) if mesh else 1
        with tempfile.TemporaryDirectory() as folder:
            mp.start_processes(of_rank, (mesh, arguments.model, trainer, folder), ranks, start_method="fork")
            every = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]
        assert all(found == every[0] for found in every)  # ranks gather the same gradients
        report["worlds"][world] = every[0]
        report["counts"] = counted(report)
        print(world, report["counts"], flush=True)
        arguments.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
