"""The census covers every architecture, adds up, and agrees with what is known about a few of them."""

from collections import Counter
from importlib.metadata import version

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tools.generate_census import CENSUS, REASONS, census, forecast, page


@pytest.fixture(scope="module")
def rows():
    return census()


def test_every_causal_lm_has_a_row(rows):
    assert {facts.model_type: facts.class_name for facts in rows} == dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def test_the_summary_counts_the_rows(rows):
    text = page(rows)
    refused = [facts for facts in rows if forecast(facts)]
    assert f"{len(rows)} architectures" in text
    assert f"in the way of {len(rows) - len(refused)}; {len(refused)} would be refused" in text
    assert text.count("| refused: ") == len(refused)
    assert text.count("| nothing known") == len(rows) - len(refused)
    every = Counter(reason for facts in rows for reason in forecast(facts))
    assert all(f"\n| {reason} | {every[reason]} |" in text for reason in REASONS)


def test_the_page_is_up_to_date(rows):
    if f"transformers {version('transformers')}. " not in CENSUS.read_text(encoding="utf-8"):
        pytest.skip(f"docs/census.md was made from another transformers than {version('transformers')}")
    assert CENSUS.read_text(encoding="utf-8") == page(rows), "run `make census`"


@pytest.mark.parametrize(
    ("model_type", "reasons"),
    [
        ("llama", set()),
        ("qwen3", set()),
        ("gpt2", set()),
        ("bloom", set()),
        ("falcon", set()),
        ("gptj", set()),
        ("mpt", set()),
        ("stablelm", set()),
        ("mixtral", set()),
        ("llama4_text", {"experts", "mask"}),
        ("mamba2", set()),
        ("rwkv", set()),
        ("xlstm", set()),
        ("gemma2", set()),
        ("phimoe", {"rope", "silent window"}),
        ("bert", {"mask"}),
    ],
)
def test_known_architectures_are_read_right(rows, model_type, reasons):
    facts = next(facts for facts in rows if facts.model_type == model_type)
    assert set(forecast(facts)) == reasons
