"""`detcompile cache`: what lies in the cache, and how to be rid of it."""

import contextlib
import json
import shutil
import stat
import sys
import time
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

__all__ = ["command"]

KINDS = {
    "cpu": "compiled CPU kernels",
    "programs": "compiled programs of models",
    "schedules": "schedule decisions",
    "triton": "compiled GPU kernels",
}


def command(
    clear: Annotated[bool, typer.Option("--clear", help="Remove all of it; it is made again when needed.")] = False,
    json_output: Json = False,
) -> None:
    """List what is kept from one start to the next: kinds and sizes, and each compiled program."""
    folder = cache_directory()
    sizes = {kind: _size(folder / kind) for kind in KINDS}
    if clear:
        for kind in KINDS:
            with naming(folder / kind, CACHE_ADVICE):
                if (folder / kind).exists():
                    shutil.rmtree(folder / kind)
    kept = programs.entries() if (folder / "programs").exists() else []
    if json_output:
        listed = [{**entry.label, "path": str(entry.path), "bytes": entry.size, "made": entry.made} for entry in kept]
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
    """Bytes of the files in a folder; of those that vanish meanwhile, or may not be looked at, none."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            status = path.stat()
            total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total


def _table(kept: list[programs.Entry]) -> Table:
    table = Table("model", "layers", "dtype", "max_context", "program", "size", "made", title="Compiled programs")
    for entry in kept:
        label = entry.label
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.made))
        names = [escape(label.get(name, "?")) for name in ("model", "layers", "dtype", "max_context")]
        table.add_row(*names, escape(label.get("program", "?")[:12]), decimal(entry.size), made)
    return table
