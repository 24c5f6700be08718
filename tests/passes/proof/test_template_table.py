"""The table of templates fails closed: an operation without rows rule, order or entry cannot be certified."""

import importlib.util
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from detcompile import Backend, Numerics, UncertifiedOp
from detcompile.passes.proof import template_table
from detcompile.passes.proof.template_table import TEMPLATES, Template, without_entry
from detcompile.passes.tracing import cause


def test_every_registered_operation_has_an_entry() -> None:
    assert without_entry(torch._C._dispatch_get_all_op_names()) == ()


def test_an_entry_has_no_default() -> None:
    assert Template._field_defaults == {}
    assert all(entry.kind and callable(entry.rows) and callable(entry.order) for entry in TEMPLATES.values())


def test_an_operation_without_an_entry_is_an_error_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    registered = [*torch._C._dispatch_get_all_op_names(), "detcompile::nobodys_own_sum", "strangers::own"]
    monkeypatch.setattr(torch._C, "_dispatch_get_all_op_names", lambda: registered)
    spec = importlib.util.spec_from_file_location("imported_again", template_table.__file__)
    assert spec is not None and spec.loader is not None
    with pytest.raises(ImportError, match="detcompile::nobodys_own_sum have no entry"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.fixture
def grouped_norm() -> Iterator[object]:
    """An operation of our namespace that sums each of four groups of a row, registered behind the table's back."""
    library = torch.library.Library("detcompile", "FRAGMENT")
    library.define("nobodys_own_sum(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    library.impl("nobodys_own_sum", lambda x: x.clone(), "CompositeExplicitAutograd")
    yield torch.ops.detcompile.nobodys_own_sum.default
    library._destroy()


def test_a_stranger_in_our_namespace_is_refused_by_name(grouped_norm) -> None:
    def forward(x: Tensor) -> Tensor:
        return grouped_norm(x) + 1

    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as refused:
        torch.compile(forward, backend=Backend(Numerics(), certify_only=True))(torch.randn(3, 8))
    actual = cause(refused.value)
    assert isinstance(actual, UncertifiedOp) and "nobodys_own_sum" in actual.offenders[0]
