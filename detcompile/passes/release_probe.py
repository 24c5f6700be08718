"""The probe that a release newer than the tested ones must pass: the embedded model's logits have the stored bits.

The probe runs in a process of its own, once for each set of releases and sources: a pass is kept in the cache.
"""

import functools
import hashlib
import json
import platform
import subprocess
import sys
import warnings

from detcompile import config, storage
from detcompile.digests import source_digest
from detcompile.errors import UnsupportedRelease
from detcompile.progress import stage
from detcompile.releases import beyond_tested, installed, require_no_older

# sha256 of the logits of `tiny` for 64 tokens on a CPU, under every tested release (docs/compatibility.md) and on each
# instruction set from portable to avx512bf16. AMX adds bfloat16 products in another order, and reports float32 only.
LOGITS = {
    "float32": "a7bedbecc129078e3363cce25a88e3bfc814a162b6d3c3fc17d12261b5267e7c",
    "bfloat16": "1250c59d114abf43c1d9a1736a9c86f5dc5ca023b36bd0ae510950d9f8b33c87",
}
COMMAND = [sys.executable, "-m", "detcompile.commands.tiny_logits"]  # prints what `LOGITS` has
FOLDER = "releases"
TIME_LIMIT = 900.0  # seconds; it takes about 20


def require_release() -> None:
    """Reject releases of torch, transformers and triton that are neither tested nor pass the probe; warn of the latter.

    Raises:
        UnsupportedRelease: naming the release and what failed.
    """
    if not config.any_release():
        _require(tuple(installed().values()))


@functools.cache  # one warning a process
def _require(releases: tuple[str, ...]) -> None:
    require_no_older()
    untested = beyond_tested()
    if not untested:
        return
    key = hashlib.sha256(repr((releases, sys.version, platform.machine(), source_digest())).encode()).hexdigest()
    path = storage.cache_folder(FOLDER) / key
    if not path.exists():
        with stage(f"compile the embedded model under {untested}"):
            failure = _probe()
        if failure:
            raise UnsupportedRelease(
                f"{untested} does not compile the embedded model as the tested releases do: {failure}. Install a"
                " tested release, or a newer detcompile"
            )
        with storage.naming(path, storage.CACHE_ADVICE):
            storage.put(path, b"")
    warnings.warn(
        f"{untested}: the embedded model's logits have their stored bits on this CPU; other models, GPUs and training"
        " were not tested under it",
        stacklevel=4,
    )


def _probe() -> str:
    """Return why the embedded model's logits differ from the stored bits; empty if they do not."""
    try:
        done = subprocess.run(
            COMMAND, env=config.environment_of_probe(), capture_output=True, text=True, timeout=TIME_LIMIT, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        return f"its process ended with {done.returncode}: {lines[-1]}"
    digests: dict[str, str] = json.loads((done.stdout.splitlines() or ["{}"])[-1])
    if not digests:
        return "its process reported no logits"
    different = [
        f"{dtype} logits have sha256 {digest[:12]} instead of {LOGITS[dtype][:12]}"
        for dtype, digest in digests.items()
        if digest != LOGITS[dtype]
    ]
    return ", ".join(different)
