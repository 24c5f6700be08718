"""Renders a refusal as HTML: unproven operations grouped by remedy, or the error message."""

from collections import Counter
from collections.abc import Mapping
from html import escape
from typing import NamedTuple

from detcompile.commands.pages.page import fact_table, page, table
from detcompile.errors import CompilerNotFound, DetcompileError, StorageError, UncertifiedOp


class Refused(NamedTuple):
    """One line of a refusal: the operation, its place in the model's source, and the reason."""

    op: str
    place: str
    reason: str


class Remedy(NamedTuple):
    """Advice for refusals whose operation or reason contains one of these words."""

    title: str
    words: tuple[str, ...]
    advice: str


# The first one with a matching word applies.
REMEDIES = (
    Remedy(
        "Random numbers",
        ("random", "dropout"),
        "A generator is shared by the batch, so a row's numbers depend on the rows before it. Call model.eval() before"
        " compile(), and take noise out of the forward; sampling uses separate random numbers for each request.",
    ),
    Remedy(
        "Collectives",
        ("c10d", "ranks", "rank's", "all_reduce", "all_gather", "reduce_scatter"),
        "torch.distributed adds in an unspecified order. Leave sharding to compile(tp=...), and declare the numbers of"
        " ranks in Numerics(tp_sizes=...).",
    ),
    Remedy(
        "Attention outside of the interface",
        ("attention", "bmm", "batched matrix product", "scaled_dot_product"),
        "Attention has to go through transformers' AttentionInterface, with a causal or a sliding-window mask. A class"
        " that computes scores by itself needs an adapter; docs/models.md says which architectures have one.",
    ),
    Remedy(
        "Recurrences",
        ("recurrence",),
        "Layers that carry a state from token to token are certified where an adapter reads them step by step;"
        " docs/models.md says which architectures have one.",
    ),
    Remedy(
        "The number of rows",
        ("token or batch count", "step metadata", "numbers the rows", "a number read out"),
        "The model computes with the number of rows, or with all of them at once. Compute per row, from the token, its"
        " position and its own features.",
    ),
    Remedy(
        "Sums and ties in no fixed order",
        ("not pinned", "sum", "declared", "order", "product of floating-point", "convolution", "pool"),
        "A sum of floating-point numbers needs an order that is fixed. Write it with what has one: linear layers,"
        " means and sums over features, norms, attention; sort(stable=True) for ties.",
    ),
    Remedy(
        "Writes in place",
        ("writes", "mutating", "written", "uninitialized memory"),
        "A forward may write its KV cache and nothing else that outlives it. Return a new tensor instead.",
    ),
    Remedy(
        "Rows that meet",
        ("row", "reshape", "index", "axes", "slice", "view", "dimension", "scatter"),
        "Elements of several rows come together, or may. Keep the tokens' axis first and whole: no sum, sort, reshape"
        " or index across it.",
    ),
    Remedy(
        "Operations without a rule",
        (),
        "No rule says what the operation does to rows. Write it with operations that have a rule, or add one:"
        " CONTRIBUTING.md has the recipe.",
    ),
)
DOCTOR = "Run `detcompile doctor`: it tries out the compilers and the cache of this machine."


def refusal_page(error: DetcompileError, *, title: str, facts: Mapping[str, str]) -> str:
    """Render a refusal as HTML.

    Args:
        title: the model's name.
        facts: requested device and dtype, and date, by name.
    """
    lines = error.offenders if isinstance(error, UncertifiedOp) else ()
    heading = f"{title} was refused"
    if not lines:
        advice = f"<p>{escape(DOCTOR)}</p>" if isinstance(error, (CompilerNotFound, StorageError)) else ""
        summary = f"<p class='bad'>Nothing was compiled: {type(error).__name__}.</p><pre>{escape(str(error))}</pre>"
        return page(heading, fact_table(facts), summary, advice)
    groups: dict[Remedy, Counter[Refused]] = {}
    for line in lines:
        refused = refused_in(line)
        groups.setdefault(_remedy(refused), Counter())[refused] += 1
    summary = (
        f"<p class='bad'>Nothing was compiled: {len(lines)} operations could make a row's bits depend on other"
        " rows.</p><p>Each group has one remedy. Operations after a refused one were not checked, so"
        " more may follow.</p>"
    )
    listed = [_group(remedy, groups[remedy]) for remedy in REMEDIES if remedy in groups]
    return page(heading, fact_table(facts), summary, *listed)


def refused_in(line: str) -> Refused:
    """Parse ``op at place: reason``; any other line is a reason."""
    head, colon, reason = line.partition(": ")
    if not colon:
        return Refused("", "", line)
    op, at, place = head.rpartition(" at ")
    return Refused(op, place, reason) if at else Refused(head, "", reason)


def _remedy(refused: Refused) -> Remedy:
    text = f"{refused.op} {refused.reason}"
    return next(remedy for remedy in REMEDIES if not remedy.words or any(word in text for word in remedy.words))


def _group(remedy: Remedy, counts: Mapping[Refused, int]) -> str:
    rows = [(str(count), *refused) for refused, count in counts.items()]
    listed = table(remedy.title, ("times", "operation", "source", "reason"), rows, {1: "op", 3: "bad"})
    return f"<h2>{escape(remedy.title)}</h2><p>{escape(remedy.advice)}</p>{listed}"
