"""Fake tensors, the modes under which operations run, and nested values."""

from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_modes
from torch.utils._pytree import tree_flatten, tree_leaves

NAMES = {
    "FakeTensor": "The type of tensors without values. Without it: a fingerprint would hash constants without values.",
    "FakeTensorMode": "Run a model without computing. Without it: finding equal layers and certifying a batch cost "
    "forwards of the whole model.",
    "FunctionalTensorMode": "The mode of ``dispatch_functionalize``. Without it: see there.",
    "TorchDispatchMode": "See every operation of a run. Without it: equal layers are not found, and every layer is "
    "traced and compiled.",
    "TracingContext": "What AOTAutograd knows of a trace. Without it: regions of one graph mix up the strides of their "
    "outputs, and a region of a trainer is not compiled in the mode that traced it.",
    "detect_fake_mode": "The mode that made fake values. Without it: a pass cannot give a new node its fake value.",
    "dispatch_functionalize": "Run a function with writes into tensors turned into results. Without it: a batch whose "
    "code writes into its temporary tensors is not certified.",
    "enable_python_dispatcher": "Run decompositions registered in Python under make_fx. Without it: some "
    "operations have no result for unknown extents.",
    "tracing": "Enter a TracingContext. Without it: see TracingContext.",
    "tree_flatten": "The leaves of a nested value, and its form. Without it: arguments and results cannot be compared.",
    "tree_leaves": "The leaves of a nested value. Without it: tensors in lists and objects that torch knows are not "
    "arguments of a call.",
    "unset_fake_temporarily": "Compute with real tensors during a trace. Without it: the bytes of a constant "
    "cannot be hashed there.",
    "without_modes": "Run without any mode for a while. Without it: the contents of a tensor cannot be read in a run "
    "over fake tensors.",
}


def was_written(tensor: Any) -> bool:
    """Return whether a run under FunctionalTensorMode wrote into an argument.

    Without it: a batch that changes the weights is certified.
    """
    functions: Any = torch
    return bool(functions._functionalize_has_data_mutation(tensor.elem))
