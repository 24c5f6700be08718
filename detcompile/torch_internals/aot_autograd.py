"""AOTAutograd, which makes graphs of ATen of Dynamo's."""

from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import make_boxed_func
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2_dense

__all__ = ["auto_functionalized_v2_dense", "functorch_config", "make_boxed_func"]

READ_IN = "2.11.0, 2.13.0, 2.14.1, 2.15.0"
NAMES = {
    "auto_functionalized_v2_dense": "What runs an operation that writes into its arguments, and copies those alone "
    "that it is told to. Without it: a graph that is run without a compiler copies every KV cache.",
    "functorch_config": "AOTAutograd's settings. Without it: its cache answers in the place of the passes and proofs, "
    "and a backward is compiled at its first call, outside of them.",
    "make_boxed_func": "Mark a function as one that takes its inputs in a list, as code of a graph does. Without it: "
    "AOTAutograd warns, and keeps inputs alive for the whole call.",
}
