"""The demo on a chat model: here the embedded one, whose answers mean nothing."""

from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

from detcompile.commands import chat_demo, cli, demo
from detcompile.errors import InvalidInput
from tests.model_cases import compiled


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_demo, "MAX_TOKENS", 24)
    monkeypatch.setattr(chat_demo, "BATCHES", (1, 3))
    monkeypatch.setattr(chat_demo, "compile_model", lambda *_: compiled("tiny", torch.bfloat16))


def test_demo_shows_answers_receipt_and_speeds() -> None:
    done = CliRunner().invoke(cli.app, ["demo", "tiny-draft", "--device", "cpu"], env={"COLUMNS": "160"})
    text = " ".join(done.output.split())
    assert done.exit_code == 0, done.output
    expected = ("The answers of transformers are", "Different answers", "batches of 1, 3", "prefix cache")
    for words in (*expected, "prompt in chunks", "all 24 tokens were reproduced"):
        assert words in text
    assert "token 20 forged: differs: " in text and "Tokens a second here" in text


def test_demo_fails_if_our_answers_differ() -> None:
    with mock.patch.object(chat_demo, "_run", _with_other_tokens(chat_demo._run)):
        assert not chat_demo.show("tiny-draft", "cpu")


def _with_other_tokens(run):
    def changed(engine, prompts, temperature):
        result, output = run(engine, prompts, temperature)
        return result._replace(tokens=[*result.tokens[:-1], len(prompts)]), output

    return changed


@pytest.mark.parametrize(
    ("one", "other", "at"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([1, 2], [1], 1), ([], [], None)],
)
def test_first_difference(one: list[int], other: list[int], at: int | None) -> None:
    assert chat_demo.first_difference(one, other) == at


def test_noise_depends_only_on_the_row() -> None:
    scores, ids = torch.zeros(3, 50), torch.zeros(3, 1, dtype=torch.long)
    alone, batch = chat_demo.OwnNoise(0.8, [7]), chat_demo.OwnNoise(0.8, [7, 8, 9])
    for _ in range(3):
        assert torch.equal(alone(ids[:1], scores[:1])[0], batch(ids, scores)[0])
    assert len(set(batch(ids, scores).argmax(-1).tolist())) > 1


def test_default_model_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.object(demo, "find_checkpoint", mock.Mock(side_effect=InvalidInput("not on this machine"))):
        assert demo._default_model() == "tiny"
    with mock.patch.object(demo, "find_checkpoint"):
        assert demo._default_model() == "smollm2"
