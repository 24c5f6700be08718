"""Invariance axes measured in one process: run a target sequence under many configurations and compare bytes.

A configuration sets the rest of the batch, the split of tokens into steps, the padding and the placement of KV blocks.
``score`` runs one and returns the target's logits; ``measure`` runs all of an axis and counts distinct results.
"""

import random
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from hashlib import sha256

import torch
from torch import Tensor

from detcompile.models.compiled import CompiledModel
from detcompile.runtime.requests.sequence import Sequence
from detcompile.runtime.step.builder import build_step

# Sizes of blocks, tiles and chunks, and their neighbors.
CHUNK_EDGES = (1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 511, 512, 513)
BLOCK_SIZES = (16, 32, 48, 64, 128, 256)
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Configuration:
    """One way to run a target sequence.

    Attributes:
        rows: token ids of every sequence.
        target: index of the compared row.
        steps: (row, tokens) pairs of each forward step; empty runs all rows whole in one step.
        padding: None packs the rows; otherwise a padded call with (left, right) padding columns around the longest row.
        block_size, placement, poison: size of KV blocks; seed of their order; fill all slots with NaN first.
        cuda_graphs: replay small steps from CUDA graphs.
    """

    rows: tuple[Tokens, ...]
    target: int = 0
    steps: tuple[tuple[tuple[int, int], ...], ...] = ()
    padding: tuple[int, int] | None = None
    align: str = "left"
    block_size: int = 64
    placement: int | None = None
    poison: bool = False
    cuda_graphs: bool = False

    def describe(self) -> str:
        """Describe the configuration for a table."""
        words = [f"batch of {len(self.rows)}"]
        words += [f"{len(self.steps)} steps"] if self.steps else []
        words += [f"padded {self.align} {self.padding}"] if self.padding else []
        return ", ".join(words)


@dataclass
class AxisResult:
    """Measurements of one axis. Equal bits mean one unique result and a divergence of exactly 0.

    Attributes:
        unique_logits: number of distinct logits (by bytes), maximum over targets.
        unique_outputs: number of distinct argmax sequences, maximum over targets.
        max_probability_divergence: largest difference of a token's probability from the first configuration.
    """

    configurations: int = 0
    unique_logits: int = 0
    unique_outputs: int = 0
    max_probability_divergence: float = 0.0
    _by_target: dict[Tokens, tuple[set[str], set[str], Tensor]] = field(default_factory=dict, repr=False)

    @property
    def holds(self) -> bool:
        """True if every configuration gave each target the same bits."""
        return self.unique_logits == 1 and self.max_probability_divergence == 0.0

    @property
    def figures(self) -> tuple[str, str, str]:
        """Unique logits, unique outputs and divergence as text for tables."""
        return str(self.unique_logits), str(self.unique_outputs), f"{self.max_probability_divergence:.3g}"

    def add(self, target: Tokens, logits: Tensor) -> None:
        """Add the logits [len(target), V] of one configuration."""
        logits = logits.detach().cpu()
        seen_logits, seen_outputs, first = self._by_target.setdefault(target, (set(), set(), logits))
        seen_logits.add(logit_bytes(logits))
        seen_outputs.add(logit_bytes(logits.argmax(-1)))
        divergence = (_probabilities(logits) - _probabilities(first)).abs().max().item()
        self.configurations += 1
        self.unique_logits = max(self.unique_logits, len(seen_logits))
        self.unique_outputs = max(self.unique_outputs, len(seen_outputs))
        # keep NaN, which fails: Python's max() would drop it
        self.max_probability_divergence = (
            divergence if divergence != divergence else max(self.max_probability_divergence, divergence)
        )

    def to_json(self) -> dict[str, int | float]:
        """Return the measurements as a JSON object."""
        return {
            "configurations": self.configurations,
            "unique_logits": self.unique_logits,
            "unique_outputs": self.unique_outputs,
            "max_probability_divergence": self.max_probability_divergence,
        }


def logit_bytes(logits: Tensor) -> str:
    """Return the sha256 of shape, dtype and bytes."""
    flat = logits.detach().cpu().contiguous()
    return sha256(f"{tuple(flat.shape)} {flat.dtype}".encode() + flat.view(torch.uint8).numpy().tobytes()).hexdigest()


def _probabilities(logits: Tensor) -> Tensor:
    return logits.double().softmax(-1)


@torch.no_grad()
def score(model: CompiledModel, configuration: Configuration) -> Tensor:
    """Return the logits [len(target), V] of the target row, with teacher forcing."""
    if configuration.padding is not None:
        input_ids, mask, columns = padded_batch(configuration)
        return model(input_ids.to(model.device), mask.to(model.device)).logits[configuration.target, columns]
    sequences = [Sequence(list(row)) for row in configuration.rows]
    size = configuration.block_size
    order = None if configuration.placement is None else torch.Generator().manual_seed(configuration.placement)
    blocks = sum(-(-len(row) // size) for row in configuration.rows) + (3 if configuration.placement else 0)
    runner, kv_blocks = model.new_runner(
        blocks * size, block_size=size, order=order, cuda_graphs=configuration.cuda_graphs
    )
    if configuration.poison:
        runner.fill_caches(float("nan"))
    steps = configuration.steps or (tuple((i, len(row)) for i, row in enumerate(configuration.rows)),)
    pieces = []
    for step in steps:
        plan = [(sequences[row], n) for row, n in step]
        logits = runner.run(build_step(plan, kv_blocks, all_logits=True))
        start = 0
        for sequence, n in plan:
            sequence.num_computed += n
            if sequence is sequences[configuration.target]:
                pieces.append(logits[start : start + n])
            start += n
    return torch.cat(pieces)


def padded_batch(configuration: Configuration) -> tuple[Tensor, Tensor, slice]:
    """Return input_ids [B, C], attention_mask [B, C] and the target's columns."""
    left, right = configuration.padding or (0, 0)
    longest = max(len(row) for row in configuration.rows)
    shape = (len(configuration.rows), left + longest + right)
    input_ids, mask = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    columns = slice(0, 0)
    for i, row in enumerate(configuration.rows):
        start = left if configuration.align == "left" else left + longest - len(row)
        here = slice(start, start + len(row))
        input_ids[i, here], mask[i, here] = torch.tensor(row), 1
        columns = here if i == configuration.target else columns
    return input_ids, mask, columns


def measure(
    model: CompiledModel, plan: SequenceOf[Configuration], tick: Callable[[], None] = lambda: None
) -> AxisResult:
    """Run the configurations of an axis; call ``tick`` after each."""
    result = AxisResult()
    for configuration in plan:
        result.add(configuration.rows[configuration.target], score(model, configuration))
        tick()
    return result


def configurations(axis: str, prompts: SequenceOf[Tokens], count: int, rng: random.Random) -> list[Configuration]:
    """Return ``count`` configurations of an axis for each target; the first runs the target alone in one step.

    Args:
        axis: a key of AXES.
        prompts: targets and neighbors, at least two.
    """
    plans = []
    for target in prompts[:2]:
        plans.append(Configuration((target,)))
        plans += [AXES[axis](target, prompts, rng) for _ in range(count - 1)]
    return plans


def _neighbors(prompts: SequenceOf[Tokens], rng: random.Random, most: int = 7) -> list[Tokens]:
    picked = [rng.choice(prompts) for _ in range(rng.randint(1, most))]
    return [row[: rng.randint(1, len(row))] for row in picked]


def _placed(target: Tokens, others: list[Tokens], position: int) -> tuple[tuple[Tokens, ...], int]:
    rows = [*others[:position], target, *others[position:]]
    return tuple(rows), min(position, len(others))


def _batch(target: Tokens, prompts: SequenceOf[Tokens], rng: random.Random) -> Configuration:
    size = rng.choice([2, 3, 4, 7, 8, 9, 15, 16, 17])
    rows, at = _placed(target, [target[: rng.randint(1, len(target))] for _ in range(size - 1)], rng.randrange(size))
    return Configuration(rows, at)


def _position(target: Tokens, prompts: SequenceOf[Tokens], rng: random.Random) -> Configuration:
    others = _neighbors(prompts, rng)
    return Configuration(*_placed(target, others, rng.randint(0, len(others))))


def _padding(target: Tokens, prompts: SequenceOf[Tokens], rng: random.Random) -> Configuration:
    rows, at = _placed(target, _neighbors(prompts, rng, 3), rng.randint(0, 3))
    pads = (rng.choice([0, 1, 5, 64]), rng.choice([0, 1, 7, 63]))
    return Configuration(rows, at, padding=pads, align=rng.choice(["left", "right"]))


def split(length: int, rng: random.Random, largest: int | None = None) -> list[int]:
    """Split ``length`` into random chunk sizes near the edges of blocks and tiles."""
    sizes = []
    while length:
        size = min(length, rng.choice(CHUNK_EDGES) if largest is None else rng.randint(1, largest))
        sizes.append(size)
        length -= size
    return sizes


def interleave(rows: SequenceOf[Tokens], target: int, chunks: list[int], rng: random.Random):
    """Return steps that split the target into ``chunks`` and advance the other rows by random amounts."""
    left = [len(row) for row in rows]
    steps = []
    for chunk in chunks:
        step = [(target, chunk)]
        left[target] -= chunk
        for row in range(len(rows)):
            if row != target and left[row] and rng.random() < 0.8:
                n = rng.randint(1, left[row])
                left[row] -= n
                step.insert(rng.randint(0, len(step)), (row, n))
        steps.append(tuple(step))
    return tuple(steps)


def _chunking(target: Tokens, prompts: SequenceOf[Tokens], rng: random.Random) -> Configuration:
    rows, at = _placed(target, _neighbors(prompts, rng, 3), rng.randint(0, 3))
    return Configuration(rows, at, interleave(rows, at, split(len(target), rng), rng))


def _decode(target: Tokens, prompts: SequenceOf[Tokens], rng: random.Random) -> Configuration:
    prefill = max(1, len(target) - rng.randint(1, 24))
    rows, at = _placed(target, _neighbors(prompts, rng, 3), rng.randint(0, 3))
    chunks = [prefill] + [1] * (len(target) - prefill)
    return Configuration(rows, at, interleave(rows, at, chunks, rng))


def _kv(target: Tokens, prompts: SequenceOf[Tokens], rng: random.Random) -> Configuration:
    rows, at = _placed(target, _neighbors(prompts, rng, 2), rng.randint(0, 2))
    steps = interleave(rows, at, split(len(target), rng), rng)
    return Configuration(
        rows, at, steps, block_size=rng.choice(BLOCK_SIZES), placement=rng.randint(1, 10**6), poison=True
    )


def _cuda_graphs(target: Tokens, prompts: SequenceOf[Tokens], rng: random.Random) -> Configuration:
    plain = _decode(target, prompts, rng)
    return Configuration(plain.rows, plain.target, plain.steps, cuda_graphs=True)


AXES: dict[str, Callable[[Tokens, SequenceOf[Tokens], random.Random], Configuration]] = {
    "batch": _batch,
    "composition": lambda target, prompts, rng: Configuration((target, *_neighbors(prompts, rng))),
    "position": _position,
    "padding": _padding,
    "chunking": _chunking,
    "decode": _decode,
    "kv": _kv,
    "cuda_graphs": _cuda_graphs,
}
