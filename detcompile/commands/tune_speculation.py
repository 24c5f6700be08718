"""`detcompile tune-speculation`: measures drafts on code and prose; prints a table or JSON, and writes a plot."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from detcompile.commands.loading_options import sizes
from detcompile.commands.options import Json, Loading, Model, compile_model, logs, progress_bar
from detcompile.commands.text_files import require_place, write_text_file
from detcompile.commands.tuning.draft_trials import Trial, Workload, advice, tune_speculation
from detcompile.commands.tuning.report import advice_text, read_text, speedup_plot, trials_table
from detcompile.models.compiled import CompiledModel
from detcompile.runtime.requests.sampling_params import SamplingParams

KINDS = ("code", "prose")


def command(
    model: Model,
    draft: Annotated[
        str | None, typer.Option(help="A smaller model, same tokenizer: folder, Hub id (main), 'tiny-draft'.")
    ] = None,
    code: Annotated[Path | None, typer.Option(help="Text to cut code prompts from; default: this package's.")] = None,
    prose: Annotated[Path | None, typer.Option(help="The same for prose; default: docstrings of this package.")] = None,
    nodes: Annotated[str, typer.Option(help="Comma-separated sizes of drafts to try.")] = "1,2,3,5,8",
    batch: Annotated[int, typer.Option(min=1, help="Prompts of each kind, served together.")] = 1,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Of each prompt.")] = 128,
    max_tokens: Annotated[int, typer.Option(min=2, help="Generated for each prompt.")] = 96,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each kind; the fastest counts.")] = 2,
    plot: Annotated[Path, typer.Option(help="Where the plot is written.")] = Path("speculation.svg"),
    json_output: Json = False,
    *,
    loading: Loading,
) -> None:
    """Measure drafts on code and on prose: which are fastest, and how good another draft model must be."""
    require_place(plot, "--plot")
    target = compile_model(loading.spec(model))
    small = None if draft is None else compile_model(replace(loading, revision=None).spec(draft))
    texts = zip(KINDS, (code, prose), strict=True)
    workloads = [Workload.of(kind, read_text(kind, file), target, batch, prompt_tokens) for kind, file in texts]
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=0, ignore_eos=True)
    trials = _measured(target, small, workloads, sizes(nodes), params, repeats)
    results = [one for kind in KINDS if (one := advice(trials, kind)) is not None]
    write_text_file(plot, speedup_plot(trials, f"{model}, draft {draft or 'none'}, batch {batch}, {target.device}"))
    if json_output:
        print(json.dumps({"trials": [trial.to_json() for trial in trials], "advice": [asdict(one) for one in results]}))
        return
    Console().print(trials_table(trials))
    print(advice_text(trials, results))
    logs.print(f"plot: {plot}", highlight=False)


def _measured(
    target: CompiledModel,
    draft: CompiledModel | None,
    workloads: list[Workload],
    nodes: tuple[int, ...],
    params: SamplingParams,
    repeats: int,
) -> list[Trial]:
    with progress_bar() as progress:
        task = progress.add_task("measuring", total=None)
        return tune_speculation(
            target,
            draft,
            workloads,
            nodes=nodes,
            params=params,
            repeats=repeats,
            tick=lambda name: progress.update(task, description=f"measuring {name}"),
        )
