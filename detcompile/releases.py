"""Releases of torch, transformers and triton: those that were tested, and errors that name others."""

import contextlib
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from detcompile.errors import UnsupportedRelease

# (from, below), as in pyproject.toml; docs/compatibility.md has the tests.
TESTED = {"torch": ("2.11", "2.16"), "transformers": ("5.17", "5.25"), "triton": ("3.6", "3.10")}


def installed() -> dict[str, str]:
    """Return the installed releases by name; a package that is not installed is left out."""
    releases = {}
    for name in TESTED:
        with contextlib.suppress(PackageNotFoundError):  # its import says so better
            releases[name] = version(name)
    return releases


def beyond_tested() -> str:
    """Return the installed releases that are newer than the tested ones, as text; empty if none is."""
    return _listed(newer=True)


def require_no_older() -> None:
    """Reject releases that are older than the tested ones.

    Raises:
        UnsupportedRelease: naming them.
    """
    older = _listed(newer=False)
    if older:
        raise UnsupportedRelease(f"{older} is too old: install a release within this range")


@contextlib.contextmanager
def naming_releases() -> Iterator[None]:
    """Blame untested releases for imports that fail inside this context.

    Raises:
        UnsupportedRelease: a name is missing, and an installed release was not tested.
    """
    try:
        yield
    except (ImportError, AttributeError) as error:
        untested = _listed(newer=True) or _listed(newer=False)
        if untested:
            raise UnsupportedRelease(
                f"{untested} lacks what detcompile imports ({error}): install a release within this range"
            ) from error
        raise


def numbers(release: str) -> tuple[int, ...]:
    """Parse "2.13.0+cpu" as (2, 13, 0)."""
    return tuple(int(number) for number in re.findall(r"\d+", re.split(r"[^\d.]", release, maxsplit=1)[0]))


def _listed(*, newer: bool) -> str:
    releases = []
    for name, release in installed().items():
        least, below = TESTED[name]
        if numbers(release) >= numbers(below) if newer else numbers(release) < numbers(least):
            releases.append(f"{name} {release} (tested: {least} to below {below})")
    return " and ".join(releases)
