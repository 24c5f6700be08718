"""`detcompile cache`: lists the contents of the cache, or removes them."""

import contextlib
import json
import shutil
import stat
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from detcompile.commands.options import Json
from detcompile.config import cache_directory
from detcompile.passes.warm import programs
from detcompile.progress import is_terminal
from detcompile.storage import CACHE_ADVICE, naming

KINDS = {
    "cpu": "compiled CPU kernels",
    "gguf": "GGUF files as folders in transformers' format",
    "models": "models of `detcompile fetch`",
    "programs": "compiled programs of models",
    "releases": "untested releases that passed a probe",
    "schedules": "schedule decisions",
    "triton": "compiled GPU kernels",
}


THREADS = f"{programs.KEY_PART}threads"


def command(
    clear: Annotated[bool, typer.Option("--clear", help="Remove everything; it is rebuilt when needed.")] = False,
    json_output: Json = False,
) -> None:
    """List what is kept from one start to the next: kinds and sizes, and each compiled program.

    If a model has several, the last column says how an older one's key differs from the newest one's.
    """
    folder = cache_directory()
    sizes = {kind: _size(folder / kind) for kind in KINDS}
    if clear:
        for kind in KINDS:
            with naming(folder / kind, CACHE_ADVICE):
                if (folder / kind).exists():
                    shutil.rmtree(folder / kind)
    kept = programs.entries() if (folder / "programs").exists() else []
    if json_output:
        differences = _differences(kept)
        listed = [
            {**entry.label, "path": str(entry.path), "bytes": entry.size, "made": entry.made, "differs_in": differs}
            for entry, differs in zip(kept, differences, strict=True)
        ]
        print(json.dumps({"folder": str(folder), "bytes": sizes, "programs": listed, "cleared": clear}))
        return
    console = Console(width=None if is_terminal(sys.stdout) else 140)
    if kept:
        console.print(_table(kept))
    for kind, size in sizes.items():
        console.print(f"{decimal(size):>10}  {KINDS[kind]} in {folder / kind}", highlight=False, soft_wrap=True)
    if clear:
        console.print("Removed.")


def _size(folder: Path) -> int:
    """Return the bytes of the files in a folder, without files that vanish meanwhile or cannot be read."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            status = path.stat()
            total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total


def _table(kept: list[programs.Entry]) -> Table:
    columns = ("model", "layers", "dtype", "max_context", "program", "size", "made", "not the newest's")
    table = Table(*columns, title="Compiled programs")
    for entry, differs in zip(kept, _differences(kept), strict=True):
        label = entry.label
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.made))
        names = [escape(label.get(name, "?")) for name in ("model", "layers", "dtype", "max_context")]
        table.add_row(*names, escape(label.get("program", "?")[:12]), decimal(entry.size), made, ", ".join(differs))
    return table


def _differences(kept: list[programs.Entry]) -> list[list[str]]:
    """Return for each program the parts of its key that differ from the newest program of the same model."""
    newest = {_model(entry): entry for entry in kept}  # the latest is last
    return [_differing(entry.label, newest[_model(entry)].label) for entry in kept]


def _model(entry: programs.Entry) -> tuple[str | None, ...]:
    return entry.label.get("model"), entry.label.get("layers")


def _differing(label: Mapping[str, str], newest: Mapping[str, str]) -> list[str]:
    names = [name for name in (*label, *newest) if name.startswith(programs.KEY_PART)]
    differing = dict.fromkeys(name for name in names if label.get(name) != newest.get(name))
    threads = {THREADS: f"threads ({label.get(THREADS)}, not {newest.get(THREADS)})"}
    return [threads.get(name, name.removeprefix(programs.KEY_PART)) for name in differing]
