"""Inductor's settings."""

from torch._inductor import config as inductor_config

__all__ = ["inductor_config"]

READ_IN = "2.11.0, 2.13.0, 2.14.1, 2.15.0"
NAMES = {
    "inductor_config": "Inductor's settings, to be changed by ``patch`` for a compilation, and all of them as part "
    "of a program's key. Without it: rounding depends on what Inductor fuses and splits.",
}
