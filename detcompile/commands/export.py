"""`detcompile export`: writes a compiled model to one file."""

from pathlib import Path
from typing import Annotated

import typer

from detcompile.commands.loading_options import Random
from detcompile.commands.options import Loading, Model, compile_model
from detcompile.exporting import export, require_target


def command(
    model: Model,
    path: Annotated[Path, typer.Argument(help="The file to write; ends with .pt2.")],
    beside: Annotated[bool, typer.Option("--beside", help="Weights in a .safetensors next to it, not inside.")] = False,
    tp: Annotated[int, typer.Option(min=1, help="Ranks that share the model, here and where it is loaded.")] = 1,
    random: Random = False,
    *,
    loading: Loading,
) -> None:
    """Write the compiled model to one file, which every command takes as MODEL, and detcompile.load in Python."""
    require_target(path, tp if beside else 0)
    compiled = compile_model(loading.spec(model, random), tp)
    export(compiled, path, weights="beside" if beside else "inside")
    print(f"{path}: {path.stat().st_size} bytes, fingerprint {compiled.fingerprint}")
