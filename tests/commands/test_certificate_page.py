"""The certificate's page is complete, escapes its texts and loads nothing else; its drawings of sums."""

import errno
import json
import re
import types
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from unittest import mock
from xml.etree import ElementTree

import pytest
import torch
from typer.testing import CliRunner

from detcompile.commands import cli
from detcompile.commands.axes import AxisResult
from detcompile.commands.pages.certificate_page import Measurement, certificate_page, read_measurements
from detcompile.commands.pages.order_drawing import order_drawing, order_tree
from detcompile.commands.pages.page import STYLE
from detcompile.commands.pages.refusal_page import REMEDIES, refusal_page, refused_in
from detcompile.errors import (
    ArchiveError,
    CompilerNotFound,
    InvalidInput,
    NumericsError,
    StorageError,
    UncertifiedOp,
    UnsupportedModel,
    WorkerError,
)
from detcompile.models.spec import ModelSpec
from detcompile.orders import KV, Blocked, EvenOdd, Experts, Row, Sequential, Tree
from detcompile.orders.numerics import Numerics
from detcompile.passes.proof.certificate import Certificate
from tests.model_cases import certified, compiled, random_model

VOID = {"meta", "br"}
REFUSALS = (
    *(ArchiveError, CompilerNotFound, InvalidInput, NumericsError, StorageError),
    *(UncertifiedOp, UnsupportedModel, WorkerError),
)
FACTS = {"device": "cpu: x86_64 <avx2>", "dtype": "float32", "made": "2026-01-02 03:04 UTC", "fingerprint": "f" * 64}
PARTS = {"weights": "a" * 64, "torch": "2.13"}
AXES = {"batch": Measurement(8, 1, 1, 0.0), "decode": Measurement(8, 2, 1, 1e-7)}


class Tags(HTMLParser):
    """Fails where tags do not close in their order, or what may be wide is in no box that scrolls; counts tags."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[tuple[str, str]] = []
        self.counts: dict[str, int] = {}

    def handle_starttag(self, tag, attrs):
        self.counts[tag] = self.counts.get(tag, 0) + 1
        assert not {name for name, _ in attrs} & {"src", "href"}, "the page needs something beside itself"
        assert tag not in ("svg", "table") or ("div", "scroll") in self.open, f"a {tag} outside of a box"
        if tag not in VOID:
            self.open.append((tag, dict(attrs).get("class", "")))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag


def tags_of(page: str) -> dict[str, int]:
    parser = Tags()
    parser.feed(page)
    assert not parser.open
    assert not re.search(r"url\(|@import|http-equiv|<script", page), "the page needs something beside itself"
    return parser.counts


def test_page_lists_every_operation_and_sum():
    certificate = compiled("qwen3", torch.float32).certificate
    page = certificate_page(certificate, title="a <model>", facts=FACTS, parts=PARTS)
    counts = tags_of(page)
    headings = counts["details"] + 1  # each fold has a table, and there is that of the classes
    assert counts["tr"] == len(certificate.counts) + len(certificate.entries) + len(PARTS) + headings
    assert counts["svg"] == len(certificate.sums) == len(certificate.orders)
    assert "a &lt;model&gt;" in page and "<model>" not in page
    assert "model.layers.0</b>" in page and "the proof of layers 0-1" in page and "around the layers" in page
    assert "Measured" not in page
    for message in (*FACTS.values(), *PARTS.values()):
        assert escape(message) in page
    for entry in certificate.entries:
        assert entry.layer or entry.kind == "movement", entry


def test_page_shows_measurements():
    certificate = Certificate((), Numerics())
    page = certificate_page(certificate, title="m", facts=FACTS, parts=PARTS, measured=AXES)
    assert tags_of(page)["tr"] == 1 + 1 + len(PARTS) + 1 + len(AXES)
    assert "<td>decode</td><td>8</td><td>2</td><td>1</td><td>1e-07</td>" in page
    assert "<p class='bad'>The bits were not equal along decode.</p>" in page
    held = certificate_page(certificate, title="m", facts=FACTS, parts=PARTS, measured={"batch": AXES["batch"]})
    assert "equal along every axis" in held and "class='bad'" not in held


def test_every_color_has_a_dark_variant():
    light, dark = (dict(re.findall(r"(--\w+): (#\w+)", part)) for part in STYLE.split("@media")[:2])
    used = set(re.findall(r"var\((--\w+)\)", STYLE))
    assert light.keys() == dark.keys() == used and all(light[name] != dark[name] for name in used)
    assert "prefers-color-scheme: dark" in STYLE and not re.search(r"(?<!-): ?#", STYLE.rsplit("} }", 1)[1])


def measured_file(place: Path, **changes: object) -> str:
    figures = {name: 1 for name in ("configurations", "unique_logits", "unique_outputs")}
    axes = {"batch": figures | {"max_probability_divergence": 0.0} | changes}
    place.write_text(json.dumps({"fingerprint": "f" * 64, "axes": axes}))
    return str(place)


def test_figures_of_verify_can_be_read(tmp_path):
    result = AxisResult()
    result.add((1,), torch.zeros(1, 3))
    result.add((1,), torch.tensor([[float("nan"), 0.0, 0.0]]))
    place = tmp_path / "verify.json"
    place.write_text(json.dumps({"fingerprint": "f" * 64, "axes": {"batch": result.to_json()}}))
    fingerprint, axes = read_measurements(place)
    assert fingerprint == "f" * 64 and axes["batch"].unique_logits == 2 and not axes["batch"].holds
    assert read_measurements(Path(measured_file(place)))[1]["batch"].holds


NO_FIGURES = [{"configurations": "4"}, {"unique_logits": -1}, {"max_probability_divergence": None}]


@pytest.mark.parametrize("changes", NO_FIGURES)
def test_invalid_figures_are_refused(changes, tmp_path):
    with pytest.raises(InvalidInput, match=r"verify.json is not what `detcompile verify MODEL --json` prints"):
        read_measurements(Path(measured_file(tmp_path / "verify.json", **changes)))
    (tmp_path / "verify.json").write_text("[]")
    with pytest.raises(InvalidInput, match="is not what"):
        read_measurements(tmp_path / "verify.json")


def test_figures_of_another_model_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(ModelSpec, "compile", lambda spec, tp: compiled("qwen3", torch.float32))
    page = tmp_path / "page.html"
    given = ["check", "m", "--html", str(page), "--verify", measured_file(tmp_path / "verify.json")]
    result = CliRunner().invoke(cli.app, given)
    assert isinstance(result.exception, InvalidInput) and "fingerprint ffff" in str(result.exception)
    assert not page.exists()
    result = CliRunner().invoke(cli.app, ["check", "m", "--verify", str(tmp_path / "verify.json")])
    assert result.exit_code == 2 and "--html" in result.output


def test_check_shows_measurements_of_same_model(tmp_path, monkeypatch):
    model = compiled("qwen3", torch.float32)
    monkeypatch.setattr(ModelSpec, "compile", lambda spec, tp: model)
    file = tmp_path / "verify.json"
    content = json.loads(Path(measured_file(file)).read_text())
    file.write_text(json.dumps(content | {"fingerprint": model.fingerprint}))
    result = CliRunner().invoke(cli.app, ["check", "m", "--html", str(tmp_path / "page.html"), "--verify", str(file)])
    page = (tmp_path / "page.html").read_text()
    assert result.exit_code == 0 and "equal along every axis" in page and model.fingerprint in page
    assert re.search(r"<dt>made</dt><dd>\d{4}-\d\d-\d\d \d\d:\d\d UTC</dd>", page)
    assert f"<dd>cpu: {escape(model.fingerprint_parts['device'])}</dd>" in page and "<dd>float32</dd>" in page


REFUSED = {
    "aten.rand.default at a.py:3 f: random numbers inside the graph": "Random numbers",
    "_c10d_functional.all_reduce.default at a.py:4 f: a collective of torch.distributed, …": "Collectives",
    "aten.bmm.default at a.py:3 f: a batched matrix product without a pinned order": "Attention outside",
    "the model calls attention 2 times, the graph holds 1 attention nodes": "Attention outside",
    "aten.conv1d at a.py:3 f: the recurrence's operands have different rows": "Recurrences",
    "aten.arange.default at a.py:3 f: numbers the rows of the batch (…)": "The number of rows",
    "aten.cumsum<T> at b.py:4 g: a running sum whose order is not pinned": "Sums and ties",
    "aten.copy_.default at b.py:4 g: mutating operation aten.copy_": "Writes in place",
    "output 0 of a.py:3 f: holds batch, not the rows that the caller chose": "Rows that meet",
    "aten.moon.default at b.py:9 g: no rule proves this operation independent of the batch": "Operations without",
}


def test_refusal_groups_operations_by_remedy():
    lines = (*REFUSED, *REFUSED)
    counts = tags_of(page := refusal_page(UncertifiedOp("many", lines), title="m", facts={"device": "cpu"}))
    groups = set(REFUSED.values())
    assert counts["h2"] == len(groups) == len(REMEDIES) and counts["tr"] == len(REFUSED) + len(groups)
    assert "aten.cumsum&lt;T&gt;" in page and "20 operations could make" in page and "<dd>cpu</dd>" in page
    sections = page.split("<h2>")[1:]
    for line, title in REFUSED.items():
        section = next(item for item in sections if item.startswith(title))
        assert escape(refused_in(line).reason) in section and "<td>2</td>" in section, line
    assert [remedy.title for remedy in REMEDIES if escape(remedy.advice) not in page] == []


def test_refusal_line_is_parsed():
    assert refused_in("<f at 0x1> at a.py:3 in g: a: b") == ("<f at 0x1>", "a.py:3 in g", "a: b")
    assert refused_in("k_cache[0]: keys or values of attention are not saved") == (
        *("k_cache[0]", ""),
        "keys or values of attention are not saved",
    )
    assert refused_in("nothing of the kind") == ("", "", "nothing of the kind")


def test_refused_model_gets_page_with_advice(tmp_path, monkeypatch):
    def refused(spec, tp):
        model = random_model("llama", torch.float32, num_hidden_layers=1)
        mlp = model.model.layers[0].mlp
        mlp.forward = types.MethodType(lambda s, x: s.down_proj(s.up_proj(x.cumsum(1) + torch.rand_like(x))), mlp)
        return certified(model)

    monkeypatch.setattr(ModelSpec, "compile", refused)
    given = ["check", "some/model", "--dtype", "float32", "--html", str(tmp_path / "page.html")]
    result = CliRunner().invoke(cli.app, given)
    assert isinstance(result.exception, UncertifiedOp)
    page = (tmp_path / "page.html").read_text()
    assert tags_of(page)["h2"] == 2 and "Call model.eval()" in page and "aten.cumsum.default" in page
    assert "test_certificate_page.py:" in page and "<dd>float32</dd>" in page


@pytest.mark.parametrize(
    ("error", "calls"),
    [
        (UncertifiedOp("1 operation", ("aten.bmm.default at a.py:3 f: none",)), "aten.bmm.default"),
        *((kind(f"the <model> of {kind.__name__}"), f"the &lt;model&gt; of {kind.__name__}") for kind in REFUSALS),
    ],
)
def test_check_writes_every_refusal_and_still_fails(tmp_path, monkeypatch, error, calls):
    monkeypatch.setattr(ModelSpec, "compile", mock.Mock(side_effect=error))
    result = CliRunner().invoke(cli.app, ["check", "some/model", "--html", str(tmp_path / "page.html")])
    assert result.exception is error
    page = (tmp_path / "page.html").read_text()
    assert calls in page and "model was refused" in page and tags_of(page)["h1"] == 1
    assert ("detcompile doctor" in page) == isinstance(error, (CompilerNotFound, StorageError))


def test_unwritable_page_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(ModelSpec, "compile", mock.Mock(side_effect=UnsupportedModel("no")))
    place = tmp_path / "page.html"
    full = mock.patch.object(type(place), "write_text", side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with full:
        result = CliRunner().invoke(cli.app, ["check", "some/model", "--html", str(place)])
    assert isinstance(result.exception, StorageError) and f"{place} cannot be used: No space" in str(result.exception)


@pytest.mark.parametrize(
    "order",
    [
        Sequential(96),
        Blocked(300, 128),
        EvenOdd(300, 32),
        EvenOdd(7, 32),
        Tree(768, (2, 2, 2), Sequential(96)),
        Tree(6144, (3, 16), Blocked(128, 128)),
        Row(4096, 64, 4),
        Row(4096, 64, 1, (2, 2), 256),
        KV(512),
        Experts(20),
    ],
    ids=str,
)
def test_every_order_is_drawn_within_its_frame(order):
    drawing = ElementTree.fromstring(order_drawing(order))
    assert drawing.get("aria-label") == str(order)
    width, height = float(drawing.get("width")), float(drawing.get("height"))
    assert drawing.get("viewBox") == f"0 0 {width:.0f} {height:.0f}"  # so that it fits a narrower page
    for box in drawing.iter("{http://www.w3.org/2000/svg}rect"):
        left, top = float(box.get("x")), float(box.get("y"))
        assert left >= 0 and left + float(box.get("width")) <= width + 1
        assert top >= 0 and top + float(box.get("height")) <= height + 1


@pytest.mark.parametrize("leaf", [Blocked(192, 128), EvenOdd(192, 32)], ids=str)
def test_tree_leaves_are_its_ranges(leaf):
    """The drawing has every k once, from left to right."""
    tree = order_tree(Tree(768, (2, 2), leaf))
    drawn = [line for node in leaves(tree) for line in node.text if line.startswith("k = ")]
    ranges = [tuple(map(int, re.findall(r"\d+", line))) for line in drawn]
    assert [k for first, last in ranges for k in range(first, last + 1)] == list(range(768))


def leaves(node):
    return [leaf for child in node.children for leaf in leaves(child)] if node.children else [node]
