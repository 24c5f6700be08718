"""Options, model loading, progress and tables that several commands share."""

import time
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers.utils import logging as transformers_logging

from detcompile.commands.loading_options import LoadingOptions, sizes
from detcompile.models.compiled import CompiledModel
from detcompile.models.hub import TINY
from detcompile.models.spec import ModelSpec
from detcompile.progress import shown

logs = Console(stderr=True)

Model = Annotated[
    str,
    typer.Argument(
        help="A local Hugging Face model folder, a .gguf file, an id on the Hugging Face Hub such as Qwen/Qwen3-0.6B,"
        f" '{TINY}' (the embedded model), or an exported .pt2."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


class Loading(LoadingOptions):
    """LoadingOptions of commands that load MODEL themselves."""

    def spec(self, model: str, random: bool = False) -> ModelSpec:
        """Return the ModelSpec of a model with these options."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        if self.tp_sizes is not None:
            given["tp_sizes"] = sizes(self.tp_sizes)
        return ModelSpec(model, random, arithmetic=given.pop("numerics", "float"), **given)


def compile_model(spec: ModelSpec, tp: int = 1) -> CompiledModel:
    """Load and compile a model over ``tp`` ranks; print how long it took."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()  # replaced by our progress
    start = time.perf_counter()
    with shown(None):
        compiled = spec.compile(tp)
    logs.print(
        f"compiled in {time.perf_counter() - start:.1f} s on {compiled.device}, {compiled.dtype}", highlight=False
    )
    return compiled


def progress_bar(total: bool = False) -> Progress:
    """Return a transient progress display on standard error: a bar if ``total``, else a spinner."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    return Progress(*(Progress.get_default_columns() if total else columns), console=logs, transient=True)


def add_columns(table: Table, *names: str) -> None:
    """Add columns to a table of axes: names left-aligned, numbers right-aligned."""
    for name in names:
        table.add_column(name, justify="left" if name == "axis" else "right")
