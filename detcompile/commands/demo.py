"""`detcompile demo`: compares plain torch and detcompile on the embedded model, with the same configurations."""

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoTokenizer, DynamicCache, PreTrainedModel

from detcompile.api import load_model
from detcompile.commands.axes import AxisResult, Configuration, configurations, measure, padded_batch
from detcompile.commands.options import Device, add_columns, compile_model, progress_bar
from detcompile.commands.verification import RESTART, available_axes, prompts_for
from detcompile.models.compiled import CompiledModel
from detcompile.models.hub import TINY, TINY_FOLDER
from detcompile.models.spec import ModelSpec

__all__ = ["Comparison", "DEMO_AXES", "command", "compare_with_torch", "score_plain"]

DEMO_AXES = tuple(axis for axis in available_axes("cpu") if axis != RESTART)
DEMO_PROMPT = '''def mean(values: list[float]) -> float:
    """Return the arithmetic mean of a list of numbers."""
'''
DEMO_TOKENS = 64
DEMO_LENGTHS = (12, 67, 33, 130)  # prompt lengths; plain torch on a CPU without bfloat16 reads 300 tokens a second


def command(
    configurations: Annotated[int, typer.Option(min=2, help="Configurations an axis, for each of two prompts.")] = 5,
    device: Device = None,
) -> None:
    """Plain torch beside detcompile on the embedded model, under many batches, paddings, chunkings and splits."""
    console = Console()
    compiled = compile_model(ModelSpec(TINY, device=device))
    console.print(f"\n[bold]Certificate[/]: {compiled.certificate.summary()}; nothing refused")
    for order in compiled.certificate.orders:
        console.print(f"  {order}", highlight=False)
    _show_completion(compiled, console)
    steps = (2 * len(DEMO_AXES) - 1) * 2 * configurations
    with progress_bar(total=True) as progress:
        task = progress.add_task("measuring", total=steps)
        comparisons = compare_with_torch(
            compiled,
            count=configurations,
            tick=lambda axis: progress.update(task, advance=1, description=f"measuring {axis}"),
        )
    console.print(_table(comparisons, compiled.dtype))
    if not all(comparison.ours.holds for comparison in comparisons):
        raise typer.Exit(1)


@dataclass(frozen=True)
class Comparison:
    """One axis measured on plain torch and on detcompile; ``torch`` is None if the axis does not exist there."""

    axis: str
    torch: AxisResult | None
    ours: AxisResult


@torch.no_grad()
def score_plain(model: PreTrainedModel, configuration: Configuration) -> Tensor:
    """Return the logits [len(target), V] of the target row from the plain Hugging Face forward.

    Rows of one step form a padded batch; a target that is split into steps runs alone with a DynamicCache.
    """
    target = configuration.rows[configuration.target]
    chunks = [n for step in configuration.steps for row, n in step if row == configuration.target]
    if len(chunks) < 2:
        input_ids, mask, columns = padded_batch(configuration)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = model(input_ids.to(model.device), mask.to(model.device), positions.to(model.device)).logits
        return logits[configuration.target, columns]
    cache, start, pieces = DynamicCache(config=model.config), 0, []
    for chunk in chunks:
        ids = torch.tensor([target[start : start + chunk]], device=model.device)
        pieces.append(model(ids, past_key_values=cache, use_cache=True).logits[0])
        start += chunk
    return torch.cat(pieces)


def compare_with_torch(
    model: CompiledModel, *, count: int, seed: int = 0, tick: Callable[[str], None] = lambda axis: None
) -> list[Comparison]:
    """Measure DEMO_AXES on both with the same configurations; call ``tick(axis)`` after each measurement."""
    plain = load_model(TINY, device=model.device)
    prompts = prompts_for(model, ModelSpec(TINY), seed, DEMO_LENGTHS)
    comparisons = []
    for axis in DEMO_AXES:
        plan = configurations(axis, prompts, count, random.Random(f"{axis} {seed}"))
        theirs = None
        if axis != "kv":  # Hugging Face's cache has no blocks to move
            theirs = AxisResult()
            for configuration in plan:
                theirs.add(configuration.rows[configuration.target], score_plain(plain, configuration))
                tick(axis)
        comparisons.append(Comparison(axis, theirs, measure(model, plan, functools.partial(tick, axis))))
    return comparisons


def _show_completion(compiled: CompiledModel, console: Console) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY_FOLDER, local_files_only=True)
    ids = torch.tensor([tokenizer(DEMO_PROMPT)["input_ids"]], device=compiled.device)
    text = tokenizer.decode(compiled.generate(ids, max_new_tokens=DEMO_TOKENS)[0, ids.shape[1] :])
    console.print("\n[bold]The embedded model continues a prompt[/] (greedy)")
    console.print(DEMO_PROMPT, style="dim", end="", markup=False, highlight=False)
    console.print(text, markup=False, highlight=False)


def _table(comparisons: list[Comparison], dtype: torch.dtype) -> Table:
    table = Table(
        title=f"All configurations of an axis, {str(dtype).removeprefix('torch.')}, for the worse of two prompts",
        caption="logits: distinct byte strings; outputs: distinct likeliest tokens; max Δp: largest difference of a"
        " probability. 1, 1 and 0 mean that no bit follows the axis.",
    )
    add_columns(
        table, "axis", "runs", "torch\nlogits", "\noutputs", "\nmax Δp", "ours\nlogits", "\noutputs", "\nmax Δp"
    )
    for comparison in comparisons:
        theirs = comparison.torch.figures if comparison.torch else ("–", "–", "–")
        table.add_row(comparison.axis, str(comparison.ours.configurations), *theirs, *comparison.ours.figures)
    return table
