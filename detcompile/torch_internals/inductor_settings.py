"""Inductor's settings."""

from torch._inductor import config as inductor_config

NAMES = {
    "inductor_config": "Inductor's settings, to be changed by ``patch`` for a compilation, and all of them as part "
    "of a program's key. Without it: rounding depends on what Inductor fuses and splits.",
}
