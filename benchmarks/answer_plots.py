"""Draw two answers of transformers to one prompt beside detcompile's, as SVG, from real_model.py's results."""

import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import escape

REAL_MODEL = "real-model-amd-epyc-8b9ccb0.json"
WIDTH, LEFT, LINE, LETTERS = 820, 8, 16, 36  # units of the drawing; letters of a line
TOP = 96  # of the texts
RED, MUTED = "#b3261e", "#666"
COLUMNS = 3


def answer_plots(results: Path) -> dict[str, str]:
    """Return SVGs by file name."""
    return {"answers.svg": answer_plot(json.loads((results / REAL_MODEL).read_text()))}


def answer_plot(report: dict) -> str:
    """Draw the first prompt to which transformers gave two answers; differences are red."""
    part = report["answers"]
    how, prompt = next(
        (how, place)
        for how in ("greedy", "temperature 0.8")
        for place, texts in enumerate(part[how]["transformers"]["answers"])
        if len(texts) > 1
    )
    theirs, (ours, *others) = (part[how][side]["answers"][prompt] for side in ("transformers", "detcompile"))
    assert not others, "detcompile gave two answers"
    at = _first_difference(theirs[0]["text"], theirs[1]["text"])
    columns = [(f"transformers, {answer['ways'][0]}", answer["text"], at) for answer in theirs[:2]]
    columns.append((f"detcompile, all {len(ours['ways'])} ways", ours["text"], len(ours["text"])))
    lines = [list(_lines(text, split)) for _, text, split in columns]
    height = TOP + LINE * max(map(len, lines)) + 24
    parts = [
        f'<text x="{LEFT}" y="22" font-size="15">{escape(part["questions"][prompt])}</text>',
        f'<text x="{LEFT}" y="42" font-size="12" fill="{MUTED}">{escape(_note(report, how))}</text>',
    ]
    for place, ((title, _, _), rows) in enumerate(zip(columns, lines)):
        across = LEFT + place * (WIDTH - LEFT) / COLUMNS
        parts.append(f'<text x="{across:.0f}" y="72" font-size="13" font-weight="bold">{escape(title)}</text>')
        for number, (same, other) in enumerate(rows):
            red = f'<tspan fill="{RED}" font-weight="bold">{escape(other)}</tspan>' if other else ""
            y = TOP + number * LINE
            parts.append(
                f'<text x="{across:.0f}" y="{y}" font-size="12" xml:space="preserve">{escape(same)}{red}</text>'
            )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>"]) + "\n"


def _note(report: dict, how: str) -> str:
    model = {"smollm2": "SmolLM2-135M-Instruct"}.get(report["model"], report["model"])
    versions = f"torch {report['torch']}, transformers {report['transformers']}"
    return f"{model}, {how}, {report['dtype']}, {report['answers']['tokens']} tokens; {report['hardware']}, {versions}"


def _first_difference(one: str, other: str) -> int:
    """Return the place of the first word that differs."""
    at = next((at for at, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
    return max(one.rfind(" ", 0, at), one.rfind("\n", 0, at)) + 1


def _lines(text: str, split: int) -> Iterator[tuple[str, str]]:
    """Yield the lines of a wrapped text, each as its parts before and after the position ``split`` of the text."""
    start = 0
    for paragraph in re.sub(r"\n{2,}", "\n", text).split("\n"):
        for line in textwrap.wrap(paragraph, LETTERS) or [""]:
            start = text.index(line, start)
            cut = min(max(split - start, 0), len(line))
            yield line[:cut], line[cut:]
            start += len(line)
