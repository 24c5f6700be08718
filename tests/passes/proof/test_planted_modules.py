"""torch.compile(module, backend=Backend(...)) certifies a module over its batch, or refuses it."""

import copy
import functools
import threading
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from detcompile import Backend, DetcompileError, InvalidInput, Numerics, UncertifiedOp, UnsupportedModel
from detcompile.passes import calls
from detcompile.passes.tracing import cause
from tests.bits import assert_bitwise_equal
from tests.passes.proof.planted_modules import CERTIFIED, REFUSED, D, Held, rows
from tests.torch_versions import skip_before_torch_2_13


@pytest.fixture(autouse=True)
def _forgotten() -> None:
    torch._dynamo.reset()


def compiled(module: Any, **options: Any) -> tuple[Callable[..., Any], Backend]:
    backend = Backend(Numerics(), certify_only=True)
    run = torch.compile(module, backend=backend, **options)
    return torch.no_grad()(run), backend


def refusal(call: Callable[[], Any]) -> DetcompileError:
    with pytest.raises(Exception) as raised, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of builtins that it does not trace
        call()
    actual = cause(raised.value)
    assert actual is not None, raised.value
    return actual


def first(count: int, given: Any) -> Any:
    """The first rows of every tensor of four."""
    return tree_map(lambda t: t[:count].clone() if isinstance(t, Tensor) and t.shape[:1] == (4,) else t, given)


@pytest.mark.parametrize("name", REFUSED)
def test_what_may_let_rows_meet_is_refused(name: str) -> None:
    skip_before_torch_2_13(name, {"a table of this batch": "makes another graph of it, refused for its slice"})
    message, module, args = REFUSED[name]
    run, _ = compiled(module)
    actual = refusal(lambda: run(*copy.deepcopy(args)))
    assert message in str(actual)
    assert isinstance(actual, (UncertifiedOp, UnsupportedModel))


@pytest.mark.parametrize("name", CERTIFIED)
def test_what_keeps_rows_apart_is_certified(name: str) -> None:
    """By one graph, from whichever number of rows it was traced, and a row has its bits alone."""
    module, args = CERTIFIED[name]
    run, _ = compiled(module)
    outputs = tree_leaves(run(*args))
    for count in (1, 3):
        for part, whole in zip(tree_leaves(run(*first(count, args))), outputs, strict=True):
            if isinstance(whole, Tensor) and whole.shape[:1] == (4,):
                assert_bitwise_equal(part, whole[:count])
    torch._dynamo.reset()
    for alone, whole in zip(tree_leaves(run(*first(1, args))), outputs, strict=True):
        if isinstance(whole, Tensor) and whole.shape[:1] == (4,):
            assert_bitwise_equal(alone, whole[:1])


MARKS: dict[str, tuple[Callable[[Tensor], None], dict[str, Any]]] = {
    "unmarked": (lambda x: None, {}),
    "mark_dynamic": (functools.partial(torch._dynamo.mark_dynamic, index=0), {}),
    "mark_unbacked": (functools.partial(torch._dynamo.decorators.mark_unbacked, index=0), {}),
    "mark_static": (functools.partial(torch._dynamo.mark_static, index=0), {}),
    "dynamic": (lambda x: None, {"dynamic": True}),
    "static": (lambda x: None, {"dynamic": False}),
    "fullgraph": (lambda x: None, {"fullgraph": True}),
}


@pytest.mark.parametrize("order", [(4, 1, 2), (1, 4, 2)])
@pytest.mark.parametrize("name", MARKS)
def test_one_row_works_as_four_do(name: str, order: tuple[int, ...]) -> None:
    mark, options = MARKS[name]
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(24, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 5), nn.Softmax(-1)).eval()
    x, actual = torch.randn(4, 24), {}
    run, backend = compiled(module, **options)
    with torch._dynamo.config.patch(assume_static_by_default=True):  # dynamic=True leaves it False
        for count in order:
            given = x[:count].clone()
            mark(given)
            actual[count] = run(given)
    assert_bitwise_equal(actual[1], actual[4][:1])
    assert_bitwise_equal(actual[2], actual[4][:2])
    assert len(backend.certificates) == 1


def test_one_row_is_compiled_as_four_are() -> None:
    """Inductor compiles it, and the arguments lose the call's marks."""
    module, x = Held(lambda m, x: nn.functional.gelu(m.lin(x)) * m.scale).eval(), rows()
    actual = []
    for count in (1, 4):
        torch._dynamo.reset()
        given = x[:count].clone()
        with torch.no_grad():
            actual.append(torch.compile(module, backend="detcompile")(given))
        assert not given.__dict__
    assert_bitwise_equal(actual[0], actual[1][:1])


def center(module: nn.Module, given: Any, actual: Tensor) -> Tensor:
    """A hook that lets rows meet."""
    return actual - actual.mean(0)


@pytest.mark.parametrize(
    "register",
    [
        lambda run: run.register_forward_hook(center),
        lambda run: run.register_forward_pre_hook(lambda module, given: (given[0] - given[0].mean(0),)),
        lambda run: nn.modules.module.register_module_forward_hook(center),
        lambda run: nn.modules.module.register_module_forward_pre_hook(lambda module, given: None),
    ],
    ids=["forward", "forward pre", "of all modules", "pre of all modules"],
)
@pytest.mark.parametrize("first", ["hook", "call"])
@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
def test_a_hook_of_what_torch_compile_returns_is_refused(register: Callable[[nn.Module], Any], first: str) -> None:
    run = torch.compile(Held(lambda m, x: m.lin(x)).eval(), backend=Backend(Numerics(), certify_only=True))
    with torch.no_grad():
        if first == "call":
            run(rows())
        hook = register(run)
        try:
            refusal(lambda: run(rows()))
        finally:
            hook.remove()
        run(rows())


@pytest.mark.parametrize("deep", [False, True])
def test_another_forward_of_what_torch_compile_returns_is_refused(deep: bool) -> None:
    run = torch.compile(nn.Sequential(nn.Linear(D, D)).eval(), backend=Backend(Numerics(), certify_only=True))
    with torch.no_grad():
        before, item = run(rows()), run.forward
        centered = lambda x: item(x) - item(x).mean(0)  # noqa: E731
        run.forward = (lambda x: centered(x)) if deep else centered
        assert "the forward of the compiled module was replaced" in str(refusal(lambda: run(rows())))
        run.forward = item
        assert_bitwise_equal(nn.Sequential(run, nn.Identity())(rows()), before)


@pytest.mark.parametrize("inner", [True, False])
def test_a_forward_that_comes_after_a_call_is_traced(inner: bool) -> None:
    module = nn.Sequential(nn.Linear(D, D)).eval()
    run, _ = compiled(module)
    run(rows())
    held = module[0] if inner else module
    item = held.forward
    held.forward = lambda x: item(x) - item(x).mean(0)
    assert "no rule" in str(refusal(lambda: run(rows())))


@pytest.mark.parametrize("inner", [True, False])
def test_a_hook_that_comes_after_a_call_is_traced(inner: bool) -> None:
    module = nn.Sequential(nn.Linear(D, D)).eval()
    run, _ = compiled(module)
    before = run(rows())
    held = module[0] if inner else module
    held.register_forward_hook(lambda module, given, actual: actual * 2)
    assert_bitwise_equal(run(rows()), before * 2)
    held.register_forward_hook(center)
    assert "no rule" in str(refusal(lambda: run(rows())))


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x[:], lambda x: x[1:], lambda x: x.t(), lambda x: x.detach()])
def test_an_attribute_that_shares_memory_with_an_argument_is_refused(view: Callable[[Tensor], Tensor]) -> None:
    module, x = Held(lambda m, x: x + m.scale[0]), torch.randn(D, D)
    module.scale = view(x)
    assert "two origins" in str(refusal(lambda: compiled(module)[0](x)))
    module.scale = view(x).clone()
    run, _ = compiled(module)
    run(x)
    module.scale.set_(view(x))  # behind the graph that there is
    assert "two origins" in str(refusal(lambda: run(x)))


MEETING = {
    "the last row expanded": lambda x: (x, x[-1:].expand(4, D)),
    "a row": lambda x: (x, x[1]),
    "an element": lambda x: (x, x[0, 0]),
    "transposed": lambda x: (x, x.t()),
    "shifted": lambda x: (x[:-1], x[1:]),
    "flat": lambda x: (x, x.view(-1)),
    "in a list": lambda x: (x, [x[1:]]),
    "windows": lambda x: (x[:3], x.as_strided((3, 2 * D), (D, 1))),
    "half a row later": lambda x: (x[:3], x.view(-1)[D // 2 : -D // 2].view(3, D)),
}
APART = {
    "twice": lambda x: (x, x),
    "as a view": lambda x: (x, x.view(4, 2, D // 2)),
    "a column": lambda x: (x, x[:, 1]),
    "chunks": lambda x: x.chunk(2, -1),
    "heads": lambda x: x.view(4, 2, D // 2).unbind(1),
    "one row": lambda x: (x[:1], x[:1].unsqueeze(1)),
    "halves of a batch": lambda x: (x[:2], x[2:]),
    "one temperature": lambda x: (x, *2 * [torch.tensor(2.0)]),
}


@pytest.mark.parametrize("name", MEETING)
def test_arguments_whose_rows_share_memory_are_refused(name: str) -> None:
    run, _ = compiled(lambda x, *others: (x * 2, *(y * 3 for y in tree_leaves(others))))
    assert "share memory" in str(refusal(lambda: run(*MEETING[name](rows()))))


@pytest.mark.parametrize("name", APART)
def test_arguments_that_share_memory_row_by_row_are_taken(name: str) -> None:
    compiled(lambda x, *others: (x * 2, *(y * 3 for y in others if y.dim())))[0](*APART[name](rows()))


class Shifted(nn.Module):
    def __init__(self, shift: Tensor) -> None:
        super().__init__()
        self.register_buffer("shift", shift)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


def test_negated_views_are_refused() -> None:
    """As an argument, a buffer, a parameter, and in place of a plain buffer."""
    imaginary = torch.view_as_complex(rows().view(4, -1, 2)).conj().imag
    linear = nn.Linear(D, D)
    linear.weight = nn.Parameter(torch._neg_view(linear.weight.detach()))
    later = Shifted(torch.ones(D))
    plain = compiled(later)[0]
    plain(rows())
    later.shift = torch._neg_view(torch.ones(D))
    calls = (
        lambda: compiled(nn.Linear(D // 2, D))[0](imaginary),
        lambda: compiled(Shifted(torch._neg_view(torch.ones(D))))[0](rows()),
        lambda: compiled(linear)[0](rows()),
        lambda: plain(rows()),
    )
    for call in calls:
        assert "resolve_neg()" in str(refusal(call))


def test_freezing_is_refused_by_the_name_of_its_setting() -> None:
    with torch._inductor.config.patch(freezing=True):
        actual = refusal(lambda: compiled(nn.Linear(D, D))[0](rows()))
    assert "TORCHINDUCTOR_FREEZING" in str(actual)


def test_a_guard_is_named_by_its_line() -> None:
    _, module, args = REFUSED["more_than_four"]
    actual = refusal(lambda: compiled(module)[0](*args))
    assert "<= 4 at planted_modules.py:" in str(actual)


def test_equal_lines_are_one_line_with_their_count() -> None:
    def beside(x: Tensor) -> Tensor:
        return x + sum((x + i).amax(0) for i in range(12))

    actual = refusal(lambda: compiled(beside)[0](rows()))
    assert "12 × aten.amax.default at test_planted_modules.py:" in str(actual)
    assert len(actual.offenders) == 12


def broken(m: Held, x: Tensor) -> Tensor:
    y = m.lin(x)
    torch._dynamo.graph_break()
    return y * 2


def test_graph_break_warns_if_requested() -> None:
    module, x = Held(broken).eval(), rows()
    for backend in (Backend(Numerics(), graph_breaks="warn"), "detcompile"):
        torch._dynamo.reset()
        options = {"graph_breaks": "warn"} if backend == "detcompile" else None
        run = torch.compile(module, backend=backend, options=options)
        with torch.no_grad(), pytest.warns(RuntimeWarning, match="several graphs"):
            assert_bitwise_equal(run(x[:2].clone()), run(x)[:2])


def test_call_without_a_graph_warns_if_requested() -> None:
    module, x = nn.LSTM(D, D), rows(3, D)
    run = torch.compile(module, backend="detcompile", options={"graph_breaks": "warn"})
    with torch.no_grad(), pytest.warns(RuntimeWarning, match="no graph"):
        assert_bitwise_equal(run(x)[0], module(x)[0])


def test_options_are_checked() -> None:
    with pytest.raises(InvalidInput, match="'raise', 'warn'"):
        Backend(Numerics(), graph_breaks="ignore")
    with pytest.raises(InvalidInput, match="none of numerics, graph_breaks"):
        torch.compile(nn.Linear(D, D), backend="detcompile", options={"graph_break": "warn"})(torch.ones(3, D))


def test_a_call_that_torch_leaves_to_python_is_refused() -> None:
    """Forced, by errors that torch was told to suppress, after too many graphs, and while another error is handled."""
    run, _ = compiled(Held(lambda m, x: m.lin(x)).eval())
    with torch.compiler.set_stance("force_eager"):
        assert "no graph of this call" in str(refusal(lambda: run(rows())))
    with torch._dynamo.config.patch(suppress_errors=True):
        mean, _ = compiled(Held(lambda m, x: x - x.mean(0)))
        assert "no rule" in str(refusal(lambda: mean(rows())))
    scaled, _ = compiled(Held(lambda m, x: x * 2))
    limited = torch._dynamo.config._make_closure_patcher(recompile_limit=2, automatic_dynamic_shapes=False)
    with mock.patch.object(calls, "ONE_GRAPH_A_SHAPE", limited):
        for extent in (1, 2):
            scaled(rows(extent))
        assert "for each extent and flag" in str(refusal(lambda: scaled(rows(3))))
    try:
        raise ValueError
    except ValueError:
        assert "does not make one graph" in str(refusal(lambda: compiled(nn.LSTM(D, D))[0](rows(3, D))))


def test_threads_share_a_compiled_module() -> None:
    run, _ = compiled(Held(lambda m, x: m.lin(x) * 3).eval())
    actual: list[Any] = []

    def call(count: int) -> None:
        try:
            actual.append(run(x[:count])[0])
        except BaseException as error:
            actual.append(error)

    x = rows()
    threads = [threading.Thread(target=call, args=(count,)) for count in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for row in actual:
        assert_bitwise_equal(row, actual[0])


def test_arguments_of_as_many_rows_hold_one_batch() -> None:
    """A mask is seen to have the rows of its tokens, though no operation says so; others have a graph of their own."""
    run, backend = compiled(Held(lambda m, x, y: (x * 2, y * 3)))
    for counts in ((4, 4), (3, 3), (1, 1)):
        run(*(rows()[:count] for count in counts))
    assert len(backend.certificates) == 1
    run(rows(), rows()[:3])
    assert len(backend.certificates) == 2
