"""Why the certificate refuses an operation that no rule speaks of: what a user can do about it, by the name."""

from typing import Any

__all__ = ["reason_of"]

# The first that is part of the operation's name counts.
REASONS = {
    "dropout": "dropout draws from a generator the batch shares: call model.eval()",
    "seeds": "random numbers inside the graph (dropout? call model.eval())",
    "rand": "random numbers inside the graph",
    "bernoulli": "random numbers inside the graph",
    "cumsum": "a running sum whose order is not pinned",
    "bmm": "a batched matrix product without a pinned order (attention outside the attention interface?)",
    "convolution": "a convolution that is transposed, or over a length that is not fixed",
    "pool": "a pool whose windows differ in their terms, whose indices are read, or over a length that is not fixed",
    "prod": "a product of floating-point numbers whose order is not pinned",
    "empty": "reads memory that nothing has written",
    "as_strided": "a view whose rows cannot be followed",
    "c10d": (
        "a collective of torch.distributed, whose order of additions is its own (compile(tp=...) shards the model; an "
        "all_reduce of a plain matrix product, over a declared number of ranks, becomes the declared tree)"
    ),
}


def reason_of(target: Any) -> str:
    """The reason that goes with the name of an operation."""
    for name, reason in REASONS.items():
        if name in str(target):
            return reason
    return "no rule proves this operation independent of the batch"
