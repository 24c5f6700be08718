"""torch.compile(model, backend="detcompile"): the backend by name, for any module."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from detcompile.errors import InvalidInput
from detcompile.orders.numerics import Numerics
from detcompile.passes.backend import Backend
from detcompile.passes.calls import Call
from detcompile.torch_internals.dynamo import register_backend

__all__ = ["detcompile_backend"]


class NamedBackend:
    """The backend by name: ``options`` may hold "numerics" and "graph_breaks", as Backend takes them."""

    __name__ = "detcompile"

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        return _with_options(kwargs.get("options") or {})(gm, example_inputs)

    def around_calls(self, options: Mapping[str, Any]) -> Callable[[], Call]:
        return _with_options(options).around_calls({})


def _with_options(options: Mapping[str, Any]) -> Backend:
    unknown = options.keys() - {"numerics", "graph_breaks"}
    if unknown:
        raise InvalidInput(f"options={dict(options)!r}: {', '.join(sorted(unknown))} is none of numerics, graph_breaks")
    return Backend(**{"numerics": Numerics(), **options})


detcompile_backend = NamedBackend()
register_backend("detcompile", detcompile_backend)
