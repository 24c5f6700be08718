"""A sharded trainer and an engine on the same devices: equal bytes, and the seconds of a step's parts.

    torchrun --nproc-per-node=4 -m benchmarks.rollout --json OUT --model-shape 8b --layers 8 --steps 5

The ranks of torchrun train under FSDP2; the first of them also has an engine, whose workers share the model among as
many devices by tensor parallelism. In a step the engine draws answers, the trainer computes the log-probabilities of
their tokens, each rank those of its share, and takes a step of REINFORCE with drawn rewards, and the engine gets the
new weights. Counts the tokens whose log-probabilities differ in a byte, and gives KL(engine, trainer), the mean over
tokens of e^d - 1 - d, d being the difference. Ranks are GPUs, or processes over gloo where there is no GPU.
"""

import argparse
import functools
import json
import os
import random
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import detcompile
from benchmarks.train_sharded import begin, build, build_on_current_device, model_arguments
from detcompile import CompiledModel, EngineConfig, SamplingParams, Trainer
from detcompile.models.remote import compile_in_workers
from tests.training.cases import padded

Answer = tuple[list[int], list[int], list[float]]  # prompt, drawn tokens, and their log-probabilities by the engine
LEARNING_RATE = 1e-5


def draw(model: CompiledModel, arguments: argparse.Namespace, step: int) -> list[Answer]:
    """Answers of the engine, which holds its cache for this long only."""
    drawn = random.Random(step)
    lengths = [drawn.randint(arguments.prompt // 2, arguments.prompt) for _ in range(arguments.answers)]
    prompts = [[drawn.randrange(2, model.vocab_size) for _ in range(length)] for length in lengths]
    engine = model.engine(EngineConfig(num_blocks=2000, max_num_batched_tokens=2048))
    asked = SamplingParams(max_tokens=arguments.length, temperature=1.0, seed=step, logprobs=0, ignore_eos=True)
    found = []
    for prompt, output in zip(prompts, engine.generate(prompts, asked, progress=False)):
        entries = output.outputs[0].logprobs
        assert output.error is None and entries is not None
        found.append((prompt, [entry.token_id for entry in entries], [entry.logprob for entry in entries]))
    return found


def learn(trainer: Trainer, answers: list[Answer], device: torch.device, step: int) -> Tensor:
    """Add the gradients of this rank's answers.

    Returns:
        [tokens, 2] float32, the log-probabilities of its answers' tokens by the trainer and by the engine.
    """
    rewards = [random.Random(f"{step} {number}").uniform(-1, 1) for number in range(len(answers))]
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    rows, own_rewards = answers[mine], rewards[mine]
    ids, mask = padded([torch.tensor(prompt + tokens) for prompt, tokens, _ in rows], [0] * len(rows))
    logprobs = trainer.logprobs(ids.to(device), mask.to(device))
    found, loss = [], logprobs.new_zeros(())
    for place, ((prompt, tokens, served), reward) in enumerate(zip(rows, own_rewards)):
        of_answer = logprobs[place, len(prompt) - 1 : len(prompt) - 1 + len(tokens)]
        loss = loss - reward * of_answer.sum()
        found.append(torch.stack([of_answer.detach().cpu(), torch.tensor(served)], 1))
    (loss / sum(len(tokens) for _, tokens, _ in answers)).backward()
    return torch.cat(found)


class Laps:
    """Seconds of a step's parts, on all ranks."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._since = device, time.perf_counter()
        self.seconds: dict[str, float] = {}

    def end(self, name: str) -> None:
        """This part has ended where all ranks have come to its end."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        now = time.perf_counter()
        self.seconds[f"{name} seconds"], self._since = now - self._since, now


def take_step(
    trainer: Trainer,
    optimizer: torch.optim.Optimizer,
    model: CompiledModel | None,
    arguments: argparse.Namespace,
    device: torch.device,
    step: int,
) -> dict[str, Any]:
    """A step of all ranks, of which the first has the engine's model: what it took and showed."""
    laps = Laps(device)
    told: list[Any] = [draw(model, arguments, step) if model is not None else None]
    dist.broadcast_object_list(told, device=device)
    laps.end("answers")
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, learn(trainer, told[0], device, step))
    laps.end("gradients")
    trainer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    laps.end("optimizer")
    weights = trainer.serving_weights()
    laps.end("gathering")
    if model is not None:
        model.update_weights(weights)
    laps.end("weights to the engine")
    ours, served = torch.cat(of_ranks).unbind(1)
    difference = ours.double() - served.double()
    return laps.seconds | {
        "tokens": ours.numel(),
        "differing": int((ours.view(torch.int32) != served.view(torch.int32)).sum()),
        "KL": float((difference.exp() - 1 - difference).mean()),
        "bytes of weights": sum(weight.nbytes for weight in weights.values()),
    }


def steps(arguments: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """What it took to start, and then what each step took and showed."""
    laps = Laps(device)
    trainer = detcompile.trainer(build(arguments, device), progress=False)
    trainer.shard()
    optimizer = detcompile.AdamW(trainer.parameters(), lr=LEARNING_RATE)
    laps.end("trainer")
    model = None
    if dist.get_rank() == 0:
        own = functools.partial(build_on_current_device, arguments)
        model = compile_in_workers(own, tp=dist.get_world_size(), numerics=trainer.numerics)
    laps.end("engine")
    rows: list[dict[str, Any]] = [dict(laps.seconds)]
    for step in range(arguments.steps):
        rows.append(take_step(trainer, optimizer, model, arguments, device, step))
        if dist.get_rank() == 0:
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = model_arguments(__doc__)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--answers", type=int, default=64, help="answers of a step")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of the longest prompt")
    parser.add_argument("--length", type=int, default=128, help="tokens of an answer")
    arguments = parser.parse_args()
    if arguments.answers < int(os.environ["WORLD_SIZE"]):
        parser.error(f"--answers {arguments.answers} are fewer than the ranks, each of which learns from one at least")
    device, world = begin("cpu:gloo,cuda:nccl")
    report = {name: value for name, value in vars(arguments).items() if name != "json"}
    report |= world | {"steps": steps(arguments, device)}
    if dist.get_rank() == 0:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
