"""The certificate's page: whole, escaped, needing nothing beside itself; and the drawings of sums."""

import errno
import re
from html.parser import HTMLParser
from unittest import mock
from xml.etree import ElementTree

import pytest
import torch
from typer.testing import CliRunner

from detcompile.commands import cli
from detcompile.commands.pages.certificate_page import certificate_page, refusal_page
from detcompile.commands.pages.order_drawing import order_drawing, order_tree
from detcompile.commands.verification import ModelSpec
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
from detcompile.orders import KV, Blocked, EvenOdd, Experts, Row, Sequential, Tree
from tests.model_cases import compiled

VOID = {"meta", "br"}
REFUSALS = (
    *(ArchiveError, CompilerNotFound, InvalidInput, NumericsError, StorageError),
    *(UncertifiedOp, UnsupportedModel, WorkerError),
)


class Tags(HTMLParser):
    """Fails where tags do not close in their order; counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.counts: dict[str, int] = {}

    def handle_starttag(self, tag, attrs):
        self.counts[tag] = self.counts.get(tag, 0) + 1
        assert not {name for name, _ in attrs} & {"src", "href"}, "the page needs something beside itself"
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def tags_of(page: str) -> dict[str, int]:
    parser = Tags()
    parser.feed(page)
    assert not parser.open
    return parser.counts


def test_a_page_holds_every_operation_and_every_sum():
    certificate = compiled("qwen3", torch.float32).certificate
    counts = tags_of(page := certificate_page(certificate, title="a <model>", fingerprint="f" * 64))
    classes, operations = 1 + len(certificate.counts), len(certificate.entries)
    assert counts["tr"] == classes + operations + counts["details"]
    assert counts["svg"] == len(certificate.sums) == len(certificate.orders)
    assert "a &lt;model&gt;" in page and "<model>" not in page
    assert "model.layers.0</b>" in page and "the proof of layers 0-1" in page and "around the layers" in page
    for entry in certificate.entries:
        assert entry.layer or entry.kind == "movement", entry


def test_a_refusal_names_each_operation():
    refused = ("aten.bmm.default at a.py:3 f: no order", "aten.cumsum<T> at b.py:4 g: none")
    error = UncertifiedOp("2 operations", refused)
    counts = tags_of(page := refusal_page(error, title="m"))
    assert counts["tr"] == 3 and "aten.cumsum&lt;T&gt; at b.py:4 g: none" in page


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (UncertifiedOp("1 operation", ("aten.bmm.default at a.py:3 f: none",)), "aten.bmm.default at a.py:3 f: none"),
        *((kind(f"the <model> of {kind.__name__}"), f"the &lt;model&gt; of {kind.__name__}") for kind in REFUSALS),
    ],
)
def test_check_writes_every_refusal_and_still_fails(tmp_path, monkeypatch, error, told):
    monkeypatch.setattr(ModelSpec, "compile", mock.Mock(side_effect=error))
    result = CliRunner().invoke(cli.app, ["check", "some/model", "--html", str(tmp_path / "page.html")])
    assert result.exception is error
    page = (tmp_path / "page.html").read_text()
    assert told in page and "model was refused" in page and tags_of(page)["h1"] == 1


def test_a_page_that_cannot_be_written_is_named(tmp_path, monkeypatch):
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
    for box in drawing.iter("{http://www.w3.org/2000/svg}rect"):
        left, top = float(box.get("x")), float(box.get("y"))
        assert left >= 0 and left + float(box.get("width")) <= width + 1
        assert top >= 0 and top + float(box.get("height")) <= height + 1


@pytest.mark.parametrize("leaf", [Blocked(192, 128), EvenOdd(192, 32)], ids=str)
def test_the_leaves_of_a_tree_are_its_ranges(leaf):
    """What is drawn is what is summed: every k once, from left to right."""
    tree = order_tree(Tree(768, (2, 2), leaf))
    drawn = [line for node in leaves(tree) for line in node.text if line.startswith("k = ")]
    ranges = [tuple(map(int, re.findall(r"\d+", line))) for line in drawn]
    assert [k for first, last in ranges for k in range(first, last + 1)] == list(range(768))


def leaves(node):
    return [leaf for child in node.children for leaf in leaves(child)] if node.children else [node]
