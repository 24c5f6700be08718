"""The load generator of benchmarks/serving.py counts what a server gives, and its engine without a model is one."""

from benchmarks.serving import run_load, serving

LASTING = {"prompt": [5, 6, 7], "max_tokens": 8, "stream": True, "stream_options": {"include_usage": True}}


def test_streams_tokens_and_errors_are_counted() -> None:
    wrong = LASTING | {"max_tokens": -1}
    requests = [(0.01 * row, wrong if row % 10 == 3 else LASTING) for row in range(40)]
    with serving(["benchmarks.scripted_engine", "--interval", "0.02"]) as (url, _front):
        actual = run_load(url, requests, texts=True)
        again = run_load(url, requests[:1], texts=True)
        firsts = run_load(url, requests[:5], firsts=True)["firsts"]
    assert (actual["requests"], actual["errors"], actual["tokens"]) == (40, 4, 36 * 8)
    assert actual["first errors"] == ["status 400"] * 4
    assert 36 * 3 <= actual["events"] <= 36 * (8 + 2)  # usage and [DONE]; what came late has several tokens in an event
    assert 1.0 < actual["ms to the first event"]["P50"] < 5000 and actual["ms between events"]["P50"] > 5.0
    assert len(firsts) == 5 and firsts[3] is None and all(0 < firsts[row] < 5 for row in (0, 1, 2, 4))
    assert len(actual["texts"]) == 40 and len(set(actual["texts"])) > 30 and again["tokens"] == 8
