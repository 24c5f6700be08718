"""What several commands take and show: options, the model that these name, progress on standard error, tables."""

import time
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers.utils import logging as transformers_logging

from detcompile.api import TINY
from detcompile.commands.verification import ModelSpec
from detcompile.models.compiled import CompiledModel
from detcompile.progress import shown

__all__ = [
    "Device",
    "Dtype",
    "Json",
    "Model",
    "Random",
    "TpSizes",
    "add_columns",
    "compile_model",
    "logs",
    "progress_bar",
    "sizes",
]

logs = Console(stderr=True)

Model = Annotated[
    str, typer.Argument(help=f"A local Hugging Face model folder, '{TINY}' (the embedded model), or an exported .pt2.")
]
Random = Annotated[bool, typer.Option("--random", help="Random weights for the folder's config.json.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; default: the checkpoint's.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; default: a GPU if there is one.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
TpSizes = Annotated[str, typer.Option(help="Declared tensor-parallel sizes.")]


def sizes(text: str) -> tuple[int, ...]:
    """The integers in an option such as 1,2,4,8.

    Raises:
        typer.BadParameter: it holds something else.
    """
    try:
        return tuple(int(size) for size in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}: give comma-separated integers, such as 1,2,4,8") from error


def compile_model(spec: ModelSpec, tp: int = 1) -> CompiledModel:
    """Load and compile a model, over ``tp`` ranks; says how long it took."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()  # ours covers the load
    start = time.perf_counter()
    with shown(None):
        compiled = spec.compile(tp)
    logs.print(
        f"compiled in {time.perf_counter() - start:.1f} s on {compiled.device}, {compiled.dtype}", highlight=False
    )
    return compiled


def progress_bar(total: bool = False) -> Progress:
    """Progress on standard error, gone when it ends; a bar where the ``total`` is known, else a spinner."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    return Progress(*(Progress.get_default_columns() if total else columns), console=logs, transient=True)


def add_columns(table: Table, *names: str) -> None:
    """Columns of a table of axes: names to the left, numbers to the right."""
    for name in names:
        table.add_column(name, justify="left" if name == "axis" else "right")
