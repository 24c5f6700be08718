"""Print digests of two training steps for each way to shard the trainer over processes.

It makes a trainer once, and forks the ranks of every world from it:
``python -m tests.training.worlds FILE MODEL [WHAT PARAMETERS ARE TRAINED]``.
"""

import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

import detcompile
from detcompile import InvalidInput, Trainer
from detcompile.training import sharding
from detcompile.training import trainer as trainer_module
from tests.model_cases import MAX_CONTEXT, random_model
from tests.training.cases import adapted, add_gradients, sequences

__all__ = ["LENGTHS", "MUTANTS", "WORLDS", "World"]

LENGTHS = [40, 7, 130, 2, 64, 1]  # the last is alone in some micro-batches of a rank
MUTANTS = ("reduce_dtype", "hook", "divide")


class World(NamedTuple):
    """A way to shard a trainer over ranks."""

    mesh: tuple[int, ...]  # () for one that is not sharded
    mutant: str = ""
    others: int = 0  # first ranks of torch.distributed that take no part

    @property
    def size(self) -> int:
        return int(torch.tensor(self.mesh).prod()) if self.mesh else 1


WORLDS = (
    *(World(mesh) for mesh in ((), (1,), (2,), (3,), (2, 1), (2, 2))),
    *(World((3,), mutant) for mutant in MUTANTS),
    World((2,), others=1),
)


def assignments(ranks: int) -> Iterator[list[list[list[int]]]]:
    """Yield micro-batches of sequence indices by rank, equally many per rank."""
    numbers = list(range(len(LENGTHS)))
    for order in (numbers, [5, 2, 0, 3, 4, 1]):
        mine = [order[rank::ranks] for rank in range(ranks)]
        fewest = min(map(len, mine))
        for micro in {1, fewest}:
            yield [[sequences[place::micro] for place in range(micro)] for sequences in mine]


def digest(tensors: Mapping[str, Tensor]) -> str:
    actual = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        actual.update(name.encode() + sharding.whole(tensor.detach()).view(torch.uint8).numpy().tobytes())
    return actual.hexdigest()[:16]


def two_steps(trainer: Trainer, groups: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return the final values of a rank that reads these micro-batches; the trainer gets its weights back."""
    kept = {name: parameter.detach().clone() for name, parameter in trainer.named_parameters()}
    parameters = dict(trainer.named_parameters())
    optimizer = detcompile.AdamW(parameters.values(), lr=1e-3)
    actual: dict[str, Any] = {"gradients": [], "norms": []}
    for _ in range(2):
        optimizer.zero_grad()
        add_gradients(trainer, sequences(LENGTHS), groups)
        actual["gradients"].append(digest({name: held.grad for name, held in parameters.items() if held.requires_grad}))
        actual["norms"].append(trainer.clip_grad_norm_(0.5).item().hex())
        optimizer.step()
    actual |= {"weights": digest(parameters), "served": digest(trainer.serving_weights())}
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(kept[name])
    return actual


def mutate(mutant: str) -> None:
    """Remove one property that sharded gradients depend on."""
    if mutant == "reduce_dtype":  # with plain sums: gloo supports no others for a divide factor of 1 in float32
        divide = FSDPModule.set_gradient_divide_factor

        def divide_and_sum(module: FSDPModule, factor: float) -> None:
            divide(module, factor)
            module.set_force_sum_reduction_for_comms(True)

        FSDPModule.set_gradient_divide_factor = divide_and_sum
        sharding.MixedPrecisionPolicy = lambda **given: MixedPrecisionPolicy(**given | {"reduce_dtype": torch.float32})
    if mutant == "hook":
        FSDPModule.set_all_reduce_hook = lambda module, hook: None
    if mutant == "divide":
        FSDPModule.set_gradient_divide_factor = lambda module, factor: None


def of_rank(rank: int, world: World, trainer: Trainer, folder: str) -> None:
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world.others + world.size)
    dist.barrier()  # gloo fails if a finished rank closes its connections before all are open
    mutate(world.mutant)
    if world.mesh:
        ranks = world.others + torch.arange(world.size).view(world.mesh)
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard")[-len(world.mesh) :])
        if rank < world.others:
            return
        trainer.shard(mesh)
    actual = []
    for groups in assignments(world.size):
        try:
            actual.append(two_steps(trainer, groups[rank - world.others]))
        except InvalidInput as refused:  # a mutant may be refused, on every rank
            actual.append({"refused": str(refused)})
            break
    if world.others:
        actual[0]["writes"] = writes(trainer)
    Path(folder, f"{rank}.json").write_text(json.dumps(actual))
    dist.destroy_process_group()


def writes(trainer: Trainer) -> bool:
    """Return whether this rank writes the saved files."""
    wrote: list[Any] = []
    trainer_module.save_adapters = lambda *given: wrote.append(given)
    trainer._adapters = {"default": None}
    trainer.save_adapters("never")
    return bool(wrote)


def digests(world: World, trainer: Trainer) -> list[Any]:
    """Return digests of every assignment, split and rank, which must be equal."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(of_rank, (world, trainer, folder), world.others + world.size, start_method="fork")
        return [actual for file in Path(folder).glob("*.json") for actual in json.loads(file.read_text())]


def main(file: str, name: str, part: str = "") -> None:
    torch.set_num_threads(1)
    model = adapted(name) if part == "lora" else random_model(name, torch.bfloat16)
    for path, parameter in model.named_parameters():
        parameter.requires_grad_(part in path)
    trainer = detcompile.trainer(model, max_context=MAX_CONTEXT)
    actual = [(world, digests(world, trainer)) for world in WORLDS]
    Path(file).write_text(json.dumps(actual))


if __name__ == "__main__":
    main(*sys.argv[1:])
