"""Requests of mixed parameters, and receipts that were changed and sealed again."""

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from detcompile.commands.receipts.whole_answers import answer_difference
from detcompile.digests import fingerprint
from detcompile.models.compiled import CompiledModel
from detcompile.runtime.grammars.compiler import masks_version
from detcompile.serving.receipts.decoding import Opening, Redrawn
from detcompile.serving.receipts.envelope import Envelope, payload_of, read_answer, seal
from detcompile.serving.receipts.keys import SigningKey
from detcompile.serving.receipts.receipt import Receipt
from detcompile.serving.receipts.replay import replay
from detcompile.serving.receipts.verdict import Verdict
from detcompile.serving.tokenizer_pool import TokenizerPool

__all__ = ["REQUESTS", "TAMPERINGS", "Tampering", "changed", "comparison"]

PROMPT = "def add(a, b):"
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "greedy with logprobs": {"temperature": 0, "logprobs": 3, "max_tokens": 30},
    "sampled": {"temperature": 1.0, "top_p": 1.0},
    "top-p": {"temperature": 0.9, "top_p": 0.8},
    "top-k": {"temperature": 1.1, "top_k": 20},
    "distributions drawn from": {"logprobs": 1, "top_k": 6, "frequency_penalty": 0.3, "return_sampling_mask": True},
    "min-p": {"temperature": 1.3, "min_p": 0.05},
    "penalties": {"frequency_penalty": 0.4, "presence_penalty": -0.2, "repetition_penalty": 1.15},
    "greedy with penalties": {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    "biases": {"logit_bias": {"13": -50, "274": 4.5, "1988": 2}},
    "allowed tokens": {"allowed_token_ids": [13, 274, 310, 322, 925, 1013, 1248, 1988]},
    "min_tokens": {"min_tokens": 12, "max_tokens": 60, "logit_bias": {"1": 8}},
    "three samples": {"n": 3, "logprobs": 2},
    "penalties of three samples": {"n": 3, "frequency_penalty": 0.6, "top_p": 0.9, "logprobs": 0},
    "several prompts": {"prompt": [PROMPT, "class A:", [5, 6, 7, 8]], "n": 2},
    "stop string": {"temperature": 0, "stop": [")", "\n"], "max_tokens": 60},
    "stop string kept": {"temperature": 0, "stop": ":", "include_stop_str_in_output": True, "max_tokens": 60},
    "stop token": {"temperature": 0, "stop_token_ids": [13, 925, 310], "max_tokens": 60},
    "echo with logprobs": {"echo": True, "logprobs": 2, "n": 2},
    "a scored prompt": {"echo": True, "logprobs": 1, "max_tokens": 0},
    "one token": {"max_tokens": 1},
    "grammar": {"structured_outputs": {"regex": "(ab|cd)*x?"}, "n": 2, "max_tokens": 9, "logprobs": 1},
    "schema": {"response_format": {"type": "json_object"}, "temperature": 0, "max_tokens": 12},
    "choice": {"guided_choice": ["yes", "no", "perhaps"], "frequency_penalty": 0.5},
    "no end token": {"ignore_eos": True, "max_tokens": 90, "temperature": 1.5},
    "everything": {
        "n": 2, "temperature": 0.7, "top_p": 0.9, "top_k": 50, "min_p": 0.01, "frequency_penalty": 0.2,
        "presence_penalty": 0.1, "repetition_penalty": 1.05, "logit_bias": {"274": -3}, "stop": ["zzz"], "logprobs": 4,
        "min_tokens": 5, "echo": True, "seed": -9,
    },
}  # fmt: skip


class Tampering(NamedTuple):
    """A change of a receipt's payload, and a text of its verdict."""

    change: Callable[[dict[str, Any]], None]
    field: str
    outcome: str = "differs"


def changed(envelope: Envelope, change: Callable[[dict[str, Any]], None], key: SigningKey | None) -> Envelope:
    """Return the envelope with another payload, sealed with the key."""
    payload = json.loads(payload_of(envelope))
    change(payload)
    return seal(json.dumps(payload).encode(), key)


def _sample(payload: dict[str, Any]) -> dict[str, Any]:
    return payload["prompts"][0]["samples"][0]


def _other_token(payload: dict[str, Any]) -> None:
    _sample(payload)["token_ids"][5] ^= 1


def _set(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda payload: payload.update({name: value})


def _param(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda payload: payload["params"].update({name: value})


def _of_sample(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda payload: _sample(payload).update({name: value})


def _other_prompt(payload: dict[str, Any]) -> None:
    payload["prompts"][0]["token_ids"][-1] ^= 1


def with_part(name: str) -> Callable[[dict[str, Any]], None]:
    def change(payload: dict[str, Any]) -> None:
        payload["fingerprint_parts"][name] = "0" * 64
        payload["fingerprint"] = fingerprint(payload["fingerprint_parts"])

    return change


def _swapped(payload: dict[str, Any]) -> None:
    samples = payload["prompts"][0]["samples"]
    samples[0]["token_ids"], samples[1]["token_ids"] = samples[1]["token_ids"], samples[0]["token_ids"]


def _grammar(source: str, version: str | None = None) -> Callable[[dict[str, Any]], None]:
    version = version or masks_version()
    return _set("grammar", {"kind": "regex", "source": source, "hashed": False, "llguidance": version})


OTHER = "a" * 64
# An answer with two samples, logprobs of its prompt and its tokens, drawn at a temperature, that ends by its length.
TAMPERINGS: dict[str, Tampering] = {
    "another token": Tampering(_other_token, "token_ids"),
    "a token that there is not": Tampering(lambda p: _sample(p)["token_ids"].__setitem__(3, 1 << 30), "token_ids"),
    "tokens of the other sample": Tampering(_swapped, "token_ids"),
    "an answer cut short": Tampering(lambda p: _sample(p)["token_ids"].pop(), "finish_reason"),
    "an answer made longer": Tampering(
        lambda p: (_param("max_tokens", 500)(p), _of_sample("finish_reason", "length")(p)), "finish_reason"
    ),
    "another seed": Tampering(_set("seed", "12"), "token_ids"),
    "another temperature": Tampering(_param("temperature", 1.9), "token_ids"),
    "a penalty": Tampering(_param("repetition_penalty", 1.9), "token_ids"),
    "another prompt": Tampering(_other_prompt, "token_ids"),
    "another end": Tampering(_of_sample("finish_reason", "stop"), "finish_reason"),
    "another stop": Tampering(_of_sample("stop_reason", "x"), "stop_reason"),
    "another text": Tampering(_of_sample("text", OTHER), "text"),
    "other logprobs": Tampering(_of_sample("logprobs", OTHER), "logprobs"),
    "other logprobs of the prompt": Tampering(lambda p: p["prompts"][0].update(logprobs=OTHER), "prompt_logprobs"),
    "a sample left out": Tampering(lambda p: p["prompts"][0]["samples"].pop(), "samples"),
    "samples in another order": Tampering(lambda p: p["prompts"][0]["samples"].reverse(), "samples"),
    "a fingerprint that its parts do not make": Tampering(_set("fingerprint", OTHER), "fingerprint"),
    "other weights": Tampering(with_part("weights"), "fingerprint_parts.weights", "incomparable"),
    "a fingerprint part named as the tokenizer": Tampering(with_part("tokenizer"), "tokenizer", "incomparable"),
    "another bits version": Tampering(with_part("bits_version"), "fingerprint_parts.bits_version", "incomparable"),
    "a grammar": Tampering(_grammar("zz*"), "token_ids"),
    "another library of grammars": Tampering(_grammar("zz*", "0.1"), "llguidance", "incomparable"),
    "another tokenizer": Tampering(lambda p: p["served"].update(tokenizer=OTHER), "tokenizer", "incomparable"),
}


def comparison(
    data: bytes, model: CompiledModel, texts: TokenizerPool, opening: Opening | None = None
) -> tuple[dict[str, Any], Callable[[dict[str, Any]], Verdict | None]]:
    """Return an answer's fields, and a function that compares others with its receipt, which is replayed once."""
    envelope, fields = read_answer(data)
    compare: list[Callable[[dict[str, Any]], Verdict | None]] = []

    def keep(receipt: Receipt, redrawn: Sequence[Redrawn]) -> None:
        compare.append(lambda changed: answer_difference(changed, envelope, receipt, redrawn, texts))

    verdict = replay(model, envelope, opening=opening, compare=keep)
    assert verdict.outcome == "equal", verdict
    return fields, compare[0]
