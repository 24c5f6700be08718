"""The seed of all random draws in tests: different for every commit, equal for every run of one commit."""

import os
import subprocess
from pathlib import Path
from random import SystemRandom

__all__ = ["VARIABLE", "seed_of_run"]

VARIABLE = "DETCOMPILE_TEST_SEED"
BITS = 32


def seed_of_run() -> int:
    """Return VARIABLE if set; else the first bits of the commit's name; without a checkout, a new seed per run."""
    given = os.environ.get(VARIABLE)
    if given is None:
        drawn = _commit_bits() or SystemRandom().getrandbits(BITS)
        given = os.environ[VARIABLE] = str(drawn)  # for the workers, which draw the same
    return int(given)


def _commit_bits() -> int:
    try:
        actual = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return 0
    return int(actual.stdout[: BITS // 4], 16)
