"""Measures speculative drafts on a workload, and estimates which draft size pays off.

The formula is from Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", ICML 2023. Let a be
the acceptance rate, n the guesses in a draft, c the cost of a guess and v that of a verification, both in plain steps.
The speedup is (1 - a^(n + 1)) / (1 - a) / (n c + v).
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

FOLDER = Path(detcompile.__file__).parent
MOST_GUESSES = 16
MOST_CHARACTERS = 16  # upper bound of the mean characters per token


@dataclass(frozen=True)
class Workload:
    """Prompts cut from a text.

    Args:
        kind: "code" or "prose".
        prompts: token ids of each prompt.
    """

    kind: str
    prompts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, kind: str, text: str, model: CompiledModel, count: int, length: int, seed: int = 0) -> "Workload":
        """Cut ``count`` prompts of ``length`` tokens from random lines of a text.

        Raises:
            InvalidInput: the model has no tokenizer, or the text is too short.
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
    """Measurements of one kind of drafts on one workload.

    Attributes:
        kind: the workload's kind.
        drafts: "none", "n-gram", "chain" or "grown".
        nodes: guesses in a draft.
        milliseconds: time per token of each sequence.
        speedup: speedup over plain decoding.
        draft_milliseconds: drafting time per step.
        acceptance: share of verified guesses that were right.
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
        """Return the measurements as a JSON object."""
        return asdict(self)


@dataclass(frozen=True)
class Advice:
    """Advice on a draft model's size, from its best chain.

    Attributes:
        kind: the workload's kind.
        acceptance: share of verified guesses that were right.
        cost: time of a guess, in plain steps.
        verification: time of a step without drafting, in plain steps.
        guesses, speedup: the optimum of the formula.
        half_rate: acceptance at which a draft of half the cost is equally fast.
        double_rate: acceptance at which a draft of twice the cost is equally fast; None if no rate is.
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
    """Yield the kinds of drafts to try: name, nodes, drafter."""
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
    """Measure plain decoding, then each kind of drafts, on each workload; call ``tick(name)`` before each kind.

    Raises:
        InvalidInput: a draft size is below 1, the model cannot serve a workload, or the draft model does not fit.
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
        gc.collect()  # engines are reference cycles with large caches
        speculation = SpeculationConfig(drafter=drafter, max_nodes=count, switch="always")
        engine = model.engine(config, speculation=speculation)
        for workload in workloads:
            trials.append(_trial(engine, workload, params, repeats, (name, count), *plain[workload.kind]))
    return trials


def advice(trials: Sequence[Trial], kind: str) -> Advice | None:
    """Return advice from the chains of one workload; None if there are none, or no guess was right."""
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
    """Return built-in text: this package's source, or its docstrings."""
    sources = [path.read_text(encoding="utf-8") for path in sorted(FOLDER.rglob("*.py"))]
    if kind == "code":
        return "\n".join(sources)
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    return "\n\n".join(text for node in nodes if isinstance(node, documented) and (text := ast.get_docstring(node)))


def _config(model: CompiledModel, workloads: Sequence[Workload], params: SamplingParams, nodes: int) -> EngineConfig:
    """Return a config whose cache holds every sequence with all branches of its draft tree."""
    slots = max(len(workload.prompts) for workload in workloads)
    length = max(len(prompt) for workload in workloads for prompt in workload.prompts) + (params.max_tokens or 0)
    size = EngineConfig().block_size
    blocks = slots * (-(-length // size) + 2 + 2 * nodes) * len(model.facts.kv_groups)
    return EngineConfig(max_num_seqs=slots, num_blocks=blocks + 1, prefix_caching=False)


def _best_chain(rate: float, cost: float, verification: float) -> tuple[int, float]:
    """Return guesses and speedup of the best chain by the formula."""
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
    _answers(engine, workload, params)  # warm up: compile kernels and capture graphs
    speculator.statistics, speculator.draft_seconds = DraftStatistics(), 0.0
    taken, tokens = _measure(engine, workload, params, repeats)
    if speculator.error is not None:
        raise speculator.error
    assert tokens == expected, "speculation changed tokens"
    statistics = speculator.statistics
    steps = max(1.0, statistics.num_trees / len(workload.prompts))
    return Trial(
        workload.kind,
        *name,
        taken,
        plain / taken,
        1e3 * speculator.draft_seconds / steps,
        statistics.acceptance_rate,
        statistics.tokens_per_step,
        statistics.expected_tokens_per_step,
    )


def _measure(engine: Engine, workload: Workload, params: SamplingParams, repeats: int) -> tuple[float, list[list[int]]]:
    """Return the fewest milliseconds per token over ``repeats`` runs of a warm engine, and the tokens."""
    taken = []
    for _ in range(repeats):
        started = time.perf_counter()
        tokens = _answers(engine, workload, params)
        taken.append(time.perf_counter() - started)
    return 1e3 * min(taken) / max(map(len, tokens)), tokens


def _answers(engine: Engine, workload: Workload, params: SamplingParams) -> list[list[int]]:
    outputs = engine.generate([list(prompt) for prompt in workload.prompts], params, progress=False)
    for output in outputs:
        if output.error is not None:
            raise output.error
    return [output.outputs[0].token_ids for output in outputs]
