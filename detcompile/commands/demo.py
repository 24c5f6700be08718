"""`detcompile demo`: plain transformers beside detcompile, on a chat model or, axis by axis, on the embedded one."""

import functools
import importlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor
from transformers import AutoTokenizer, DynamicCache, PreTrainedModel

from detcompile.api import load_model
from detcompile.commands.axes import AxisResult, Configuration, configurations, measure, padded_batch
from detcompile.commands.loading_options import Device
from detcompile.commands.options import add_columns, compile_model, logs, progress_bar
from detcompile.commands.verification import RESTART, available_axes, prompt_texts, prompts_for
from detcompile.errors import InvalidInput
from detcompile.models.compiled import CompiledModel
from detcompile.models.hub import TINY, TINY_FOLDER, find_checkpoint
from detcompile.models.spec import ModelSpec
from detcompile.models.wheel_models import SMOLLM2
from detcompile.transformers_internals.generation import cache_keyword

DEMO_AXES = tuple(axis for axis in available_axes("cpu") if axis != RESTART)
TEXT_PROMPT = "def count_words(text):\n"
TEXT_TOKENS = 48
BATCHES = (1, 2, 3, 5, 9)
DEMO_LENGTHS = (12, 67, 33, 130)  # prompt lengths; plain torch on a CPU without bfloat16 reads 300 tokens a second


def command(
    model: Annotated[
        str | None, typer.Argument(help=f"A chat model, or '{TINY}'; default: {SMOLLM2.name} if it is here.")
    ] = None,
    configurations: Annotated[
        int, typer.Option(min=2, help=f"Of '{TINY}': configurations an axis, for each of two prompts.")
    ] = 5,
    device: Device = None,
) -> None:
    """Plain transformers beside detcompile: one question in batches of 1 to 16, and what differs."""
    if model is None:
        model = _default_model()
    if model != TINY:
        chat_demo = importlib.import_module("detcompile.commands.chat_demo")  # needs packages of the extra serve
        if not chat_demo.show(model, device):
            raise typer.Exit(1)
        return
    console = Console()
    compiled, plain = compile_model(ModelSpec(TINY, device=device)), load_model(TINY, device=device)
    ours = [greedy_tokens(compiled, batch) for batch in BATCHES]
    console.print(_texts([greedy_tokens(plain, batch) for batch in BATCHES], ours))
    steps = (2 * len(DEMO_AXES) - 1) * 2 * configurations
    with progress_bar(total=True) as progress:
        task = progress.add_task("measuring", total=steps)
        comparisons = compare_with_torch(
            compiled,
            plain,
            count=configurations,
            tick=lambda axis: progress.update(task, advance=1, description=f"measuring {axis}"),
        )
    console.print(_table(comparisons, compiled.dtype))
    console.print(f"[bold]Certificate[/]: {compiled.certificate.summary()}; `detcompile check tiny` shows it")
    if any(tokens != ours[0] for tokens in ours) or not all(comparison.ours.holds for comparison in comparisons):
        raise typer.Exit(1)


def _default_model() -> str:
    try:
        find_checkpoint(SMOLLM2.name)
    except InvalidInput as error:
        logs.print(f"{error}\nThe embedded model '{TINY}' replaces it; it is not a chat model.", highlight=False)
        return TINY
    return SMOLLM2.name


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
        pieces.append(model(ids, **{cache_keyword(model): cache}, use_cache=True).logits[0])
        start += chunk
    return torch.cat(pieces)


def compare_with_torch(
    model: CompiledModel,
    plain: PreTrainedModel,
    *,
    count: int,
    tick: Callable[[str], None] = lambda axis: None,
) -> list[Comparison]:
    """Measure DEMO_AXES on both with the same configurations; call ``tick(axis)`` after each measurement."""
    prompts = prompts_for(model, ModelSpec(TINY), 0, DEMO_LENGTHS)
    comparisons = []
    for axis in DEMO_AXES:
        plan = configurations(axis, prompts, count, random.Random(f"{axis} 0"))
        theirs = None
        if axis != "kv":  # Hugging Face's cache has no blocks to move
            theirs = AxisResult()
            for configuration in plan:
                theirs.add(configuration.rows[configuration.target], score_plain(plain, configuration))
                tick(axis)
        comparisons.append(Comparison(axis, theirs, measure(model, plan, functools.partial(tick, axis))))
    return comparisons


@torch.no_grad()
def greedy_tokens(model: PreTrainedModel | CompiledModel, batch: int) -> list[int]:
    """Return the tokens that generate() appends to TEXT_PROMPT in the first row of a left-padded batch."""
    tokenizer = _tokenizer()
    tokenizer.padding_side, tokenizer.pad_token_id = "left", 0
    prompts = [TEXT_PROMPT, *prompt_texts()[: batch - 1]]
    encoded = tokenizer(prompts, return_tensors="pt", padding=True).to(model.device)
    inputs = {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}
    rows = model.generate(**inputs, max_new_tokens=TEXT_TOKENS, do_sample=False)
    return rows[0, inputs["input_ids"].shape[1] :].tolist()


def _tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY_FOLDER, local_files_only=True)


def _texts(theirs: Sequence[list[int]], ours: Sequence[list[int]]) -> Table:
    """Show plain torch's text alone, its first other text, and ours; the first other token of each in red."""
    tokenizer = _tokenizer()
    columns = {"plain torch, alone": _marked(tokenizer, theirs[0], theirs[0])}
    other = next((place for place, tokens in enumerate(theirs) if tokens != theirs[0]), None)
    if other is not None:
        columns[f"plain torch, batch of {BATCHES[other]}"] = _marked(tokenizer, theirs[0], theirs[other])
    differing = next((tokens for tokens in ours if tokens != ours[0]), ours[0])
    columns["detcompile"] = _marked(tokenizer, ours[0], differing)
    counts = [len(set(map(tuple, texts))) for texts in (theirs, ours)]
    table = Table(
        title=f"{TEXT_PROMPT.strip()!r} continued greedily in batches of {', '.join(map(str, BATCHES))}. Different"
        f" texts: plain torch {counts[0]}, detcompile {counts[1]}"
    )
    for name in columns:
        table.add_column(name, ratio=1)
    table.add_row(*columns.values())
    return table


def _marked(tokenizer: Any, expected: list[int], tokens: list[int]) -> Text:
    pairs = enumerate(zip(expected, tokens, strict=False))
    at = next((place for place, (one, other) in pairs if one != other), len(tokens))
    text = Text(tokenizer.decode(tokens))
    text.stylize("bold red", len(tokenizer.decode(tokens[:at])), len(tokenizer.decode(tokens[: at + 1])))
    return text


def _table(comparisons: list[Comparison], dtype: torch.dtype) -> Table:
    table = Table(
        title=f"Logits under every configuration of an axis, {str(dtype).removeprefix('torch.')}, worst of two prompts",
        caption="logits: distinct byte strings; outputs: distinct most likely tokens; max Δp: largest difference of a"
        " probability. 1, 1 and 0: the axis changes no bit.",
    )
    add_columns(
        table, "axis", "runs", "torch\nlogits", "\noutputs", "\nmax Δp", "ours\nlogits", "\noutputs", "\nmax Δp"
    )
    for comparison in comparisons:
        theirs = comparison.torch.figures if comparison.torch else ("–", "–", "–")
        table.add_row(comparison.axis, str(comparison.ours.configurations), *theirs, *comparison.ours.figures)
    return table
