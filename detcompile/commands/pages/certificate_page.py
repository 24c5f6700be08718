"""Renders a certificate as HTML: the claim, measurements, sums as trees, and operations."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from detcompile.commands.pages.order_drawing import order_drawing
from detcompile.commands.pages.page import fact_table, page, scrolled, table
from detcompile.commands.text_files import read_text_file
from detcompile.errors import InvalidInput
from detcompile.passes.proof.certificate import Certificate, Entry

CLASSES = {
    "pointwise": "each element is computed from its own inputs alone",
    "movement": "bytes are moved, nothing is computed",
    "order-free": "maxima and integer sums, which no order changes",
    "template": "a kernel of detcompile, whose sum has the order shown",
    "attention": "a token's sums run over the keys of its prefix, in the order shown",
    "collective": "values of one row meet across ranks, in the declared tree",
}
CLAIM = (
    "<p>Every value of a row is computed from that row alone, and no sum's order depends on the batch. So the bits of a"
    " row's logits depend only on the weights and on that row's tokens. Each operation of the compiled graph belongs to"
    " one of these classes; none was refused.</p>"
)
COUNTS = ("configurations", "unique_logits", "unique_outputs")
DIVERGENCE = "max_probability_divergence"


@dataclass(frozen=True)
class Measurement:
    """The measurements of one axis. Equal bits mean one unique result and a divergence of 0."""

    configurations: int
    unique_logits: int
    unique_outputs: int
    divergence: float

    @property
    def holds(self) -> bool:
        """True if every configuration gave the same bits."""
        return self.unique_logits == 1 and self.divergence == 0.0


def certificate_page(
    certificate: Certificate,
    *,
    title: str,
    facts: Mapping[str, str],
    parts: Mapping[str, str],
    measured: Mapping[str, Measurement] | None = None,
) -> str:
    """Render a certificate as HTML.

    Args:
        title: the model's name.
        facts: device, dtype, date and fingerprint, by name.
        parts: the parts of the fingerprint.
        measured: results of `detcompile verify` by axis; None if not given.
    """
    claims = [(str(count), kind, CLASSES.get(kind, "")) for kind, count in sorted(certificate.counts.items())]
    sums = "".join(_sum(str(order), order_drawing(order), certificate.entries) for order in certificate.sums)
    return page(
        f"Certificate of {title}",
        fact_table({**facts, "numerics": str(certificate.numerics)}),
        "<details><summary>the fingerprint's parts</summary>",
        table("the fingerprint's parts", ("part", "value"), parts.items()),
        "</details>",
        CLAIM,
        table("classes", ("operations", "class", "why the batch cannot matter"), claims),
        _measured(measured),
        f"<h2>Sums</h2>{sums}",
        f"<h2>Operations, by layer</h2>{_layers(certificate.entries)}",
    )


def _measured(measured: Mapping[str, Measurement] | None) -> str:
    if measured is None:
        return ""
    rows = [
        (axis, str(one.configurations), str(one.unique_logits), str(one.unique_outputs), f"{one.divergence:.3g}")
        for axis, one in measured.items()
    ]
    failed = [axis for axis, one in measured.items() if not one.holds]
    verdict = "<p class='good'>The bits were equal along every axis that was measured.</p>"
    if failed:
        verdict = f"<p class='bad'>The bits were not equal along {escape(', '.join(failed))}.</p>"
    names = ("axis", "configurations", "unique logits", "unique outputs", "max probability divergence")
    return f"<h2>Measured by detcompile verify</h2>{verdict}{table('measured axes', names, rows)}"


def _sum(order: str, drawing: str, entries: Sequence[Entry]) -> str:
    matching = [entry for entry in entries if entry.order == order]
    names = ", ".join(sorted({entry.op.removeprefix("detcompile.").removesuffix(".default") for entry in matching}))
    count = sum(entry.count for entry in matching)
    caption = f"<figcaption><b>{escape(order)}</b>: {count} × {escape(names)}</figcaption>"
    return f"<figure>{caption}{scrolled(drawing, order)}</figure>"


def _layers(entries: Sequence[Entry]) -> str:
    """Render a collapsible table for each run of operations from one block of the model."""
    folds = []
    for (block, shared), stretch in groupby(entries, key=lambda entry: (_block(entry.layer), entry.layers)):
        block_entries = list(stretch)
        sums = sum(bool(entry.order) for entry in block_entries)
        name = block or "around the layers"
        rows = [(e.op, e.layer, e.place, e.kind, e.order, e.proof) for e in block_entries]
        listed = table(name, ("operation", "layer", "source", "class", "order", "proof"), rows, {0: "op"})
        counted = f"{len(block_entries)} operations, {sums} with sums"
        counted += f"; the proof of layers {shared}, of one structure" if shared else ""
        summary = f"<summary><b>{escape(name)}</b> <span class='muted'>{counted}</span></summary>"
        folds.append(f"<details>{summary}{listed}</details>")
    return "".join(folds)


def _block(layer: str) -> str:
    """Return model.layers.3 for model.layers.3.self_attn.q_proj; empty outside of numbered blocks."""
    parts = layer.split(".")
    numbered = next((index for index, part in enumerate(parts) if part.isdigit()), None)
    return "" if numbered is None else ".".join(parts[: numbered + 1])


def read_measurements(path: Path) -> tuple[str, dict[str, Measurement]]:
    """Return the fingerprint, and the measurements by axis.

    Raises:
        InvalidInput: the file cannot be read, or has another format.
    """
    try:
        content = json.loads(read_text_file(path))
        return str(content["fingerprint"]), {axis: _read(one) for axis, one in content["axes"].items()}
    except InvalidInput:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidInput(
            f"{path} is not what `detcompile verify MODEL --json` prints ({type(error).__name__}: {error})"
        ) from error


def _read(figures: Any) -> Measurement:
    counts, divergence = {name: figures[name] for name in COUNTS}, figures[DIVERGENCE]
    if not all(type(count) is int and count >= 0 for count in counts.values()) or type(divergence) is not float:
        raise ValueError(f"{[*counts.values(), divergence]} are not measurements of an axis")
    return Measurement(**counts, divergence=divergence)
