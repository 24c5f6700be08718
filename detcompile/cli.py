"""The command line: detcompile demo | verify | check. Results go to standard output, progress to standard error."""

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from detcompile.api import TINY, TINY_FOLDER
from detcompile.axes import AxisResult
from detcompile.compiled import CompiledModel
from detcompile.demo import DEMO_AXES, Comparison, compare_with_torch
from detcompile.errors import DetcompileError
from detcompile.verification import ModelSpec, available_axes, verify

__all__ = ["app", "main"]

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
logs = Console(stderr=True)

DEMO_PROMPT = '''def mean(values: list[float]) -> float:
    """Return the arithmetic mean of a list of numbers."""
'''
DEMO_TOKENS = 64

Model = Annotated[str, typer.Argument(help=f"A local Hugging Face model folder, or '{TINY}' (the embedded model).")]
Random = Annotated[bool, typer.Option("--random", help="Random weights for the folder's config.json.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; default: the checkpoint's.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; default: a GPU if there is one.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
TpSizes = Annotated[str, typer.Option(help="Declared tensor-parallel sizes.")]


def main() -> None:
    """Entry point: our own errors end with their message and exit code 2, without a traceback."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()  # ours covers the load
    try:
        app()
    except DetcompileError as error:
        logs.print(f"[bold red]{type(error).__name__}[/]", highlight=False)
        logs.print(str(error), markup=False, highlight=False)
        sys.exit(2)


@app.command(name="verify")
def verify_command(
    model: Model,
    axes: Annotated[str | None, typer.Option(help="Comma-separated axes; default: all of this device.")] = None,
    json_output: Json = False,
    random: Random = False,
    dtype: Dtype = None,
    device: Device = None,
    tp_sizes: TpSizes = "1,2,4,8",
    configurations: Annotated[int, typer.Option(min=2, help="Configurations an axis, for each of two prompts.")] = 6,
    seed: Annotated[int, typer.Option(help="Of the configurations drawn.")] = 0,
) -> None:
    """Measure on this machine that the bits stay equal along each axis; exit 1 if any axis fails."""
    spec = ModelSpec(model, random, dtype, device, _sizes(tp_sizes))
    compiled = _compile(spec)
    chosen = axes.split(",") if axes else available_axes(compiled.device.type)
    with _progress() as progress:
        task = progress.add_task("measuring", total=None)
        done = 0

        def tick(axis: str) -> None:
            nonlocal done
            done += 1
            progress.update(task, description=f"{axis}: {done} configurations measured")

        results = verify(compiled, spec, chosen, count=configurations, seed=seed, tick=tick)
    if json_output:
        measured = {axis: result.to_json() for axis, result in results.items()}
        print(json.dumps({"fingerprint": compiled.fingerprint, "axes": measured}))
    else:
        table = Table(title=f"{model}: fingerprint {compiled.fingerprint[:16]}")
        _columns(
            table, "axis", "configurations", "unique\nlogits", "unique\noutputs", "max probability\ndivergence", "holds"
        )
        for axis, result in results.items():
            table.add_row(
                axis, str(result.configurations), *_numbers(result), "yes" if result.holds else "[bold red]NO[/]"
            )
        Console().print(table)
    if not all(result.holds for result in results.values()):
        raise typer.Exit(1)


@app.command()
def check(
    model: Model,
    json_output: Json = False,
    random: Random = False,
    dtype: Dtype = None,
    device: Device = None,
    tp_sizes: TpSizes = "1,2,4,8",
) -> None:
    """Print the certificate: every operation, its place in the model's source, its class, order and proof."""
    compiled = _compile(ModelSpec(model, random, dtype, device, _sizes(tp_sizes)))
    if json_output:
        print(json.dumps({"fingerprint": compiled.fingerprint, **json.loads(compiled.certificate.to_json())}))
        return
    print(compiled.certificate)
    print(f"\n{compiled.certificate.summary()}; fingerprint {compiled.fingerprint}")


@app.command()
def demo(
    configurations: Annotated[int, typer.Option(min=2, help="Configurations an axis, for each of two prompts.")] = 5,
    device: Device = None,
) -> None:
    """Plain torch beside detcompile on the embedded model, under many batches, paddings, chunkings and splits."""
    console = Console()
    compiled = _compile(ModelSpec(TINY, device=device))
    console.print(f"\n[bold]Certificate[/]: {compiled.certificate.summary()}; nothing refused")
    for order in compiled.certificate.orders:
        console.print(f"  {order}", highlight=False)
    _show_completion(compiled, console)
    steps = (2 * len(DEMO_AXES) - 1) * 2 * configurations
    with _progress(total=True) as progress:
        task = progress.add_task("measuring", total=steps)
        found = compare_with_torch(
            compiled,
            count=configurations,
            tick=lambda axis: progress.update(task, advance=1, description=f"measuring {axis}"),
        )
    console.print(_comparison_table(found, compiled.dtype))
    if not all(comparison.ours.holds for comparison in found):
        raise typer.Exit(1)


def _show_completion(compiled: CompiledModel, console: Console) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY_FOLDER, local_files_only=True)
    ids = torch.tensor([tokenizer(DEMO_PROMPT)["input_ids"]], device=compiled.device)
    text = tokenizer.decode(compiled.generate(ids, max_new_tokens=DEMO_TOKENS)[0, ids.shape[1] :])
    console.print("\n[bold]The embedded model continues a prompt[/] (greedy)")
    console.print(DEMO_PROMPT, style="dim", end="", markup=False, highlight=False)
    console.print(text, markup=False, highlight=False)


def _comparison_table(found: list[Comparison], dtype: torch.dtype) -> Table:
    table = Table(
        title=f"A prompt under all configurations of an axis, {str(dtype).removeprefix('torch.')}, worse of two",
        caption="logits: distinct byte strings; outputs: distinct likeliest tokens; max Δp: largest difference of a"
        " probability. 1, 1 and 0: the bits do not depend on the axis.",
    )
    _columns(table, "axis", "runs", "torch\nlogits", "\noutputs", "\nmax Δp", "ours\nlogits", "\noutputs", "\nmax Δp")
    for comparison in found:
        theirs = _numbers(comparison.torch) if comparison.torch else ("–", "–", "–")
        table.add_row(comparison.axis, str(comparison.ours.configurations), *theirs, *_numbers(comparison.ours))
    return table


def _numbers(result: AxisResult) -> tuple[str, str, str]:
    return str(result.unique_logits), str(result.unique_outputs), f"{result.max_probability_divergence:.3g}"


def _columns(table: Table, *names: str) -> None:
    for name in names:
        table.add_column(name, justify="left" if name == "axis" else "right")


def _compile(spec: ModelSpec) -> CompiledModel:
    start = time.perf_counter()
    with _progress() as progress:
        progress.add_task(f"compiling {Path(spec.name).name}", total=None)
        compiled = spec.compile()
    logs.print(
        f"compiled in {time.perf_counter() - start:.1f} s on {compiled.device}, {compiled.dtype}", highlight=False
    )
    return compiled


def _progress(total: bool = False) -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    return Progress(*(Progress.get_default_columns() if total else columns), console=logs, transient=True)


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(size) for size in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}: give comma-separated integers, such as 1,2,4,8") from error


if __name__ == "__main__":
    main()
