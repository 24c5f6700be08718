"""Dynamo, the tracer of torch.compile: its settings, its marks on tensors, its errors and its backends."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch._dynamo import config as dynamo_config
from torch._dynamo import error_on_graph_break, mark_dynamic
from torch._dynamo.backends import registry
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.decorators import mark_unbacked
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException, Unsupported
from torch.fx.experimental import _config as shape_config

NAMES = {
    "FailOnRecompileLimitHit": "Raised when Dynamo reaches its limit of graphs per function. Without it: a "
    "user does not learn which numbers of rows to mark as varying.",
    "TorchDynamoException": "The base of Dynamo's errors. Without it: an error of this package raised in a "
    "trace does not reach the user as such.",
    "Unsupported": "Raised where Dynamo cannot make one graph of a function. Without it: a user does not learn what to "
    "compile instead.",
    "compile_lock": "The lock that Dynamo holds while it compiles. Without it: transformers patches torch in one "
    "thread while another compiles.",
    "dynamo_config": "Dynamo's settings, to be changed by ``patch`` for a trace. Without it: extents become symbols, "
    "or do not, depending on earlier traces.",
    "error_on_graph_break": "Make Dynamo raise instead of breaking a graph. Without it: a part of a call runs without "
    "a certificate.",
    "mark_dynamic": "Make an extent of a tensor a symbol in the next trace; refused if code depends on it. Without "
    "it: a batch is certified for one extent only.",
    "mark_unbacked": "Make an extent of a tensor a symbol without any assumption, even that it is not 1. "
    "Without it: one graph does not serve every number of tokens.",
}

_PATCHING = threading.Lock()  # held while torch functions that report compiling are patched


def dynamo_settings(**settings: Any) -> Callable[[], Callable[[], None]]:
    """Return a function that changes Dynamo's settings and returns a function that restores them.

    torch's variant of ``patch`` for code that runs at every call, as torch.compile's settings do.
    Without it: a call makes several graphs, or symbols for more than its number of rows.
    """
    changes: Callable[[], Callable[[], None]] = dynamo_config._make_closure_patcher(**settings)
    return changes


def shape_settings(**settings: Any) -> Callable[[], Callable[[], None]]:
    """Return a function that changes settings of symbolic shapes and returns a function that restores them.

    Without it: a graph is specialized to batches of two rows and more.
    """
    changes: Callable[[], Callable[[], None]] = shape_config._make_closure_patcher(**settings)
    return changes


def register_backend(name: str, backend: Any) -> None:
    """Register a backend of torch.compile, unless torch is about to register it by its entry point.

    Without it: ``torch.compile(model, backend="detcompile")`` needs an installed package.
    """
    if name not in registry._BACKENDS:
        registry.register_backend(backend, name=name)


@contextlib.contextmanager
def as_if_compiling() -> Iterator[None]:
    """Make torch.compiler report inside the block that Dynamo is compiling, in this process.

    Without it: a model's code takes other branches in a run over fake tensors than in Dynamo's trace of it.
    """
    under_dynamo = torch.compiler.is_dynamo_compiling
    with _PATCHING, mock.patch.object(torch.compiler, "_is_compiling_flag", True):
        code = under_dynamo.__code__  # its code is patched, because modules import the function by name
        under_dynamo.__code__ = (lambda: True).__code__
        try:
            yield
        finally:
            under_dynamo.__code__ = code
