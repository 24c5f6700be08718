"""Loss: an engine that was lost, for who asks what happened."""

from dataclasses import dataclass

__all__ = ["Loss"]


@dataclass
class Loss:
    """An engine that was lost.

    Attributes:
        at: Unix time in seconds.
        num_answers: answers that went on elsewhere.
        seconds: time until another one served in its place; None before.
    """

    at: float
    why: str
    num_answers: int
    seconds: float | None = None
