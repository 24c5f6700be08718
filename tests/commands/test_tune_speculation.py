"""tune-speculation: trials on the embedded model, advice by the formula, table and plot."""

import io
import json
import re
import time
from xml.etree import ElementTree

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from detcompile.commands import cli
from detcompile.commands.text_files import require_place
from detcompile.commands.tuning.draft_trials import Trial, Workload, advice, embedded_text, tune_speculation
from detcompile.commands.tuning.report import (
    advice_text,
    read_text,
    speedup_plot,
    trials_table,
)
from detcompile.errors import InvalidInput
from detcompile.models.spec import ModelSpec
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.runtime.speculation.ngram_drafter import NGramDrafter
from tests.exhaustive import EXHAUSTIVE
from tests.model_cases import compiled

PLAIN = Trial("code", "none", 0, milliseconds=10.0, speedup=1.0)


def chain(nodes: int, acceptance: float, tokens: float, draft: float, milliseconds: float) -> Trial:
    return Trial("code", "chain", nodes, milliseconds, 10.0 / milliseconds, draft, acceptance, tokens, tokens)


@EXHAUSTIVE
def test_trials_cover_all_workloads_and_kinds():
    model = compiled("tiny-draft", torch.bfloat16)
    workloads = [Workload.of(kind, embedded_text(kind), model, 1, 20) for kind in ("code", "prose")]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    trials = tune_speculation(model, model, workloads, nodes=(2,), params=params)
    assert [(t.kind, t.drafts, t.nodes) for t in trials] == [
        (kind, *drafts)
        for drafts in (("none", 0), ("n-gram", 2), ("chain", 2), ("grown", 2))
        for kind in ("code", "prose")
    ]
    for trial in trials:
        assert trial.milliseconds > 0 and 1 <= trial.tokens <= 3
        if trial.drafts == "chain":  # the model drafts for itself
            assert trial.acceptance == 1 and trial.tokens == trial.expected > 2
    for kind in ("code", "prose"):
        actual = advice(trials, kind)
        assert actual is not None and actual.acceptance == 1 and actual.cost > 0


class SlowAtFirst(NGramDrafter):
    """A drafter whose first call compiles its kernels."""

    def __init__(self) -> None:
        super().__init__(2)
        self.asked = False

    def propose(self, sequences, max_depth):
        if not self.asked:
            time.sleep(0.5)
        self.asked = True
        return super().propose(sequences, max_depth)


def test_warmup_of_drafts_is_not_counted(monkeypatch):
    drafter = ("n-gram", 2, SlowAtFirst())
    monkeypatch.setattr("detcompile.commands.tuning.draft_trials.plan", lambda draft, nodes: iter([drafter]))
    model = compiled("tiny-draft", torch.bfloat16)
    workload = Workload.of("code", embedded_text("code"), model, 1, 20)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    _, trial = tune_speculation(model, None, [workload], nodes=(2,), params=params)
    assert trial.draft_milliseconds < 500 / 24  # of twelve steps at most, twice


def test_command_prints_table_and_writes_plot(tmp_path, monkeypatch):
    monkeypatch.setattr(ModelSpec, "compile", lambda spec, tp: compiled("tiny-draft", torch.bfloat16))
    text = tmp_path / "text"
    text.write_text("one line of a text that says little\n" * 40)
    arguments = ["tune-speculation", "tiny", "--prose", str(text), "--nodes", "1,2", "--prompt-tokens", "16"]
    arguments += ["--max-tokens", "8", "--repeats", "1", "--plot", str(tmp_path / "plot.svg"), "--json"]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    actual = json.loads(next(line for line in result.output.splitlines() if line.startswith("{")))
    assert {trial["drafts"] for trial in actual["trials"]} == {"none", "n-gram"} and actual["advice"] == []
    ElementTree.fromstring((tmp_path / "plot.svg").read_text())


def test_advice_follows_the_formula():
    """Guesses cost 0.05 plain steps and are right 80% of the time: four to six per step, near three times faster."""
    trials = [PLAIN, chain(2, 0.8, 2.44, 1.0, 4.5), chain(5, 0.8, 3.69, 2.5, 3.4)]
    actual = advice(trials, "code")
    assert actual is not None
    assert actual.cost == pytest.approx(0.05) and actual.verification == pytest.approx((3.4 * 3.69 - 2.5) / 10)
    assert 4 <= actual.guesses <= 8 and 2.5 < actual.speedup < 3.2
    assert actual.half_rate < 0.8 < actual.double_rate
    calls = advice_text(trials, [actual])
    assert "chain with 5 nodes" in calls and "right 0.80 of the time" in calls
    assert advice([PLAIN, chain(2, 0.0, 1.0, 1.0, 12.0)], "code") is None
    assert "leave speculation off" in advice_text([PLAIN, chain(2, 0.0, 1.0, 1.0, 12.0)], [])


def test_table_and_plot_show_every_trial():
    trials = [PLAIN, chain(2, 0.8, 2.44, 1.0, 4.5), chain(5, 0.8, 3.69, 2.5, 4.0)]
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(trials_table(trials))
    shown = console.export_text()
    assert all(f"{trial.milliseconds:.2f}" in shown for trial in trials)
    svg = speedup_plot(trials, "a <note>")
    assert len(re.findall("<circle", svg)) == 2 and "a &lt;note&gt;" in svg
    heights = [float(cy) for cy in re.findall(r'cy="([\d.]+)"', svg)]
    assert heights[1] < heights[0], "the faster one stands higher"


def test_invalid_texts_are_refused(tmp_path):
    with pytest.raises(InvalidInput, match="cannot be read"):
        read_text("code", tmp_path / "nothing")
    with pytest.raises(InvalidInput, match="give a longer text"):
        Workload.of("code", "x = 1", compiled("tiny-draft", torch.bfloat16), 1, 50)
    with pytest.raises(InvalidInput, match="a folder that exists"):
        require_place(tmp_path / "nothing" / "plot.svg", "--plot")
    require_place(tmp_path / "plot.svg", "--plot")
    with pytest.raises(InvalidInput, match="of at least 1"):
        tune_speculation(compiled("tiny-draft", torch.bfloat16), None, [], nodes=(2, 0), params=SamplingParams())
    assert "def " in read_text("code", None) and "def " not in read_text("prose", None)[:2000]
