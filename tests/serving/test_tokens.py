"""Token ids in, token ids out: vLLM's and SGLang's routes give a completion's tokens and log-probabilities."""

import json
from typing import Any

import httpx
import pytest

PROMPT = [5, 6, 7, 8, 9]
SAMPLING = {"temperature": 0.9, "top_p": 0.95, "seed": 11, "max_tokens": 12}


def completion(http: httpx.Client, **changes: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "return_token_ids": True, "logprobs": 2, **SAMPLING, **changes}
    [choice] = http.post("/v1/completions", json=body).json()["choices"]
    return choice


def generated(http: httpx.Client, sampling: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """Return the whole answer; fail unless the parts of a stream add up to it."""
    body = {"token_ids": PROMPT, "sampling_params": SAMPLING | {"logprobs": 2} | (sampling or {}), **changes}
    answer = http.post("/inference/v1/generate", json=body)
    assert answer.status_code == 200, answer.text
    whole = answer.json()
    lines = http.post("/inference/v1/generate", json=body | {"stream": True}).text.split("\n\n")
    assert lines[-2] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    fields = {name: value for chunk in chunks for name, value in chunk.items() if name.startswith("prompt_")}
    assert fields == {name: value for name, value in whole.items() if name.startswith("prompt_")}
    for choice in whole["choices"]:
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        for name in ("token_ids", "sampling_logprobs", "sampling_mask", "sampling_mask_logprobs"):
            assert [one for part in parts for one in part.get(name, [])] == choice.get(name, [])
        if choice["logprobs"] is not None:
            content = [entry for part in parts for entry in part["logprobs"]["content"]]
            assert content == choice["logprobs"]["content"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        assert all(part["finish_reason"] is None for part in parts[:-1])
    return whole


def test_generate_has_bits_of_a_completion(http: httpx.Client) -> None:
    expected, whole = completion(http), generated(http, request_id="mine", return_token_ids=True)
    [choice] = whole["choices"]
    assert choice["token_ids"] == expected["token_ids"] and choice["finish_reason"] == expected["finish_reason"]
    content = choice["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == expected["logprobs"]["token_logprobs"]
    assert [entry["token_id"] for entry in content] == choice["token_ids"]
    assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert (whole["request_id"], whole["prompt_token_ids"]) == ("mine", PROMPT)
    assert whole["usage"]["completion_tokens"] == len(choice["token_ids"])
    without = generated(http, {"logprobs": None})
    assert without["choices"][0]["logprobs"] is None and "prompt_token_ids" not in without
    three = generated(http, {"n": 3, "prompt_logprobs": 1, "top_k": 3}, return_sampling_mask=True)
    assert len(three["choices"]) == 3 and len(three["prompt_logprobs"]) == len(PROMPT)
    for sample in three["choices"]:
        assert all(token in mask for token, mask in zip(sample["token_ids"], sample["sampling_mask"], strict=True))


def test_generate_has_vllm_defaults(http: httpx.Client) -> None:
    """Sampling defaults are SamplingParams', not the generation_config's; max_tokens is the rest of the context."""
    plain = {"token_ids": PROMPT, "sampling_params": {"seed": 3, "max_tokens": 30}}
    [choice] = http.post("/inference/v1/generate", json=plain).json()["choices"]
    expected = completion(http, seed=3, max_tokens=30, temperature=1.0, top_p=1.0)
    assert choice["token_ids"] == expected["token_ids"]
    long = {"token_ids": PROMPT, "sampling_params": {"seed": 3, "min_tokens": 60}}
    assert len(http.post("/inference/v1/generate", json=long).json()["choices"][0]["token_ids"]) >= 60


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/inference/v1/generate", {"token_ids": list(range(40, 340)), "sampling_params": {"max_tokens": 1}}),
        ("/generate", {"input_ids": list(range(440, 740)), "sampling_params": {"max_new_tokens": 1}}),
    ],
)
def test_prefixes_are_shared_by_equal_salts(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    def cached(salt: str | None) -> int:
        answer = http.post(path, json=body if salt is None else body | {"cache_salt": salt}).json()
        if path == "/generate":
            return answer["meta_info"]["cached_tokens"]
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached(salt) > 0 for salt in ("a", "a", "b", None, None)] == [False, True, False, False, True]


def sglang(http: httpx.Client, **changes: Any) -> Any:
    sampling = {"temperature": 0.9, "top_p": 0.95, "sampling_seed": 11, "max_new_tokens": 12}
    body = {"input_ids": PROMPT, "return_logprob": True, **changes}
    answer = http.post("/generate", json=body | {"sampling_params": sampling | changes.get("sampling_params", {})})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_sglang_route_has_bits_of_a_completion(http: httpx.Client) -> None:
    expected = completion(http, prompt_logprobs=0)
    actual = sglang(http, logprob_start_len=0, top_logprobs_num=2, rid="mine", return_text_in_logprobs=True)
    meta = actual["meta_info"]
    assert (actual["text"], actual["output_ids"]) == (expected["text"], expected["token_ids"])
    values = list(zip(*meta["output_token_logprobs"], strict=True))
    assert [*values[0]] == expected["logprobs"]["token_logprobs"] and [*values[1]] == actual["output_ids"]
    assert [*values[2]] == expected["logprobs"]["tokens"]
    of_prompt = [(None, PROMPT[0])]
    of_prompt += [
        (one[str(token)]["logprob"], token) for token, one in zip(PROMPT[1:], expected["prompt_logprobs"][1:])
    ]
    assert [tuple(entry[:2]) for entry in meta["input_token_logprobs"]] == of_prompt
    assert [len(top or ()) for top in meta["input_top_logprobs"]] == [0, 2, 2, 2, 2]
    assert [len(top) for top in meta["output_top_logprobs"]] == [2] * len(actual["output_ids"])
    length = len(actual["output_ids"])
    assert meta["finish_reason"] == {"type": "length", "length": length} and meta["id"] == "mine"
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (5, length)
    later = sglang(http, logprob_start_len=3)["meta_info"]["input_token_logprobs"]
    assert [tuple(entry[:2]) for entry in later] == [(None, PROMPT[3]), of_prompt[4]]
    assert sglang(http, logprob_start_len=99)["meta_info"]["input_token_logprobs"] == []
    scored = sglang(http, logprob_start_len=0, sampling_params={"max_new_tokens": 0})
    assert scored["output_ids"] == scored["meta_info"]["output_token_logprobs"] == [] and scored["text"] == ""
    assert [tuple(entry[:2]) for entry in scored["meta_info"]["input_token_logprobs"]] == of_prompt


def test_sglang_answers_lists_with_lists(http: httpx.Client) -> None:
    alone = sglang(http)
    two = sglang(http, input_ids=[[4, 4], PROMPT])
    assert two[1]["output_ids"] == alone["output_ids"] and len(sglang(http, sampling_params={"n": 2})) == 2
    assert len(sglang(http, input_ids=None, text=["a"])) == 1
    masks = sglang(http, return_logprob=False, return_sampling_mask=True, sampling_params={"top_k": 4})
    meta = masks["meta_info"]
    assert "output_token_logprobs" not in meta
    for token, mask, logprob in zip(
        masks["output_ids"],
        meta["output_token_sampling_mask"],
        meta["output_token_sampling_logprobs"],
        strict=True,
    ):
        assert token in mask and len(mask) <= 4 and logprob <= 0
    whole = {"return_sampling_mask": True, "sampling_logprobs_mode": "support", "sampling_params": {"top_k": 4}}
    support = sglang(http, **whole)["meta_info"]["output_token_sampling_logprobs"]
    places = [mask.index(token) for token, mask in zip(masks["output_ids"], meta["output_token_sampling_mask"])]
    assert [values[place] for values, place in zip(support, places)] == meta["output_token_sampling_logprobs"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/inference/v1/generate", {"token_ids": [], "sampling_params": {}}, "token_ids"),
        ("/inference/v1/generate", {"token_ids": [-1], "sampling_params": {}}, "token_ids[0]"),
        ("/inference/v1/generate", {"token_ids": [5]}, "sampling_params"),
        (
            "/inference/v1/generate",
            {"token_ids": [5], "sampling_params": {"max_tokens": 0}},
            "sampling_params.max_tokens",
        ),
        ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"top_p": 2}}, "top_p"),
        ("/inference/v1/generate", {"token_ids": [1 << 30], "sampling_params": {}}, None),
        ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {}, "cache_salt": ""}, "cache_salt"),
        ("/v1/chat/completions/tokens", {"messages": [{"role": "user", "content": "x"}]}, "tokens"),
        ("/generate", {}, "input_ids"),
        ("/generate", {"text": "a", "input_ids": [5]}, "input_ids"),
        ("/generate", {"input_ids": []}, "input_ids"),
        ("/generate", {"input_ids": [5, [6]]}, "input_ids"),
        ("/generate", {"input_ids": [5], "stream": True}, "stream"),
        ("/generate", {"input_ids": [5], "sampling_params": [{}]}, "sampling_params"),
        ("/generate", {"input_ids": [5], "logprob_start_len": -2}, "logprob_start_len"),
        ("/generate", {"input_ids": [5], "return_sampling_mask": True}, "return_sampling_mask"),
    ],
)
def test_bad_token_requests_are_named(http: httpx.Client, path: str, body: dict[str, Any], param: str | None) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
