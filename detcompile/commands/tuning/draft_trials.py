"""Drafts that pay on a workload: each kind of drafts measured beside plain decoding, and what a draft's size is worth.

The arithmetic is that of Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", ICML 2023: with
guesses that are right at rate a, a draft of n guesses that costs c plain steps each, and a verification that costs v
plain steps, tokens come (1 - a^(n + 1)) / (1 - a) / (n c + v) times as soon.
"""

import ast
import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import detcompile
from detcompile.errors import InvalidInput
from detcompile.models.compiled import CompiledModel
from detcompile.runtime.engine import Engine
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.runtime.speculation.drafter import Drafter
from detcompile.runtime.speculation.ngram_drafter import NGramDrafter
from detcompile.runtime.speculation.speculator import SpeculationConfig
from detcompile.runtime.speculation.statistics import DraftStatistics, expected_tokens

__all__ = ["Advice", "Trial", "Workload", "advice", "embedded_text", "plan", "tune_speculation"]

FOLDER = Path(detcompile.__file__).parent
MOST_GUESSES = 16
MOST_CHARACTERS = 16  # a token, on average


@dataclass(frozen=True)
class Workload:
    """Prompts cut from a text, each to be continued.

    Args:
        kind: "code" or "prose".
        prompts: token ids of each prompt.
    """

    kind: str
    prompts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, kind: str, text: str, model: CompiledModel, count: int, length: int, seed: int = 0) -> "Workload":
        """``count`` runs of ``length`` tokens from lines at random places of a text.

        Raises:
            InvalidInput: a model without a tokenizer, or a text that is too short.
        """
        if model.tokenizer is None:
            raise InvalidInput("tuning needs a tokenizer in the model's folder, to read the texts")
        rng = random.Random(f"{kind} {seed}")
        window = MOST_CHARACTERS * length
        prompts = []
        for _ in range(count):
            start = rng.randrange(max(1, len(text) - window))
            start = text.find("\n", start, start + window // 2) + 1 or start
            tokens = model.tokenizer(text[start : start + window])["input_ids"]
            if len(tokens) < length:
                raise InvalidInput(f"{len(tokens)} tokens of {kind}, prompts have {length}: give a longer text")
            prompts.append(tuple(tokens[:length]))
        return cls(kind, tuple(prompts))


@dataclass(frozen=True)
class Trial:
    """One kind of drafts on one workload.

    Attributes:
        kind: the workload's.
        drafts: "none", "n-gram", "chain" or "grown".
        nodes: guesses in a draft.
        milliseconds: time per token of each sequence.
        speedup: times as soon as plain decoding.
        draft_milliseconds: time per step for drafting alone.
        acceptance: share of guesses reached that were right.
        tokens: tokens per step.
        expected: tokens per step by the formula.
    """

    kind: str
    drafts: str
    nodes: int
    milliseconds: float
    speedup: float
    draft_milliseconds: float = 0.0
    acceptance: float = 0.0
    tokens: float = 1.0
    expected: float = 1.0

    def to_json(self) -> dict[str, Any]:
        """The figures as a JSON object."""
        return asdict(self)


@dataclass(frozen=True)
class Advice:
    """What the best chain of a draft model says about the draft's size.

    Attributes:
        kind: the workload's.
        acceptance: share of guesses reached that were right.
        cost: time of a guess, in plain steps.
        verification: time of a step without its drafting, in plain steps.
        guesses, speedup: the best by the formula.
        half_rate: the acceptance at which a draft of half the cost is as good.
        double_rate: the acceptance at which one of twice the cost is; None if no rate is enough.
    """

    kind: str
    acceptance: float
    cost: float
    verification: float
    guesses: int
    speedup: float
    half_rate: float
    double_rate: float | None


def plan(draft: CompiledModel | None, nodes: Sequence[int]) -> Iterator[tuple[str, int, Drafter]]:
    """The kinds of drafts to try: name, nodes, drafter."""
    for count in nodes:
        yield "n-gram", count, NGramDrafter(count)
    if draft is None:
        return
    for count in nodes:
        yield "chain", count, draft.drafter(count)
    for count in nodes:
        if count > 1:
            yield "grown", count, draft.drafter(min(count, max(2, count // 2)), tree="grown", max_nodes=count)


def tune_speculation(
    model: CompiledModel,
    draft: CompiledModel | None,
    workloads: Sequence[Workload],
    *,
    nodes: Sequence[int],
    params: SamplingParams,
    repeats: int = 1,
    tick: Callable[[str], None] = lambda name: None,
) -> list[Trial]:
    """Measure plain decoding, then each kind of drafts, on each workload; ``tick(name)`` before each kind.

    Raises:
        InvalidInput: drafts of no node, a workload that the model cannot serve, or a draft for another model.
        EngineError: the drafter failed.
    """
    if not nodes or min(nodes) < 1:
        raise InvalidInput(f"drafts of {list(nodes)} nodes: give sizes of at least 1")
    config = _config(model, workloads, params, max(nodes))
    tick("plain decoding")
    engine = model.engine(config)
    for workload in workloads:
        _answers(engine, workload, params)
    plain = {workload.kind: _measure(engine, workload, params, repeats) for workload in workloads}
    trials = [Trial(kind, "none", 0, taken, 1.0) for kind, (taken, _) in plain.items()]
    for name, count, drafter in plan(draft, nodes):
        tick(f"{name} {count}")
        del engine
        gc.collect()  # engines refer to themselves, and their caches are large
        speculation = SpeculationConfig(drafter=drafter, max_nodes=count, switch="always")
        engine = model.engine(config, speculation=speculation)
        for workload in workloads:
            trials.append(_trial(engine, workload, params, repeats, (name, count), *plain[workload.kind]))
    return trials


def advice(trials: Sequence[Trial], kind: str) -> Advice | None:
    """What the chains of one workload say; None if there were none, or none of their guesses was right."""
    chains = [trial for trial in trials if (trial.kind, trial.drafts) == (kind, "chain") and trial.acceptance > 0]
    if not chains:
        return None
    best = max(chains, key=lambda trial: trial.speedup)
    plain = next(trial.milliseconds for trial in trials if (trial.kind, trial.drafts) == (kind, "none"))
    cost = best.draft_milliseconds / plain / best.nodes
    verification = max(0.0, best.milliseconds * best.tokens - best.draft_milliseconds) / plain
    guesses, speedup = _best_chain(best.acceptance, cost, verification)
    rates = [
        next((r / 200 for r in range(201) if _best_chain(r / 200, share * cost, verification)[1] >= speedup), None)
        for share in (0.5, 2.0)
    ]
    return Advice(kind, best.acceptance, cost, verification, guesses, speedup, rates[0] or 0.0, rates[1])


def embedded_text(kind: str) -> str:
    """Texts that are always at hand: this package's source, and what its docstrings say."""
    sources = [path.read_text(encoding="utf-8") for path in sorted(FOLDER.rglob("*.py"))]
    if kind == "code":
        return "\n".join(sources)
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    return "\n\n".join(text for node in nodes if isinstance(node, documented) and (text := ast.get_docstring(node)))


def _config(model: CompiledModel, workloads: Sequence[Workload], params: SamplingParams, nodes: int) -> EngineConfig:
    """A cache that holds every sequence with all branches of its tree."""
    seats = max(len(workload.prompts) for workload in workloads)
    length = max(len(prompt) for workload in workloads for prompt in workload.prompts) + (params.max_tokens or 0)
    size = EngineConfig().block_size
    blocks = seats * (-(-length // size) + 2 + 2 * nodes) * len(model.facts.kv_groups)
    return EngineConfig(max_num_seqs=seats, num_blocks=blocks + 1, prefix_caching=False)


def _best_chain(rate: float, cost: float, verification: float) -> tuple[int, float]:
    """Guesses and speedup of the best chain."""
    speedups = {
        count: expected_tokens(rate, count) / (count * cost + verification) for count in range(1, MOST_GUESSES + 1)
    }
    return max(speedups.items(), key=lambda item: item[1])


def _trial(
    engine: Engine,
    workload: Workload,
    params: SamplingParams,
    repeats: int,
    name: tuple[str, int],
    plain: float,
    expected: list[list[int]],
) -> Trial:
    speculator = engine.speculator
    assert speculator is not None
    _answers(engine, workload, params)  # what is compiled and captured then is no cost of a draft
    speculator.statistics, speculator.draft_seconds = DraftStatistics(), 0.0
    taken, tokens = _measure(engine, workload, params, repeats)
    if speculator.error is not None:
        raise speculator.error
    assert tokens == expected, "speculation changed tokens"
    found = speculator.statistics
    steps = max(1.0, found.num_trees / len(workload.prompts))
    return Trial(
        workload.kind,
        *name,
        taken,
        plain / taken,
        1e3 * speculator.draft_seconds / steps,
        found.acceptance_rate,
        found.tokens_per_step,
        found.expected_tokens_per_step,
    )


def _measure(engine: Engine, workload: Workload, params: SamplingParams, repeats: int) -> tuple[float, list[list[int]]]:
    """The least milliseconds a token of each sequence over so many runs of a warm engine, and the tokens."""
    taken = []
    for _ in range(repeats):
        started = time.perf_counter()
        tokens = _answers(engine, workload, params)
        taken.append(time.perf_counter() - started)
    return 1e3 * min(taken) / max(len(own) for own in tokens), tokens


def _answers(engine: Engine, workload: Workload, params: SamplingParams) -> list[list[int]]:
    outputs = engine.generate([list(prompt) for prompt in workload.prompts], params, progress=False)
    for output in outputs:
        if output.error is not None:
            raise output.error
    return [output.outputs[0].token_ids for output in outputs]
