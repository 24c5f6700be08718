"""The numbers of the TBIK table for handmade answers, and its prompts from files."""

import pytest

from benchmarks.tbik import Answer, compare, read_prompts
from detcompile import InvalidInput


def test_equal_answers_count_as_one_without_divergence() -> None:
    answers = [Answer([5, 6], [[0.5, 0.3], [0.9, 0.1]]), Answer([7], [[0.6, 0.2]])]
    actual = compare({(1, 8): answers, (1, 16): answers, (2, 8): answers})
    assert actual == {
        "configurations": 3,
        "prompts": 2,
        "unique outputs": 1.0,
        "average divergence": 0.0,
        "maximum divergence": 0.0,
    }


def test_differences_are_counted_and_measured() -> None:
    one = [Answer([5, 6], [[0.5, 0.25], [0.75, 0.125]]), Answer([7], [[0.5, 0.25]])]
    two = [Answer([5, 8, 9], [[0.5, 0.25], [0.5, 0.25], [1.0, 0.0]]), Answer([7], [[0.5, 0.375]])]
    actual = compare({(1, 8): one, (2, 8): two})
    assert actual["unique outputs"] == 1.5
    assert actual["average divergence"] == (0.25 / 2 + 0.125) / 2, "the third position has no partner"
    assert actual["maximum divergence"] == 0.25


def test_prompts_come_from_text_and_json_lines(tmp_path) -> None:
    text, lines, bad = tmp_path / "a.txt", tmp_path / "b.jsonl", tmp_path / "c.jsonl"
    text.write_text("one\ntwo\n---\nthree")
    lines.write_text('{"problem": "x"}\n\n{"prompt": "y"}\n')
    bad.write_text('{"question": "x"}\n')
    assert read_prompts(text, 9) == ["one\ntwo", "three"]
    assert read_prompts(lines, 9) == ["x", "y"] and read_prompts(lines, 1) == ["x"]
    with pytest.raises(InvalidInput, match='a "prompt" or a "problem"'):
        read_prompts(bad, 9)
    assert len(set(read_prompts(None, 32))) == 32
