"""cause(): the error of ours inside those of torch."""

from detcompile.errors import DetcompileError

__all__ = ["cause"]


def cause(error: BaseException) -> DetcompileError | None:
    """The error of ours inside the exceptions that Dynamo and Inductor wrap around it."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, DetcompileError):
            return seen
        seen = getattr(seen, "inner_exception", None) or seen.__cause__ or seen.__context__
    return None
