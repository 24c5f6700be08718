"""AOTAutograd, which turns Dynamo's graphs into ATen graphs."""

from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import make_boxed_func
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2_dense

NAMES = {
    "auto_functionalized_v2_dense": "Runs an operation that writes into its arguments, and copies only those "
    "that it must. Without it: a graph that is run without a compiler copies every KV cache.",
    "functorch_config": "AOTAutograd's settings. Without it: its cache replaces the passes and proofs, "
    "and a backward is compiled at its first call, outside of them.",
    "make_boxed_func": "Mark a function as one that takes its inputs in a list, as a graph's code does. Without it: "
    "AOTAutograd warns, and keeps inputs alive for the whole call.",
}
