"""`detcompile audit`: checks a receipt log: its chain, its signatures, and a replayed sample of its answers."""

from pathlib import Path
from typing import Annotated

import typer

from detcompile.commands.loading_options import Random
from detcompile.commands.options import Loading, logs, progress_bar
from detcompile.commands.receipts.replay import Adapters, MaxLoraRank, compile_with, spec_of
from detcompile.errors import InvalidInput
from detcompile.models.compiled import CompiledModel
from detcompile.serving.receipts.keys import read_verify_key
from detcompile.serving.receipts.log import Line, checked_lines, is_sampled, miss_probability
from detcompile.serving.receipts.replay import Replayer
from detcompile.serving.receipts.verdict import Verdict

UNCHECKED = 3  # exit code: no fault, but some of the sample could not be checked

REPORTED_SHARES = (0.1, 0.01)  # shares of wrong receipts to report the miss probability for


def command(
    log: Annotated[Path, typer.Argument(help="File of `detcompile serve --receipt-log`.")],
    model: Annotated[str | None, typer.Argument(help="Model to replay on; default: as the receipts name it.")] = None,
    sample: Annotated[float, typer.Option(min=0, max=1, help="Share of the receipts that is replayed.")] = 0.01,
    seed: Annotated[int, typer.Option(help="Chooses the sample: keep it secret from the server.")] = 0,
    key: Annotated[Path | None, typer.Option(help="Public key that must have signed every line.")] = None,
    head: Annotated[str | None, typer.Option(help="sha256 of a line or a receipt that must be in the log.")] = None,
    adapter: Adapters = None,
    max_lora_rank: MaxLoraRank = None,
    tp: Annotated[int, typer.Option(min=1, help="Ranks, each in a process.")] = 1,
    random: Random = False,
    *,
    loading: Loading,
) -> None:
    """Check a receipt log: chain, signatures, and by replay a sample; exit 1: a fault, 3: answers not checked."""
    verify_key = None if key is None else read_verify_key(key)
    if not log.is_file():
        raise InvalidInput(f"{log}: no such file; give what `detcompile serve --receipt-log` wrote")
    count, chosen = 0, list[Line]()
    try:
        for line in checked_lines(log, verify_key, head):
            count += 1
            if is_sampled(line, sample, seed):
                chosen.append(line)
    except InvalidInput as error:
        print(f"broken: {error}")
        raise typer.Exit(1) from error
    checked = "chained and signed" if verify_key is not None else "chained (no --key: signatures unchecked)"
    print(f"{count} receipt{'s' * (count != 1)}, {checked}; {len(chosen)} to replay")
    num_checked = 0
    if chosen:
        spec = spec_of(chosen[0].receipt, model, loading, random)
        compiled = compile_with(spec, tp, adapter or [], max_lora_rank)
        num_checked = _replay(log, chosen, compiled)
    for share in REPORTED_SHARES if num_checked < count else ():
        missed = miss_probability(share, num_checked)
        print(f"were {share:.0%} of all receipts wrong, this audit would have missed it with probability {missed:.3g}")
    if num_checked < len(chosen):
        raise typer.Exit(UNCHECKED)


def _replay(log: Path, chosen: list[Line], model: CompiledModel) -> int:
    """Replay lines; print those that differ or cannot be checked here. Return how many were equal."""
    faults, num_unchecked = 0, 0
    with progress_bar(total=True) as bar:
        task = bar.add_task("replaying", total=len(chosen))
        for number, result in Replayer(model).check_all(line.receipt for line in chosen):
            line = chosen[number]
            if isinstance(result, Verdict):
                outcome, message = result.outcome, f"{result.field}: {result.message}"
            else:
                outcome, message = "incomparable" if line.receipt.level == "hashes" else "differs", str(result)
            num_unchecked += outcome == "incomparable"
            faults += outcome == "differs"
            if outcome != "equal":
                prefix = "not checked: " if outcome == "incomparable" else ""
                print(f"{log}, line {line.number + 1}, {line.receipt.id}: {prefix}{message}")
            bar.advance(task)
    num_checked = len(chosen) - num_unchecked
    if num_unchecked:
        print(f"{num_unchecked} of {len(chosen)} were not checked: replay them on the right model, or with an opening")
    if faults:
        print(f"{faults} of {num_checked} were not reproduced")
        raise typer.Exit(1)
    logs.print(f"all {num_checked} checked answers were reproduced", highlight=False)
    return num_checked
