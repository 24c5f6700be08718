"""The command line: detcompile demo | generate | verify | check | export | tune-speculation. Results go to standard
output, progress to standard error."""

import io
import json
import sys
import time
from dataclasses import asdict
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
from detcompile.commands.axes import AxisResult
from detcompile.commands.certificate_page import certificate_page, refusal_page
from detcompile.commands.demo import DEMO_AXES, Comparison, compare_with_torch
from detcompile.commands.generate import answer, read_prompts, show, summary, with_own_seeds
from detcompile.commands.tune_speculation import Workload, advice, tune_speculation
from detcompile.commands.tune_speculation_report import (
    advice_text,
    read_text,
    require_place,
    speedup_plot,
    trials_table,
)
from detcompile.commands.verification import ModelSpec, available_axes, require_axes, verify
from detcompile.errors import DetcompileError
from detcompile.exporting import export, require_target
from detcompile.models.compiled import CompiledModel
from detcompile.runtime.engine import Engine
from detcompile.runtime.engine_config import AllocationName, EngineConfig, SchedulerName
from detcompile.runtime.requests.outputs import RequestOutput
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.storage import naming

__all__ = ["app", "main"]

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
logs = Console(stderr=True)

DEMO_PROMPT = '''def mean(values: list[float]) -> float:
    """Return the arithmetic mean of a list of numbers."""
'''
DEMO_TOKENS = 64

Model = Annotated[
    str, typer.Argument(help=f"A local Hugging Face model folder, '{TINY}' (the embedded model), or an exported .pt2.")
]
Random = Annotated[bool, typer.Option("--random", help="Random weights for the folder's config.json.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; default: the checkpoint's.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; default: a GPU if there is one.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
TpSizes = Annotated[str, typer.Option(help="Declared tensor-parallel sizes.")]


def main() -> None:
    """Entry point: our own errors end with their message and exit code 2, without a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # an answer may hold what a terminal's encoding does not
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
    axes: Annotated[str | None, typer.Option(help="Comma-separated axes; default: all but tp and export.")] = None,
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
    chosen = axes.split(",") if axes else None
    require_axes(chosen or ())  # before the time that compiling takes
    compiled = _compile(spec)
    chosen = chosen or available_axes(compiled.device.type)
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
    html: Annotated[Path | None, typer.Option(help="Also write it, or the refusal, as a page to this file.")] = None,
) -> None:
    """Print the certificate: every operation, its place in the model's source, its class, order and proof."""
    if html is not None:
        require_place(html, "--html")
    try:
        compiled = _compile(ModelSpec(model, random, dtype, device, _sizes(tp_sizes)))
    except DetcompileError as error:
        if html is not None:
            _write_text(html, refusal_page(error, title=Path(model).name))
        raise
    if html is not None:
        page = certificate_page(compiled.certificate, title=Path(model).name, fingerprint=compiled.fingerprint)
        _write_text(html, page)
    if json_output:
        print(json.dumps({"fingerprint": compiled.fingerprint, **json.loads(compiled.certificate.to_json())}))
        return
    print(compiled.certificate)
    print(f"\n{compiled.certificate.summary()}; fingerprint {compiled.fingerprint}")


@app.command(name="export")
def export_command(
    model: Model,
    path: Annotated[Path, typer.Argument(help="The file to write; ends with .pt2.")],
    beside: Annotated[bool, typer.Option("--beside", help="Weights in a .safetensors next to it, not inside.")] = False,
    tp: Annotated[int, typer.Option(min=1, help="Ranks that share the model, here and where it is loaded.")] = 1,
    random: Random = False,
    dtype: Dtype = None,
    device: Device = None,
    tp_sizes: TpSizes = "1,2,4,8",
) -> None:
    """Write the compiled model to one file, which every command takes as MODEL, and detcompile.load in Python."""
    require_target(path)
    compiled = _compile(ModelSpec(model, random, dtype, device, _sizes(tp_sizes)), tp)
    with _progress() as progress:
        progress.add_task(f"exporting to {path.name}", total=None)
        export(compiled, path, weights="beside" if beside else "inside")
    print(f"{path}: {path.stat().st_size} bytes, fingerprint {compiled.fingerprint}")


@app.command()
def generate(
    model: Model,
    prompts: Annotated[list[str] | None, typer.Argument(help="Text as it is, without a chat template.")] = None,
    file: Annotated[Path | None, typer.Option(help="Prompts, one a line; without prompts: standard input.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Generated tokens at most.")] = 128,
    min_tokens: Annotated[int, typer.Option(help="Nothing ends the answer up to this many tokens.")] = 0,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Keep the fewest tokens that reach this probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")] = 0,
    min_p: Annotated[float, typer.Option(help="Keep tokens this many times as likely as the likeliest.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Of the first prompt; the next ones take seed + 1, ….")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends the answer; may be repeated.")] = None,
    n: Annotated[int, typer.Option(help="Answers a prompt.")] = 1,
    logprobs: Annotated[int | None, typer.Option(help="Likeliest tokens reported with each; with --json.")] = None,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: tokens seen become less likely.")] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="In [-2, 2].")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="In [-2, 2].")] = 0.0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end-of-sequence token.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object a prompt, a line each.")] = False,
    scheduler: Annotated[SchedulerName, typer.Option(help="How steps are made up; changes no bit.")] = "stall_free",
    allocation: Annotated[AllocationName, typer.Option(help="When KV blocks are taken.")] = "lazy",
    max_num_batched_tokens: Annotated[int, typer.Option(help="Token budget of a step.")] = 8192,
    max_num_seqs: Annotated[int | None, typer.Option(help="Sequences at a time; default: all, up to 1024.")] = None,
    block_size: Annotated[int, typer.Option(help="Tokens a KV block.")] = 64,
    num_blocks: Annotated[int | None, typer.Option(help="Of the KV cache; default: as memory allows.")] = None,
    random: Random = False,
    dtype: Dtype = None,
    device: Device = None,
    tp_sizes: TpSizes = "1,2,4,8",
) -> None:
    """Answer prompts; the seed printed repeats an answer bit for bit. Exit 2 if a prompt could not be answered."""
    if logprobs is not None and not json_output:
        raise typer.BadParameter("log-probabilities are printed as JSON only: add --json", param_hint="--logprobs")
    asked = read_prompts(prompts or [], file)
    params = SamplingParams(
        n=n,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        stop=tuple(stop or ()),
        logprobs=logprobs,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        ignore_eos=ignore_eos,
    )
    config = EngineConfig(
        scheduler=scheduler,
        allocation=allocation,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=min(n * len(asked), 1024) if max_num_seqs is None else max_num_seqs,
        block_size=block_size,
        num_blocks=num_blocks,
    )
    compiled = _compile(ModelSpec(model, random, dtype, device, _sizes(tp_sizes)))
    engine = compiled.engine(config)
    stream = len(asked) == 1 and n == 1 and not json_output and sys.stdout.isatty()
    each = with_own_seeds(params, len(asked))
    outputs = _stream(engine, asked, each) if stream else _answer(engine, asked, each)
    if not stream:
        show(outputs, compiled.fingerprint if json_output else "", json_output=json_output)
    for number, output in enumerate(outputs, 1):
        logs.print(summary(number, output), markup=False, highlight=False, soft_wrap=True)
    if any(output.error is not None for output in outputs):
        raise typer.Exit(2)


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


@app.command(name="tune-speculation")
def tune_speculation_command(
    model: Model,
    draft: Annotated[
        str | None, typer.Option(help="Folder of a smaller model, same tokenizer; or 'tiny-draft'.")
    ] = None,
    code: Annotated[Path | None, typer.Option(help="Text to cut code prompts from; default: this package's.")] = None,
    prose: Annotated[Path | None, typer.Option(help="The same for prose; default: docstrings of this package.")] = None,
    nodes: Annotated[str, typer.Option(help="Comma-separated sizes of drafts to try.")] = "1,2,3,5,8",
    batch: Annotated[int, typer.Option(min=1, help="Prompts of each kind, served together.")] = 1,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Of each prompt.")] = 128,
    max_tokens: Annotated[int, typer.Option(min=2, help="Generated for each prompt.")] = 96,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each kind, of which the fastest counts.")] = 2,
    plot: Annotated[Path, typer.Option(help="Where the plot is written.")] = Path("speculation.svg"),
    json_output: Json = False,
    dtype: Dtype = None,
    device: Device = None,
    tp_sizes: TpSizes = "1,2,4,8",
) -> None:
    """Try drafts on code and on prose: what is fastest, and what another draft model would have to be."""
    require_place(plot, "--plot")
    target = _compile(ModelSpec(model, False, dtype, device, _sizes(tp_sizes)))
    small = None if draft is None else _compile(ModelSpec(draft, False, dtype, device, _sizes(tp_sizes)))
    workloads = [
        Workload.of(kind, read_text(kind, file), target, batch, prompt_tokens)
        for kind, file in (("code", code), ("prose", prose))
    ]
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=0, ignore_eos=True)
    with _progress() as progress:
        task = progress.add_task("measuring", total=None)
        trials = tune_speculation(
            target,
            small,
            workloads,
            nodes=_sizes(nodes),
            params=params,
            repeats=repeats,
            tick=lambda name: progress.update(task, description=f"measuring {name}"),
        )
    found = [one for kind in ("code", "prose") if (one := advice(trials, kind)) is not None]
    _write_text(plot, speedup_plot(trials, f"{model}, draft {draft or 'none'}, batch {batch}, {target.device}"))
    if json_output:
        print(json.dumps({"trials": [trial.to_json() for trial in trials], "advice": [asdict(one) for one in found]}))
        return
    Console().print(trials_table(trials))
    print(advice_text(trials, found))
    logs.print(f"plot: {plot}", highlight=False)


def _write_text(path: Path, text: str) -> None:
    with naming(path):
        path.write_text(text, encoding="utf-8", errors="backslashreplace")


def _answer(engine: Engine, prompts: list[str], params: list[SamplingParams]) -> list[RequestOutput]:
    with _progress(total=True) as progress:
        task = progress.add_task("generating", total=len(prompts))
        return answer(engine, prompts, params, tick=lambda output: progress.advance(task, int(output.finished)))


def _stream(engine: Engine, prompts: list[str], params: list[SamplingParams]) -> list[RequestOutput]:
    """One prompt into a terminal: its text as it comes."""
    console, shown = Console(), 0
    console.print(prompts[0], style="dim", end="", markup=False, highlight=False, soft_wrap=True)

    def write(output: RequestOutput) -> None:
        nonlocal shown
        text = output.outputs[0].text if output.outputs else ""
        print(text[shown:], end="", flush=True)
        shown = len(text)

    outputs = answer(engine, prompts, params, stream_text=True, tick=write)
    print()
    return outputs


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


def _compile(spec: ModelSpec, tp: int = 1) -> CompiledModel:
    start = time.perf_counter()
    with _progress() as progress:
        progress.add_task(f"compiling {Path(spec.name).name}", total=None)
        compiled = spec.compile(tp)
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
