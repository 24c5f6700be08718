"""Inductor's pool of compiling processes, which also compiles our kernels."""

from concurrent.futures import Executor

from torch._inductor.async_compile import AsyncCompile, maybe_warm_pool

NAMES = {
    "maybe_warm_pool": "Starts Inductor's pool of compilers, unless a setting forbids it. Without it: the pool starts "
    "with the first GPU kernel, and is not ready before the last.",
}


def ready_workers() -> Executor | None:
    """Return the pool, or None if it has not been started or its processes do not run yet.

    Without it: the kernels of an engine are compiled in threads, which take turns.
    """
    ready = AsyncCompile._ready_future
    return AsyncCompile.process_pool() if ready is not None and ready.done() else None


def dismiss_workers() -> None:
    """Make ``ready_workers`` return None until Inductor asks for its pool again.

    Without it: every kernel waits for a worker that does not answer.
    """
    AsyncCompile._ready_future = None
