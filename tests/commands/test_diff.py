"""`detcompile diff` names the part, weight, request, sample and token that differ, and rejects bad files by name."""

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from detcompile.archives.archive import Share, write_archive
from detcompile.archives.stored_weights import StoredWeights
from detcompile.commands import cli, options
from detcompile.commands.inspection.fingerprint_differences import MEANINGS
from detcompile.commands.verification import ModelSpec
from detcompile.digests import fingerprint, weights_digest
from detcompile.errors import ArchiveError, InvalidInput

ROOT = Path(__file__).parents[2]
DIGESTS = {"a.weight": "bfloat16 [3, 5] " + "0" * 32, "b.weight": "bfloat16 [7] " + "1" * 32}
PARTS = dict.fromkeys(MEANINGS, "one") | {"weights": weights_digest(DIGESTS), "orders": "Sequential(3); Tree(8)"}
PARAMS = {"n": 2, "max_tokens": 3, "temperature": 0.8, "logprobs": 1, "stop": []}


def sample(index: int, tokens: list[int]) -> dict[str, Any]:
    top = [{"token_id": 1, "logprob": -0.1}, {"token_id": 2, "logprob": -0.2}]
    steps = [{"token_id": token, "logprob": -0.1 * token, "top": top} for token in tokens]
    ends = {"finish_reason": "length", "stop_reason": None, "text": " ".join(map(str, tokens))}
    return {"index": index, "token_ids": tokens, "logprobs": steps, **ends}


def request(prompt: list[int], seed: int) -> dict[str, Any]:
    answers = [sample(0, [4, 5, 6]), sample(1, [7, 8, 9])]
    item = {
        "prompt": "p",
        "prompt_token_ids": prompt,
        "seed": seed,
        "params": PARAMS,
        "outputs": answers,
        "error": None,
    }
    return {**item, "fingerprint": fingerprint(PARTS), "fingerprint_parts": PARTS}


RUN = [request([1, 2], 7), request([3], 8), request([1, 2], 9)]


def saved(place: Path, content: Any) -> str:
    """Parts as one object, a run as lines."""
    objects = content if isinstance(content, list) else [content]
    place.write_text("\n".join(json.dumps(one) for one in objects))
    return str(place)


def compared(folder: Path, a: Any, b: Any) -> tuple[int, dict[str, Any], str]:
    """Exit code, JSON, and lines."""
    files = saved(folder / "a.json", a), saved(folder / "b.json", b)
    results = [CliRunner().invoke(cli.app, ["diff", *files, *options]) for options in (("--json",), ())]
    assert results[0].exit_code == results[1].exit_code
    return results[0].exit_code, json.loads(results[0].stdout), results[1].stdout


def printed(parts: dict[str, str], digests: dict[str, str] | None = None) -> dict[str, Any]:
    """Return JSON as `check --json` prints it."""
    return {"fingerprint": fingerprint(parts), "fingerprint_parts": parts, "weight_digests": digests, "counts": {}}


def changed(change: Callable[[list[Any]], object]) -> list[Any]:
    run = copy.deepcopy(RUN)
    change(run)
    return run


def with_parts(run: list[Any], parts: dict[str, str]) -> list[Any]:
    return [{**one, "fingerprint_parts": parts, "fingerprint": fingerprint(parts)} for one in run]


@pytest.mark.parametrize("content", [PARTS, printed(PARTS), printed(PARTS, DIGESTS), RUN, RUN[:1]])
def test_a_file_equals_itself(content: Any, tmp_path: Path) -> None:
    code, actual, lines = compared(tmp_path, content, content)
    assert code == 0 and actual["equal"] is True and actual["parts"] == []
    assert lines.rstrip().endswith(("Equal fingerprints: equal bits.", "Equal in every bit."))


@pytest.mark.parametrize("part", [part for part in MEANINGS if part != "source"])
def test_differing_part_is_named_with_meaning(part: str, tmp_path: Path) -> None:
    other = PARTS | {part: "two"}
    code, actual, lines = compared(tmp_path, PARTS, printed(other))
    assert code == 1 and actual["equal"] is False
    assert [(one["part"], one["a"], one["b"]) for one in actual["parts"]] == [(part, PARTS[part], "two")]
    assert f"{part} differs: {MEANINGS[part]}" in lines and actual["fingerprints"][1] == fingerprint(other)
    assert f"Other fingerprints ({part}): bits may differ." in lines


def test_sources_may_differ_under_one_bits_version(tmp_path: Path) -> None:
    other = PARTS | {"source": "two"}
    code, actual, lines = compared(tmp_path, PARTS, other)
    assert code == 0 and actual["parts"] == [] and len(set(actual["fingerprints"])) == 1
    assert "sources differ, bits version equal (one)" in lines
    before = {name: part for name, part in PARTS.items() if name != "bits_version"}
    code, actual, _ = compared(tmp_path, before, before | {"source": "two"})
    assert code == 1 and [one["part"] for one in actual["parts"]] == ["source"]


def test_meanings_match_contract_table() -> None:
    page = (ROOT / "docs" / "contract.md").read_text()
    table = page[page.index("| part | what it covers |") : page.index("Reading it reads every weight")]
    assert re.findall(r"`([a-z_]+)`", "".join(row.split("|")[1] for row in table.splitlines() if "|" in row)) == list(
        MEANINGS
    )


def test_a_part_of_another_release_is_named(tmp_path: Path) -> None:
    _, actual, lines = compared(tmp_path, PARTS, PARTS | {"moon": "full"})
    assert actual["parts"] == [
        {"part": "moon", "a": None, "b": "full", "meaning": actual["parts"][0]["meaning"], "details": []}
    ]
    assert "does not know" in lines and "A: nothing" in lines


def test_the_weights_that_differ_are_named(tmp_path: Path) -> None:
    others = {"a.weight": "bfloat16 [3, 5] " + "f" * 32, "b.weight": "float32 [7] " + "1" * 32, "c": "int8 [1] 0"}
    other = PARTS | {"weights": weights_digest(others)}
    _, actual, _ = compared(tmp_path, printed(PARTS, DIGESTS), printed(other, others))
    assert actual["parts"][0]["details"] == [
        "a.weight: other contents, bfloat16 [3, 5]",
        "b.weight: bfloat16 [7] in A, float32 [7] in B",
        "c: only in B",
    ]
    _, actual, _ = compared(tmp_path, printed(PARTS), printed(other, others))
    assert "check --json" in actual["parts"][0]["details"][0]


def test_the_orders_that_differ_are_named(tmp_path: Path) -> None:
    _, actual, _ = compared(tmp_path, PARTS, PARTS | {"orders": "Tree(8); Row(4)"})
    assert actual["parts"][0]["details"] == ["only in A: Sequential(3)", "only in B: Row(4)"]


def test_a_run_in_another_order_is_equal(tmp_path: Path) -> None:
    code, actual, _ = compared(tmp_path, RUN, RUN[::-1])
    assert code == 0 and actual["runs"]["num_pairs"] == 3
    code, actual, lines = compared(tmp_path, RUN, [RUN[2], RUN[0]])
    assert code == 1 and actual["runs"]["only_in_a"] == [2] and actual["runs"]["only_in_b"] == []
    assert "only in A: request 2" in lines and "Equal answers, to requests that are not all the same." in lines


def other_token(run: list[Any]) -> None:
    run[1]["outputs"][1]["token_ids"][2] = 10


def other_bit(run: list[Any]) -> None:
    run[1]["outputs"][1]["logprobs"][1]["logprob"] = -0.8000000000000002
    run[1]["outputs"][1]["token_ids"][2] = 10
    run[2]["outputs"][0]["token_ids"][0] = 10


def other_top(run: list[Any]) -> None:
    run[0]["outputs"][0]["logprobs"][0]["top"][1]["logprob"] = -0.0


def shorter(run: list[Any]) -> None:
    for kept in ("token_ids", "logprobs"):
        run[0]["outputs"][1][kept].pop()


def other_end(run: list[Any]) -> None:
    run[0]["outputs"][0]["finish_reason"] = "stop"


@pytest.mark.parametrize(
    ("change", "where", "what"),
    [
        (other_token, (2, 1, 2), "tokens"),
        (other_bit, (2, 1, 1), "logprobs"),
        (other_top, (1, 0, 0), "logprobs"),
        (shorter, (1, 1, 2), "tokens and logprobs"),
        (other_end, (1, 0, None), "ends"),
    ],
)
def test_first_difference_is_reported_as_unexplained(change, where, what, tmp_path: Path) -> None:
    code, actual, lines = compared(tmp_path, RUN, changed(change))
    first = actual["runs"]["differences"][0]
    parting = first["parting"]
    assert code == 1 and first["a"] == first["b"] and first["inputs"] == {}
    assert (first["a"], parting["sample"], parting["position"]) == where and parting["what"] == what
    assert parting["a"] != parting["b"] and "Nothing explains this" in actual["explanation"]
    assert f"first difference: request {where[0]} of A, {where[0]} of B, sample {where[1]}" in lines


def test_values_at_the_difference_are_shown(tmp_path: Path) -> None:
    _, actual, lines = compared(tmp_path, RUN, changed(shorter))
    parting = actual["runs"]["differences"][0]["parting"]
    assert parting["a"]["token_id"] == 9 and parting["b"] is None and "  B: nothing" in lines
    _, actual, lines = compared(tmp_path, RUN, changed(other_bit))
    parting = actual["runs"]["differences"][0]["parting"]
    assert (parting["a"]["logprob"], parting["b"]["logprob"]) == (-0.8, -0.8000000000000002)
    assert "with other answers: 2" in lines and "-0.8000000000000002" in lines


def test_the_fingerprint_explains_other_answers(tmp_path: Path) -> None:
    others = with_parts(changed(other_token), PARTS | {"torch": "2.14"})
    code, actual, _ = compared(tmp_path, RUN, others)
    assert code == 1 and actual["explanation"] == "The fingerprints differ (torch): expect different answers."
    code, actual, _ = compared(tmp_path, RUN, with_parts(RUN, PARTS | {"torch": "2.14"}))
    assert code == 1 and actual["runs"]["equal"] is True and "not guaranteed" in actual["explanation"]


def test_different_request_explains_other_answers(tmp_path: Path) -> None:
    def ask(run: list[Any]) -> None:
        other_token(run)
        run[1]["seed"] = 80
        run[1]["params"] = PARAMS | {"temperature": 0.7}

    code, actual, lines = compared(tmp_path, RUN, changed(ask))
    assert code == 1 and actual["runs"]["differences"][0]["inputs"] == {"temperature": [0.8, 0.7], "seed": [8, 80]}
    assert actual["explanation"].startswith("Explained: requests with different inputs (temperature, seed)")
    assert "seed: 8 in A, 80 in B" in lines


def test_greedy_seed_explains_nothing(tmp_path: Path) -> None:
    def greedy(run: list[Any], seed: int) -> None:
        run[1]["params"] = PARAMS | {"temperature": 0.0}
        run[1]["seed"] = seed

    ours = changed(lambda run: greedy(run, 1))
    assert compared(tmp_path, ours, changed(lambda run: greedy(run, 2)))[0] == 0
    code, actual, _ = compared(tmp_path, ours, changed(lambda run: (greedy(run, 2), other_token(run))))
    assert code == 1 and "Nothing explains this" in actual["explanation"]


def test_logprobs_that_both_report_are_compared(tmp_path: Path) -> None:
    def fewer(run: list[Any]) -> None:
        run[0]["params"] = PARAMS | {"logprobs": 0}
        for step in run[0]["outputs"][0]["logprobs"]:
            step["top"] = step["top"][:1]
        run[0]["outputs"][1]["logprobs"] = None

    assert compared(tmp_path, RUN, changed(fewer))[0] == 0
    code, actual, _ = compared(tmp_path, changed(other_bit), changed(fewer))
    assert code == 1 and actual["runs"]["differences"][0]["a"] == 2


def test_differences_outside_the_contract_are_explained(tmp_path: Path) -> None:
    def refuse(run: list[Any]) -> None:
        run[2]["outputs"], run[2]["error"] = [], "no blocks"

    def reword(run: list[Any]) -> None:
        run[2]["outputs"][0]["text"] = "other words"

    for change, message in ((refuse, "engine's settings"), (reword, "tokenizer")):
        code, actual, _ = compared(tmp_path, RUN, changed(change))
        assert code == 1 and actual["explanation"].startswith("Explained: ") and message in actual["explanation"]


def test_a_run_is_compared_with_a_fingerprint(tmp_path: Path) -> None:
    code, actual, lines = compared(tmp_path, RUN, PARTS)
    assert code == 0 and actual["runs"] is None and "requests: 3" in lines


def an_archive(place: Path, parts: dict[str, str]) -> str:
    """Write a small archive whose program is never run."""
    library = place.with_suffix(".so")
    library.write_bytes(b"machine code")
    facts = {
        "fingerprint": fingerprint(parts),
        "fingerprint_parts": parts,
        "weight_digests": DIGESTS,
        "machine": {"device": "cpu", "platform": "x86_64", "torch": "2.13.0", "isa": "avx2", "vectors": "avx2"},
        "numerics": {},
        "max_context": 8,
        "dtype": "float32",
        "num_token_ids": 3,
        "num_logits": 3,
        "name_or_path": "m",
        "num_parameters": [2, 1],
        "config": {},
        "generation_config": {},
        "state_shapes": [],
        "kv_groups": [],
    }
    weights = StoredWeights.of({"a.weight": torch.ones(2)})
    item = Share({"arguments": ["a.weight"], "kv_shapes": [], "num_threads": 1}, (library,), weights)
    write_archive(place, facts, {}, [item])
    return str(place)


def test_an_archive_is_read_by_its_manifest(tmp_path: Path) -> None:
    archive = an_archive(tmp_path / "m.pt2", PARTS)
    assert CliRunner().invoke(cli.app, ["diff", archive, saved(tmp_path / "p.json", PARTS)]).exit_code == 0
    others = DIGESTS | {"a.weight": "bfloat16 [3, 5] " + "2" * 32}
    other = saved(tmp_path / "o.json", printed(PARTS | {"weights": weights_digest(others)}, others))
    result = CliRunner().invoke(cli.app, ["diff", archive, other])
    assert result.exit_code == 1 and "a.weight: other contents, bfloat16 [3, 5]" in result.stdout
    content = Path(archive).read_bytes()
    Path(archive).write_bytes(content[: len(content) // 2])
    assert isinstance(CliRunner().invoke(cli.app, ["diff", archive, other]).exception, ArchiveError)


def edited(**changes: Any) -> dict[str, Any]:
    return {**RUN[0], **changes}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("{", "line 1 is not valid JSON"),
        ("[" * 100_000, "JSON"),
        ("[1]", "is not a JSON object"),
        (json.dumps({"a": 1}), "has no fingerprint_parts"),
        ("\n".join([json.dumps(PARTS)] * 2), "holds 2 JSON objects"),
        (json.dumps(PARTS | {"torch": 2}), "mappings of text to text"),
        (json.dumps(printed(PARTS) | {"fingerprint": "0" * 64}), "was changed: its parts make fingerprint"),
        (json.dumps(printed(PARTS, {"a": "b"})), "its weight_digests do not make"),
        (json.dumps({name: value for name, value in RUN[0].items() if name != "params"}), "params is 'missing'"),
        (json.dumps(edited(outputs=[{"token_ids": ["x"]}])), "request 1: outputs is"),
        (json.dumps(edited(outputs=[sample(0, [1]) | {"logprobs": [{"top": 3, "logprob": 1}]}])), "outputs is"),
        (json.dumps(edited(prompt_token_ids=[True])), "prompt_token_ids is"),
        (json.dumps(edited(seed="7")), "seed is '7'"),
        ("\n".join(map(json.dumps, [RUN[0], *with_parts(RUN[:1], PARTS | {"torch": "3"})])), "request 2 has another"),
        ("\n".join([json.dumps(RUN[0]), "3"]), "line 2 is not a JSON object"),
    ],
)
def test_bad_files_are_named(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.json"
    file.write_text(content)
    for files in ([str(file), saved(tmp_path / "good.json", PARTS)], [saved(tmp_path / "good.json", RUN), str(file)]):
        error = CliRunner().invoke(cli.app, ["diff", *files]).exception
        assert isinstance(error, InvalidInput) and message in str(error) and str(file) in str(error)


def test_diff_compiles_a_model_argument(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def compile_model(spec: ModelSpec) -> Any:
        made.append(spec.name)
        return SimpleNamespace(fingerprint_parts=PARTS, weight_digests=lambda: DIGESTS)

    monkeypatch.setattr(options, "compile_model", compile_model)
    file = saved(tmp_path / "a.json", printed(PARTS, DIGESTS))
    for name in ("tiny", str(tmp_path), "org/name"):
        finished = CliRunner().invoke(cli.app, ["diff", name, file])
        assert finished.exit_code == 0 and "Equal fingerprints" in finished.output, finished.output
    assert made == ["tiny", str(tmp_path), "org/name"]


def test_missing_file_is_named(tmp_path: Path) -> None:
    for place in (tmp_path / "gone", tmp_path / "gone.jsonl", Path("gone.json"), Path("gone.pt2")):
        error = CliRunner().invoke(cli.app, ["diff", str(place), str(place)]).exception
        assert isinstance(error, InvalidInput) and "no such file" in str(error)
