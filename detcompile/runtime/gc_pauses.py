"""Short garbage collections while requests run.

A full collection visits every object of the process, including the traced and compiled model, and stalls the engine for
0.2 s or more. While requests run, collections visit only objects made since they began.
"""

import gc

__all__ = ["GCPauses"]


class GCPauses:
    """Freezes existing objects out of garbage collection, and unfreezes all objects, including those others froze."""

    def __init__(self) -> None:
        self._short = False

    def shorten(self) -> None:
        """Exclude existing objects from collection; repeated calls do nothing until ``restore``."""
        if not self._short:
            gc.freeze()
            self._short = True

    def restore(self) -> None:
        """Allow everything to be collected again."""
        if self._short:
            gc.unfreeze()
            self._short = False
