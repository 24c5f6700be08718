"""The certificate, or the refusal, as one HTML page that needs nothing beside itself: for people who read proofs."""

from collections.abc import Sequence
from html import escape
from itertools import groupby

from detcompile.commands.pages.order_drawing import order_drawing
from detcompile.errors import DetcompileError, UncertifiedOp
from detcompile.passes.proof.certificate import Certificate, Entry

__all__ = ["certificate_page", "refusal_page"]

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76em; margin: 2em auto; padding: 0 1em; color: #222; }
h1 { font-size: 1.5em; } h2 { margin-top: 2em; font-size: 1.2em; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th, td { text-align: left; padding: 2px 10px 2px 0; vertical-align: top; border-bottom: 1px solid #eee; }
code, td.op { font-family: ui-monospace, monospace; font-size: 12px; }
summary { cursor: pointer; padding: 3px 0; } figure { margin: 1em 0; overflow-x: auto; }
.refused { color: #a00; } .muted { color: #666; }
svg text { font: 11px ui-monospace, monospace; fill: #222; } svg line { stroke: #999; }
svg rect { fill: #eef3fa; stroke: #7a94b8; }
"""
CLASSES = {
    "pointwise": "each element is computed from its own inputs alone",
    "movement": "bytes are moved, nothing is computed",
    "order-free": "maxima and integer sums, which no order changes",
    "template": "the sum is a template of ours, in the order that is given",
    "attention": "a token's sums run over the keys of its own prefix, in the order that is given",
    "collective": "values of one row meet across ranks, in the declared tree",
}


def certificate_page(certificate: Certificate, *, title: str, fingerprint: str) -> str:
    """HTML of a proof: what is claimed, the sums with their trees, every operation by layer.

    Args:
        title: the model's name.
    """
    counts = certificate.counts
    claims = "".join(
        f"<tr><td>{count}</td><td>{escape(kind)}</td><td>{escape(CLASSES.get(kind, ''))}</td></tr>"
        for kind, count in sorted(counts.items())
    )
    sums = "".join(_sum(str(order), order_drawing(order), certificate.entries) for order in certificate.sums)
    return _page(
        f"Certificate of {title}",
        "<p>Row <i>t</i> of every value reads row <i>t</i> alone, and no order of a sum depends on the batch: so the"
        " bits of a row's logits depend on the weights and on that row's own tokens. Every operation of the compiled"
        " graph is of one of these classes; nothing is refused.</p>"
        f"<p>{escape(str(certificate.numerics))}<br>fingerprint <code>{escape(fingerprint)}</code></p>"
        f"<table><tr><th>operations</th><th>class</th><th>why the batch cannot matter</th></tr>{claims}</table>",
        f"<h2>Sums</h2>{sums}",
        f"<h2>Operations, by layer</h2>{_layers(certificate.entries)}",
    )


def refusal_page(error: DetcompileError, *, title: str) -> str:
    """HTML of a refusal: each operation that no rule proves, where it stands in the model's source, and why; or what
    else the error says."""
    lines = error.offenders if isinstance(error, UncertifiedOp) else ()
    if not lines:
        told = f"<p class='refused'>Nothing was compiled: {type(error).__name__}.</p><pre>{escape(str(error))}</pre>"
        return _page(f"{title} was refused", told)
    rows = "".join(f"<tr><td class='refused'>{escape(line)}</td></tr>" for line in lines)
    return _page(
        f"{title} was refused",
        "<p class='refused'>Nothing was compiled: these operations could make a row's bits depend on other rows.</p>"
        f"<table><tr><th>operation, place, reason</th></tr>{rows}</table>",
    )


def _page(title: str, *parts: str) -> str:
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{escape(title)}</title>"
        f"<style>{STYLE}</style></head><body><h1>{escape(title)}</h1>{''.join(parts)}</body></html>\n"
    )


def _sum(order: str, drawing: str, entries: Sequence[Entry]) -> str:
    own = [entry for entry in entries if entry.order == order]
    names = ", ".join(sorted({entry.op.removeprefix("detcompile.").removesuffix(".default") for entry in own}))
    count = sum(entry.count for entry in own)
    return f"<figure><figcaption><b>{escape(order)}</b>: {count} × {escape(names)}</figcaption>{drawing}</figure>"


def _layers(entries: Sequence[Entry]) -> str:
    """A fold for each stretch of operations that came from one block of the model."""
    folds = []
    for (block, shared), stretch in groupby(entries, key=lambda entry: (_block(entry.layer), entry.layers)):
        own = list(stretch)
        sums = sum(bool(entry.order) for entry in own)
        rows = "".join(
            f"<tr><td class='op'>{escape(e.op)}</td><td>{escape(e.layer)}</td><td>{escape(e.place)}</td>"
            f"<td>{escape(e.kind)}</td><td>{escape(e.order)}</td><td>{escape(e.proof)}</td></tr>"
            for e in own
        )
        folds.append(
            f"<details><summary><b>{escape(block or 'around the layers')}</b>"
            f" <span class='muted'>{len(own)} operations, {sums} with sums"
            f"{f'; the proof of layers {shared}, of one structure' if shared else ''}</span></summary>"
            "<table><tr><th>operation</th><th>layer</th><th>source</th><th>class</th><th>order</th><th>proof</th></tr>"
            f"{rows}</table></details>"
        )
    return "".join(folds)


def _block(layer: str) -> str:
    """model.layers.3.self_attn.q_proj -> model.layers.3; what is in no numbered block has none."""
    parts = layer.split(".")
    numbered = next((index for index, part in enumerate(parts) if part.isdigit()), None)
    return "" if numbered is None else ".".join(parts[: numbered + 1])
