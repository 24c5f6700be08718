"""Output of `detcompile tune-speculation`: a table, an SVG plot, and advice on the draft's size."""

from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from rich.table import Table

from detcompile.commands.text_files import read_text_file
from detcompile.commands.tuning.draft_trials import Advice, Trial, embedded_text
from detcompile.errors import InvalidInput

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 760, 320, 44, 50, 64
COLORS = ("#2a6f97", "#81b29a", "#e07a5f")


def read_text(kind: str, file: Path | None) -> str:
    """Return a workload's text: of the file, or built-in text if ``file`` is None.

    Raises:
        InvalidInput: the file cannot be read.
    """
    if file is None:
        return embedded_text(kind)
    try:
        return read_text_file(file)
    except InvalidInput as error:
        raise InvalidInput(f"--{kind}: {error}") from error


def trials_table(trials: Sequence[Trial]) -> Table:
    """Return a table of all trials; the fastest of each workload is bold."""
    table = Table(
        title="Speculation on this machine",
        caption="times: as soon as plain decoding; draft: ms of a step for drafting; right: α, share of the guesses"
        " reached that were; expect: tokens a step by (1-α^(K+1))/(1-α)",
    )
    for name in ("text", "drafts", "nodes", "ms a\ntoken", "times", "draft", "right", "tokens\na step", "expect"):
        table.add_column(name, justify="left" if name in ("text", "drafts") else "right")
    fastest = {trial.kind: trial for trial in sorted(trials, key=lambda trial: trial.speedup)}
    for trial in sorted(trials, key=lambda trial: trial.kind):
        plain = trial.drafts == "none"
        drafting = () if plain else (f"{trial.draft_milliseconds:.2f}", f"{trial.acceptance:.2f}")
        tokens = () if plain else (f"{trial.tokens:.2f}", f"{trial.expected:.2f}")
        cells = (f"{trial.milliseconds:.2f}", f"{trial.speedup:.2f}", *drafting, *tokens)
        style = "bold" if fastest[trial.kind] is trial else ""
        table.add_row(trial.kind, trial.drafts, "" if plain else str(trial.nodes), *cells, style=style)
    return table


def advice_text(trials: Sequence[Trial], advices: Sequence[Advice]) -> str:
    """Return which drafts to use, and what another draft model would need to achieve."""
    lines = []
    for kind in sorted({trial.kind for trial in trials}):
        best = max((trial for trial in trials if trial.kind == kind), key=lambda trial: trial.speedup)
        if best.drafts == "none":
            lines.append(f"{kind}: nothing tried was faster than plain decoding; leave speculation off.")
        else:
            times = f"{best.speedup:.2f} times plain decoding"
            lines.append(f"{kind}: take {best.drafts} with {best.nodes} nodes, {times}.")
    for one in advices:
        double = "no rate is enough" if one.double_rate is None else f"{one.double_rate:.2f} or more is needed"
        lines.append(
            f"{one.kind}, draft size: a guess costs {one.cost:.3f} plain steps and is right {one.acceptance:.2f} of the"
            f" time, verifying costs {one.verification:.2f}; by the formula the best number is {one.guesses},"
            f" with {one.speedup:.2f} times plain decoding. A draft of half the cost is as good if it is right"
            f" {one.half_rate:.2f} of the time; of twice the cost, {double}."
        )
    return "\n".join(lines)


def speedup_plot(trials: Sequence[Trial], note: str) -> str:
    """Plot the speedup over nodes as SVG: a panel for each workload, a line for each kind of drafts."""
    drafted = [trial for trial in trials if trial.drafts != "none"]
    kinds, names = sorted({trial.kind for trial in drafted}), list(dict.fromkeys(trial.drafts for trial in drafted))
    most = max(trial.nodes for trial in drafted)
    top = 1.1 * max(1.0, *(trial.speedup for trial in drafted))
    wide = (WIDTH - LEFT - 8) / len(kinds)

    def at(panel: int, nodes: float, speedup: float) -> tuple[float, float]:
        across = LEFT + panel * wide + nodes / most * (wide - 26)
        return across, HEIGHT - BOTTOM - speedup / top * (HEIGHT - BOTTOM - TOP)

    parts = [_text(LEFT, 20, "Speculation: times plain decoding, over the nodes of a draft", 15)]
    parts.append(_text(LEFT, HEIGHT - 8, note, 11))
    for place, name in enumerate(names):
        parts.append(f'<rect x="{LEFT + 120 * place}" y="30" width="10" height="10" fill="{COLORS[place]}"/>')
        parts.append(_text(LEFT + 120 * place + 14, 39, name, 11))
    for panel, kind in enumerate(kinds):
        (left, y), (right, _) = at(panel, 0, 1.0), at(panel, most, 1.0)
        parts.append(f'<line x1="{left:.1f}" x2="{right:.1f}" y1="{y:.1f}" y2="{y:.1f}" stroke="#333"/>')
        parts.append(_text(left, 58, kind, 11))
        parts.append(_text(left - 4, y + 4, "1", 10, "end"))
        for name, color in zip(names, COLORS):
            matching = sorted((t for t in drafted if (t.kind, t.drafts) == (kind, name)), key=lambda trial: trial.nodes)
            places = [at(panel, trial.nodes, trial.speedup) for trial in matching]
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in places]
        for nodes in sorted({trial.nodes for trial in drafted}):
            parts.append(_text(at(panel, nodes, 0)[0], HEIGHT - BOTTOM + 15, str(nodes), 10, "middle"))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, size: int, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{escape(text)}</text>'
