"""What a sum is: orders of addition as values, references that evaluate in them, and the choice among them."""

from detcompile.orders.kinds import (
    KV,
    Blocked,
    EvenOdd,
    Experts,
    Row,
    Sequential,
    Size,
    SumOrder,
    Tree,
)

__all__ = [
    "Blocked",
    "EvenOdd",
    "Experts",
    "KV",
    "Row",
    "Sequential",
    "Size",
    "SumOrder",
    "Tree",
]
