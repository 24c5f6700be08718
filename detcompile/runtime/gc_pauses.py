"""Short garbage collections while requests run.

A full collection of Python visits every object of the process, those of the traced and compiled model among them: 0.2 s
and more in which no step is launched. While requests run, collections look only at what was made since they began.
"""

import gc

__all__ = ["GCPauses"]


class GCPauses:
    """Takes the objects that exist out of garbage collection, and puts them back; also those that others took out."""

    def __init__(self) -> None:
        self._short = False

    def shorten(self) -> None:
        """Collect nothing that exists now; nothing more happens until ``restore``."""
        if not self._short:
            gc.freeze()
            self._short = True

    def restore(self) -> None:
        """Everything may be collected again."""
        if self._short:
            gc.unfreeze()
            self._short = False
