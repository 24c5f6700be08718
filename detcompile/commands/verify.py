"""`detcompile verify`: measures the contract's axes on the user's model and machine."""

import json
from collections.abc import Mapping
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from detcompile.commands.axes import AxisResult
from detcompile.commands.loading_options import Random
from detcompile.commands.options import Json, Loading, Model, add_columns, compile_model, progress_bar
from detcompile.commands.verification import available_axes, require_axes, verify
from detcompile.digests import fingerprint


def command(
    model: Model,
    axes: Annotated[str | None, typer.Option(help="Comma-separated axes; default: all but tp, pp and export.")] = None,
    json_output: Json = False,
    random: Random = False,
    *,
    loading: Loading,
    configurations: Annotated[int, typer.Option(min=2, help="Configurations an axis, for each of two prompts.")] = 6,
    seed: Annotated[int, typer.Option(help="Of the configurations drawn.")] = 0,
) -> None:
    """Measure on this machine that the bits stay equal along each axis; exit 1 if any axis fails.

    The twelve axes here vary how the model's logits are computed. The contract's other four (scheduler, speculation,
    sampling, the trainer's forward) vary what is built on logits, and the project's tests measure them.
    """
    spec = loading.spec(model, random)
    chosen = axes.split(",") if axes else None
    require_axes(chosen or ())  # fail before compiling
    compiled = compile_model(spec)
    chosen = chosen or available_axes(compiled.device.type)
    with progress_bar() as progress:
        task = progress.add_task("measuring", total=None)
        done = 0

        def tick(axis: str) -> None:
            nonlocal done
            done += 1
            progress.update(task, description=f"{axis}: {done} configurations measured")

        results = verify(compiled, spec, chosen, count=configurations, seed=seed, tick=tick)
    if json_output:
        measured = {axis: result.to_json() for axis, result in results.items()}
        parts = compiled.fingerprint_parts
        print(json.dumps({"fingerprint": fingerprint(parts), "fingerprint_parts": parts, "axes": measured}))
    else:
        Console().print(_table(results, f"{model}: fingerprint {compiled.fingerprint[:16]}"))
    if not all(result.holds for result in results.values()):
        raise typer.Exit(1)


def _table(results: Mapping[str, AxisResult], title: str) -> Table:
    table = Table(title=title)
    add_columns(
        table, "axis", "configurations", "unique\nlogits", "unique\noutputs", "max probability\ndivergence", "holds"
    )
    for axis, result in results.items():
        holds = "yes" if result.holds else "[bold red]NO[/]"
        table.add_row(axis, str(result.configurations), *result.figures, holds)
    return table
