"""Options, model loading, progress and tables that several commands share."""

import time
from dataclasses import asdict, dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers.utils import logging as transformers_logging

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
Random = Annotated[bool, typer.Option("--random", help="Random weights for the model's config.json.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; default: a GPU if there is one.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


@dataclass(frozen=True, kw_only=True)
class Loading:
    """Options for loading MODEL, named as in load_model."""

    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; default: the checkpoint's.")] = None
    device: Device = None
    tp_sizes: Annotated[str, typer.Option(help="Declared tensor-parallel sizes.")] = "1,2,4,8"
    numerics: Annotated[
        str | None, typer.Option(help="float, or exact integers: exact16, exact8x16, exact8; default: float.")
    ] = None
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub; default: main.")] = None
    token: Annotated[str | None, typer.Option(help="Of the Hub; default: HF_TOKEN, or that of `hf auth`.")] = None
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code from the checkpoint.")
    ] = False
    dequantize: Annotated[
        bool | None,
        typer.Option(help="Dequantize .gguf files and quantized experts, or keep them quantized; default: dequantize."),
    ] = None

    def spec(self, model: str, random: bool = False) -> ModelSpec:
        """Return the ModelSpec of a model with these options."""
        given = asdict(self) | {"tp_sizes": sizes(self.tp_sizes), "arithmetic": self.numerics or "float"}
        del given["numerics"]
        return ModelSpec(model, random, **given)


def sizes(text: str) -> tuple[int, ...]:
    """Parse an option such as 1,2,4,8.

    Raises:
        typer.BadParameter: an item is not an integer.
    """
    try:
        return tuple(int(size) for size in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}: give comma-separated integers, such as 1,2,4,8") from error


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
