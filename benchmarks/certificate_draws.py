"""Draw random programs: if the certificate accepts one, each row must have the same bits in every batch.

    python -m benchmarks.certificate_draws --commit $(git rev-parse --short HEAD) [--draws 10000 --compiled 100]

Each draw is a program of benchmarks/random_programs.py, traced over unknown batch and token counts, rewritten and
certified. Rejected programs are counted by the operation that was named. Certified programs run over batches of several
sizes that share some rows (or sequences, if rows attend to earlier rows), and the shared rows are compared by bytes.

The rewritten graph is run operation by operation: the templates by their own kernels, the rest by torch. torch rounds
functions such as exp differently in a vector and in the loop's tail, so these are computed in float64 and rounded.
Of the certified ones ``--compiled`` are compiled by Inductor as well, as they are served.

Writes benchmarks/results/certificate-draws-cpu-<commit>.json; it records the seed of each failure.
"""

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.exc import BackendCompilerFailed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from benchmarks.random_programs import FEATURES, WEIGHTS, NoFit, Program
from detcompile import Numerics
from detcompile.errors import DetcompileError
from detcompile.passes.backend import Backend
from detcompile.passes.pipeline import decompositions, rewrite
from detcompile.passes.proof.certificate import certify
from detcompile.passes.proof.context import Role
from detcompile.passes.tracing import cause

__all__ = ["Verdict", "draw"]

NUMERICS = Numerics()
ROWS = Role("rows", {0: "batch", 1: "tokens"})
COMPOSITIONS = 3  # other batches, beside the first
LARGEST_BATCH, LONGEST = 6, 40
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
aten = torch.ops.aten
INEXACT = (
    aten.exp, aten.tanh, aten.sigmoid, aten.silu, aten.gelu, aten.sin, aten.log1p, aten.rsqrt, aten.pow, aten.erf,
    aten.log, aten.cos, aten.exp2,
)  # fmt: skip


class Verdict(NamedTuple):
    """Outcome of a draw: 'certified', 'refused', 'failed' (certified, but bits differ), 'unfit' (cannot be run)."""

    kind: str
    why: str = ""
    names: tuple[str, ...] = ()


class Exact(fx.Interpreter):
    """Runs a graph; functions that torch rounds by place are computed in float64."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if getattr(target, "overloadpacket", None) in INEXACT and isinstance(args[0], Tensor):
            given = args[0]
            return target(given.double(), *args[1:], **kwargs).to(given.dtype)
        return super().call_function(target, args, kwargs)


class Traced(NamedTuple):
    """A program as a graph of ATen operations, over every batch and token count for which ``holds``."""

    gm: fx.GraphModule
    has_rows: bool  # of its result: the first two dimensions are those of x
    holds: Callable[[int, int], bool]


def draw(seed: int, compiled: bool = False) -> Verdict:
    """Return the verdict on the program of this seed; ``compiled``: run it compiled by Inductor if it is certified."""
    program = Program(seed)
    try:
        traced = trace(program)
    except Exception as error:  # whatever a random program raises while it is traced
        return Verdict("unfit", type(error).__name__)
    names = tuple(program.names)
    try:
        run = _compiled(traced.gm) if compiled else _rewritten(traced.gm)
    except DetcompileError as refused:
        return Verdict("refused", getattr(refused, "offenders", [f"{type(refused).__name__} at {refused}"])[0], names)
    return Verdict(*_compared(run, traced, program.attends, random.Random(seed)), names)


def _rewritten(gm: fx.GraphModule) -> Callable[..., Tensor]:
    """Return the certified graph, run by operation; its first input is the batch, the others are weights."""
    rewrite(gm)
    x, *weights = gm.graph.find_nodes(op="placeholder")
    roles = {x.name: ROWS, **{node.name: Role("weight") for node in weights}}
    certify(gm.graph, roles, NUMERICS, None)
    return Exact(gm).run


def trace(program: Program) -> Traced:
    """Trace the program to ATen operations.

    Raises:
        NoFit: it specializes a count, or no operation that it draws fits.
    """
    shapes = ShapeEnv()
    with torch._dynamo.config.patch(fake_tensor_cache_enabled=False):  # half of the time, and no program comes twice
        mode = FakeTensorMode(shape_env=shapes)
    dynamic = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.DYNAMIC, DimDynamic.STATIC])
    x = mode.from_tensor(torch.zeros(5, 7, FEATURES), symbolic_context=dynamic)
    weights = [mode.from_tensor(w, static_shapes=True) for w in _weights()]
    with torch.no_grad(), enable_python_dispatcher():
        gm = make_fx(program, decomposition_table=decompositions())(x, *weights)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    symbols = [size.node.expr for size in x.shape[:2] if isinstance(size, torch.SymInt)]
    if len(symbols) < 2 or not all(symbol.is_Symbol for symbol in symbols):
        raise NoFit
    (result,) = next(iter(gm.graph.find_nodes(op="output"))).all_input_nodes
    result_sizes = [getattr(getattr(size, "node", None), "expr", None) for size in result.meta["val"].shape[:2]]

    def holds(batch: int, tokens: int) -> bool:
        sizes = dict(zip(symbols, (batch, tokens), strict=True))
        return all(bool(guard.expr.subs(sizes)) for guard in shapes.guards)

    return Traced(gm, result_sizes == symbols, holds)


def _weights() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in WEIGHTS]


def _compiled(gm: fx.GraphModule) -> Callable[..., Tensor]:
    """Compile the graph with the backend, with generated code."""
    backend = Backend(NUMERICS, lambda _, value: ROWS if isinstance(value.shape[0], torch.SymInt) else Role("weight"))
    torch._dynamo.reset()
    compiled = torch.compile(gm, backend=backend, fullgraph=True)

    def run(x: Tensor, *weights: Tensor) -> Tensor:
        torch._dynamo.mark_dynamic(x, [0, 1])
        try:
            with torch.no_grad():
                return compiled(x, *weights)
        except BackendCompilerFailed as error:
            raise cause(error) or error from None

    run(torch.randn(5, 7, FEATURES), *_weights())
    return run


def _batch(rng: random.Random, holds: Callable[[int, int], bool]) -> Tensor:
    """Return [B, T, F] of an admitted size: normal numbers, some rounded to be equal, and zeros of both signs."""
    for _ in range(50):
        batch, tokens = rng.randint(2, LARGEST_BATCH), rng.randint(2, LONGEST)
        if holds(batch, tokens):
            x = torch.randn(batch, tokens, FEATURES, generator=torch.Generator().manual_seed(rng.getrandbits(32)))
            return torch.where(torch.rand_like(x) < 0.4, (2 * x).round() / 2, x)
    raise NoFit


def _compared(run: Callable[..., Tensor], traced: Traced, attends: bool, rng: random.Random) -> tuple[str, str]:
    weights = _weights()
    torch.manual_seed(rng.getrandbits(32))
    try:
        x = _batch(rng, traced.holds)
        try:
            expected = run(x, *weights)
        except (RuntimeError, DetcompileError) as error:  # fake tensors allow what kernels do not have
            raise NoFit from error
        for _ in range(COMPOSITIONS):
            other = _batch(rng, traced.holds)
            kept = _shared_sequences(x, other, rng) if attends else _shared_rows(x, other, rng)
            actual = run(other, *weights)
            if traced.has_rows:
                same = all(_same(expected[ours], actual[theirs]) for ours, theirs in kept)
            else:
                same = _same(expected, actual)
            if not same:
                return "failed", f"{tuple(x.shape[:2])} and {tuple(other.shape[:2])}"
    except NoFit:
        return "unfit", "no other size"
    return "certified", ""


Place = tuple[int, int]


def _shared_rows(x: Tensor, other: Tensor, rng: random.Random) -> list[tuple[Place, Place]]:
    """Put rows of ``x`` anywhere into ``other``; return the old and new place of each."""
    places, seats = ([(b, t) for b in range(y.shape[0]) for t in range(y.shape[1])] for y in (x, other))
    count = rng.randint(1, min(len(places), len(seats)))
    kept = list(zip(rng.sample(places, count), rng.sample(seats, count), strict=True))
    for ours, theirs in kept:
        other[theirs] = x[ours]
    return kept


def _shared_sequences(x: Tensor, other: Tensor, rng: random.Random) -> list[tuple[Place, Place]]:
    """Put the beginnings of some sequences of ``x`` at the beginnings of other sequences."""
    count, length = rng.randint(1, min(len(x), len(other))), min(x.shape[1], other.shape[1])
    kept = list(zip(rng.sample(range(len(x)), count), rng.sample(range(len(other)), count), strict=True))
    for ours, theirs in kept:
        other[theirs, :length] = x[ours, :length]
    return [((ours, t), (theirs, t)) for ours, theirs in kept for t in range(length)]


def _same(a: Tensor, b: Tensor) -> bool:
    """Return whether all bits are equal."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return a.view(BITS[a.itemsize]).equal(b.view(BITS[b.itemsize]))


class Tally:
    """Outcomes of the draws so far."""

    def __init__(self, start: int) -> None:
        self.seeds = [start, start - 1]
        self.counts, self.through_inductor = Counter[str](), Counter[str]()
        self.reasons, self.names = Counter[str](), Counter[str]()
        self.failures: list[dict[str, Any]] = []
        self.began = time.monotonic()

    @property
    def fit(self) -> int:
        """Return the number of draws that could be run."""
        return self.counts.total() - self.counts["unfit"]

    def add(self, seed: int, verdict: Verdict, compiled: bool = False) -> None:
        """Count the verdict on a seed; compiled ones are counted separately."""
        if verdict.kind == "failed":
            self.failures.append({"seed": seed, "compiled": compiled, "why": verdict.why})
        if compiled:
            self.through_inductor[verdict.kind] += 1
            return
        self.seeds[1] = seed
        self.counts[verdict.kind] += 1
        if verdict.kind == "refused":
            self.reasons[verdict.why.split(" at ")[0]] += 1
        if verdict.kind == "certified":
            self.names.update(set(verdict.names))

    def save(self, path: Path, commit: str) -> None:
        """Write the counts so far."""
        result = {
            "commit": commit,
            "torch": torch.__version__,
            "draws": self.fit,
            "seeds": self.seeds,
            "counts": dict(sorted(self.counts.items())),
            "through_inductor": dict(sorted(self.through_inductor.items())),
            "certified_with": dict(self.names.most_common()),
            "refused_by": dict(self.reasons.most_common(40)),
            "failures": self.failures,
            "seconds": round(time.monotonic() - self.began),
        }
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Make the draws and write the counts."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.certificate_draws")
    parser.add_argument("--commit", required=True)
    parser.add_argument("--draws", type=int, default=10_000, help="draws that can be run")
    parser.add_argument(
        "--compiled", type=int, default=100, help="of the certified ones, those that Inductor compiles as well"
    )
    parser.add_argument("--first-seed", type=int, default=0)
    options = parser.parse_args()
    path = Path(__file__).parent / "results" / f"certificate-draws-cpu-{options.commit}.json"
    tally = Tally(options.first_seed)
    while tally.fit < options.draws:
        seed = tally.seeds[1] + 1
        verdict = draw(seed)
        tally.add(seed, verdict)
        due = options.compiled * tally.fit / options.draws
        if verdict.kind == "certified" and tally.through_inductor.total() < due:
            tally.add(seed, draw(seed, compiled=True), compiled=True)
        if verdict.kind != "unfit" and tally.fit % 100 == 0:
            tally.save(path, options.commit)  # a run that is cut short leaves what it has
            print(f"{tally.fit}: {dict(tally.counts)}, {dict(tally.through_inductor)}, {tally.failures}", flush=True)
    tally.save(path, options.commit)


if __name__ == "__main__":
    main()
