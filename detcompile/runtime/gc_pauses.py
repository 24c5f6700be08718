"""Short garbage collections while requests run.

A full collection of Python visits every object of the process, those of the traced and compiled model among them: 0.2 s
and more in which no step is launched. While requests run, collections look only at what was made since they began.
"""

import gc

__all__ = ["ShortCollections"]


class ShortCollections:
    """Takes the objects that exist out of garbage collection, and puts them back; also those that others took out."""

    def __init__(self) -> None:
        self._frozen = False

    def begin(self) -> None:
        """Collect nothing that exists now; once begun, nothing more happens until ``end``."""
        if not self._frozen:
            gc.freeze()
            self._frozen = True

    def end(self) -> None:
        """Everything may be collected again."""
        if self._frozen:
            gc.unfreeze()
            self._frozen = False
