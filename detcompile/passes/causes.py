"""What an exception of torch's says: the error of ours inside it, or its own words and the line they are about."""

from pathlib import Path

from detcompile.errors import DetcompileError
from detcompile.torch_internals.graph_nodes import is_file_of_torch

__all__ = ["cause", "said_by"]

def cause(error: BaseException) -> DetcompileError | None:
    """The error of ours inside the exceptions that Dynamo and Inductor wrap around it."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, DetcompileError):
            return seen
        seen = getattr(seen, "inner_exception", None) or seen.__cause__ or seen.__context__
    return None


def said_by(error: Exception) -> str:
    """The first line of what Dynamo or a compiler under it says, and the model's own line that it was tracing."""
    inner = getattr(error, "inner_exception", None) or error
    said = (str(inner).strip().splitlines() or [type(inner).__name__])[0]
    own = [frame for frame in getattr(error, "real_stack", None) or () if not is_file_of_torch(frame.filename)]
    return f"{said} at {Path(own[-1].filename).name}:{own[-1].lineno} {own[-1].name}" if own else said
