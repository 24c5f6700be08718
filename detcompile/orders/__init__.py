"""Orders of addition as values: their references, and the functions that choose them.

A SumOrder is a floating-point sum as a tree of additions: equal orders give equal bits on any schedule. An order can be
printed and hashed, lists the symbols of its sizes, and evaluates a reference in exactly its order. No order depends on
the number of rows.

SumOrder
├── Sequential, Blocked, EvenOdd, Tree    GEMMs
├── Row                                   reductions over one axis
├── KV                                    attention over the keys of one sequence
├── Experts                               the outputs of one token's experts
├── Exact                                 the gradient of a weight, over tokens
└── Keys, Queries                         the gradients of attention, over one sequence
"""

from detcompile.orders.gradient_orders import Exact, Keys, Queries
from detcompile.orders.matmul_orders import Blocked, EvenOdd, Sequential, Tree
from detcompile.orders.row_orders import Row
from detcompile.orders.sum_order import Size, SumOrder
from detcompile.orders.token_orders import KV, Experts

__all__ = [
    "Blocked",
    "EvenOdd",
    "Exact",
    "Experts",
    "KV",
    "Keys",
    "Queries",
    "Row",
    "Sequential",
    "Size",
    "SumOrder",
    "Tree",
]
