"""SamplingParams: how to draw the tokens of one request and when to stop. Names and meanings follow vLLM."""

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from detcompile.errors import InvalidInput
from detcompile.other_names import naming_equivalents
from detcompile.runtime.grammars.grammar import Grammar
from detcompile.runtime.requests.plain_values import flag, kind, number, or_none, shown, token_list, whole_number

MIN_TEMPERATURE = 1e-5  # below it, logits / temperature may leave fp32's range
MAX_PENALTY = 2.0  # presence and frequency penalties
MOST_SAMPLES = 4096  # per prompt
LARGEST, SMALLEST = 3.4028234663852886e38, 1.1754943508222875e-38  # float32's finite range: the sampler works in it
LARGE = 1e20  # multiplying or dividing by more than this may leave float32's range
LARGEST_INTEGER = (1 << 63) - 1  # int64
LOGPROBS = ("logprobs", "prompt_logprobs", "sampling_logprobs")  # fields that count tokens of the vocabulary


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How to draw the tokens of one request and when to stop.

    The logits are changed in this order: logit_bias, bad words, min_tokens, allowed_token_ids and the grammar; then
    penalties, temperature, top_k, top_p (over what top_k keeps) and min_p. Ties go to the lowest token id.

    Args:
        n: completions per prompt; each has independent random numbers.
        max_tokens: maximum number of generated tokens; None for as many as the context holds.
        min_tokens: no stop token or stop string ends the request before it has this many tokens.
        temperature: divides the logits; 0 is greedy.
        top_p: keep the smallest set of most likely tokens whose probabilities sum to top_p; 1 keeps all.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        min_p: keep tokens at least min_p times as likely as the most likely one; 0 keeps all.
        seed: 0 <= seed < 2^64; None draws a fresh one for each request. Requests that share a seed share their noise.
        stop: a string or list of strings that end the request when they appear in its text.
        stop_token_ids: tokens that end the request; they are part of its output.
        ignore_eos: continue after the model's end-of-sequence token.
        reasoning_markers: (opening, closing), the texts around the reasoning of a thinking model. In a text that begins
            with the opening, whitespace aside, stop strings are searched for only after the closing. An empty opening:
            the text begins inside the reasoning. None: stop strings are searched for everywhere.
        include_stop_str_in_output: keep the stop string that ended the request.
        skip_special_tokens: leave special tokens out of the text.
        logprobs: report this many of the most likely tokens beside each generated token; -1 for the whole vocabulary;
            None for no logprobs.
        prompt_logprobs: the same for the tokens of the prompt.
        sampling_logprobs: beside ``logprobs``, report each generated token's log-probability in the distribution it was
            drawn from, after all changes of the logits, and this many of that distribution's most likely tokens,
            without excluded ones; -1 for all. Needs ``logprobs``. A greedy token has probability 1.
        repetition_penalty: above 1, makes tokens of the prompt and the output less likely; below 1, more likely.
        presence_penalty: in [-2, 2]; subtracted from the logits of tokens in the output.
        frequency_penalty: in [-2, 2]; subtracted from a token's logit once per occurrence in the output.
        logit_bias: added to the logits of some tokens; -inf forbids a token.
        allowed_token_ids: the only tokens that may be drawn; None for all.
        bad_words: texts that the output must not contain, each with and without a leading space. The last token of a
            word is forbidden when the output ends with the word's other tokens. The same text made of different tokens
            is not detected.
        bad_words_ids: the same as lists of token ids, with the semantics of Hugging Face's generate: a match may begin
            in the prompt, and a list longer than all tokens so far is ignored.
        truncate_prompt_tokens: keep this many tokens at the prompt's end; -1 keeps as many as fit in the context with
            one generated token, or min_tokens; None keeps all.
        grammar: a Grammar that the text must match; a dict of its two fields or vLLM's StructuredOutputsParams are
            accepted too. The request ends when the grammar allows no further token; max_tokens and stop strings may
            end it earlier.

    Numbers of numpy and torch are accepted like Python's. A bool or a float is not an integer, and NaN is not a number.

    Raises:
        InvalidInput: a value has the wrong type or is out of range.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    reasoning_markers: tuple[str, str] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    sampling_logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    bad_words_ids: Sequence[Sequence[int]] = ()
    truncate_prompt_tokens: int | None = None
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        for name, rule in RULES.items():
            value = rule.read(getattr(self, name), name)
            _require(rule.holds(value), f"{name} {shown(value)} must be {rule.wanted}")
            object.__setattr__(self, name, value)
        _require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            f"min_tokens {self.min_tokens} must be between 0 and max_tokens {self.max_tokens}",
        )
        _require(
            self.sampling_logprobs is None or self.logprobs is not None,
            f"sampling_logprobs {self.sampling_logprobs} needs logprobs, beside which they are reported: set logprobs",
        )

    @property
    def greedy(self) -> bool:
        """True if the most likely token is always taken, without noise."""
        return self.temperature == 0

    @property
    def filtered(self) -> bool:
        """True if top_k, top_p or min_p may exclude tokens."""
        return any(self.filters)

    @property
    def filters(self) -> tuple[bool, bool, bool]:
        """Return whether top_k, top_p and min_p may exclude tokens."""
        return self.top_k > 0, self.top_p < 1, self.min_p > 0

    @property
    def penalized(self) -> bool:
        """True if previous tokens change the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def restricted(self) -> bool:
        """True if only a list of tokens may be drawn."""
        return self.allowed_token_ids is not None

    @property
    def limited(self) -> bool:
        """True if some token may be forbidden."""
        biases = (self.logit_bias or {}).values()
        forbids = self.restricted or self.grammar is not None
        return forbids or bool(self.min_tokens or self.bad_words or self.bad_words_ids) or -math.inf in biases

    @property
    def extreme(self) -> bool:
        """True if a bias or a penalty may take a logit out of float32's range."""
        biases = (abs(bias) for bias in (self.logit_bias or {}).values() if math.isfinite(bias))
        return max(biases, default=0.0) > LARGE or not 1 / LARGE < self.repetition_penalty < LARGE

    @property
    def plain(self) -> bool:
        """True if every token is the argmax of the unchanged logits and no logprobs are requested."""
        forbids = self.restricted or self.bad_words_ids or self.grammar is not None
        changed = self.min_tokens or self.logit_bias or self.penalized or forbids
        return self.greedy and self.logprobs is None and not changed

    def seeded(self) -> "SamplingParams":
        """Return the same parameters with a seed: the given one, or a random one from the operating system."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(64))

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise InvalidInput if a model of ``vocab_size`` tokens cannot serve these parameters."""
        named = {
            "stop_token_ids": self.stop_token_ids,
            "logit_bias": self.logit_bias or (),
            "allowed_token_ids": self.allowed_token_ids or (),
            "bad_words_ids": [token for word in self.bad_words_ids for token in word],
        }
        for name, ids in named.items():
            bad = [token for token in ids if token >= vocab_size]
            _require(not bad, f"{name} holds token {bad[:1]}; the model's ids are 0 to {vocab_size - 1}")
        for name in LOGPROBS:
            count = getattr(self, name)
            _require((count or 0) <= vocab_size, f"{name} {count} is more than the model's {vocab_size} tokens")


class _Rule(NamedTuple):
    """Valid values of one field."""

    read: Callable[[Any, str], Any]  # converts to plain Python, or raises InvalidInput with the field's name
    holds: Callable[[Any], bool]
    wanted: str  # the rule in words, for error messages


def _strings(value: Any, name: str) -> tuple[str, ...]:
    if isinstance(value, str):
        return (str(value),)
    if value is None:
        return ()
    _require(
        isinstance(value, (Sequence, AbstractSet)) and not isinstance(value, (bytes, bytearray, memoryview)),
        f"{name} {shown(value)} is {kind(value)}: give a string, or a list of them",
    )
    bad = [text for text in value if not isinstance(text, str)]
    _require(not bad, f"{name} holds {shown(bad)}: give strings")
    return tuple(map(str, value))


def _ids(value: Any, name: str) -> tuple[int, ...]:
    if value is None:
        return ()
    _require(
        hasattr(value, "tolist")
        or (isinstance(value, (Sequence, AbstractSet)) and not isinstance(value, (str, bytes, bytearray, memoryview))),
        f"{name} {shown(value)} is {kind(value)}: give a list of token ids",
    )
    return tuple(token_list(value, name))


def _id_lists(value: Any, name: str) -> tuple[tuple[int, ...], ...]:
    if value is None:
        return ()
    _require(
        isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, memoryview)),
        f"{name} {shown(value)} is {kind(value)}: give a list of lists of token ids",
    )
    return tuple(_ids(word, f"{name}: entry {index},") for index, word in enumerate(value))


def _biases(value: Any, name: str) -> dict[int, float]:
    """Read biases by token id. JSON keys are strings, so a decimal string counts as an id."""
    _require(isinstance(value, Mapping), f"{name} {shown(value)} is {kind(value)}: give a dict of token: bias")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        token = int(key) if isinstance(key, str) and key.isdecimal() else whole_number(key, f"{name}: token")
        _require(token not in biases, f"{name} names token {token} twice")
        biases[token] = number(bias, f"{name}: the bias of token {token},")
    return biases


def _is_penalty(value: float) -> bool:
    return abs(value) <= MAX_PENALTY


def _is_count(value: int | None) -> bool:
    return value is None or -1 <= value <= LARGEST_INTEGER


RULES: dict[str, _Rule] = {
    "n": _Rule(whole_number, lambda n: 1 <= n <= MOST_SAMPLES, f"from 1 to {MOST_SAMPLES}"),
    "max_tokens": _Rule(or_none(whole_number), lambda n: n is None or 1 <= n <= LARGEST_INTEGER, "None, or at least 1"),
    "min_tokens": _Rule(whole_number, lambda n: 0 <= n <= LARGEST_INTEGER, "at least 0"),
    "temperature": _Rule(
        number,
        lambda t: t == 0 or MIN_TEMPERATURE <= t <= LARGEST,
        f"0 (greedy), or finite (in float32) and at least {MIN_TEMPERATURE}",
    ),
    "top_p": _Rule(number, lambda p: 0 < p <= 1, "above 0 and at most 1 (1 keeps all tokens)"),
    "top_k": _Rule(whole_number, lambda k: -1 <= k <= LARGEST_INTEGER, "positive, or 0 or -1 to keep all tokens"),
    "min_p": _Rule(number, lambda p: 0 <= p <= 1, "between 0 (keeps all tokens) and 1"),
    "seed": _Rule(or_none(whole_number), lambda s: s is None or 0 <= s < 1 << 64, "None or in [0, 2^64)"),
    "stop": _Rule(_strings, all, "a string or several, none of them empty"),
    "stop_token_ids": _Rule(_ids, lambda ids: all(t >= 0 for t in ids), "token ids"),
    "ignore_eos": _Rule(flag, lambda _: True, "True or False"),
    "reasoning_markers": _Rule(
        or_none(_strings),
        lambda marks: marks is None or (len(marks) == 2 and bool(marks[1])),
        "None, or two strings, the second of them not empty",
    ),
    "include_stop_str_in_output": _Rule(flag, lambda _: True, "True or False"),
    "skip_special_tokens": _Rule(flag, lambda _: True, "True or False"),
    "logprobs": _Rule(or_none(whole_number), _is_count, "None, a number of tokens, or -1 for all"),
    "prompt_logprobs": _Rule(or_none(whole_number), _is_count, "None, a number of tokens, or -1 for all"),
    "sampling_logprobs": _Rule(or_none(whole_number), _is_count, "None, a number of tokens, or -1 for all"),
    "repetition_penalty": _Rule(
        number, lambda p: SMALLEST <= p <= LARGEST, "positive and finite, in float32 (1 changes nothing)"
    ),
    "presence_penalty": _Rule(number, _is_penalty, f"between -{MAX_PENALTY} and {MAX_PENALTY}"),
    "frequency_penalty": _Rule(number, _is_penalty, f"between -{MAX_PENALTY} and {MAX_PENALTY}"),
    "logit_bias": _Rule(
        or_none(_biases),
        lambda biases: all(t >= 0 and (b == -math.inf or abs(b) <= LARGEST) for t, b in (biases or {}).items()),
        "token ids with biases that are finite (in float32), or -inf",
    ),
    "allowed_token_ids": _Rule(
        or_none(lambda value, name: tuple(dict.fromkeys(_ids(value, name)))),
        lambda ids: ids is None or (bool(ids) and min(ids) >= 0),
        "None, or the ids of one token or more",
    ),
    "bad_words": _Rule(_strings, lambda words: all(map(str.strip, words)), "a string or several, none of them blank"),
    "bad_words_ids": _Rule(
        _id_lists,
        lambda words: all(word and min(word) >= 0 for word in words),
        "lists of token ids, none of them empty",
    ),
    "truncate_prompt_tokens": _Rule(
        or_none(whole_number),
        lambda n: n is None or n == -1 or 1 <= n <= LARGEST_INTEGER,
        "None, at least 1, or -1 for what the context has room for",
    ),
    "grammar": _Rule(or_none(lambda value, _: Grammar.of(value)), lambda _: True, "a Grammar"),
}

GRAMMARS = "pass grammar=Grammar.json_schema(...), .regex(...), .choice(...) or .lark(...)"
BEAMS = "rows are sampled or greedy here; n gives several answers to choose from"
EQUIVALENTS = {
    "best_of": "n gives several answers; choose among them by their logprobs",
    "bos_token_id": "put it into the prompt",
    "detokenize": "pass token ids to an engine of a model without a tokenizer, or ignore the text",
    "do_sample": "temperature=0 is greedy, and anything above it samples",
    "early_stopping": BEAMS,
    "eos_token_id": "pass stop_token_ids",
    "extra_args": "nothing reads it",
    "flat_logprobs": "logprobs has them",
    "guided_choice": GRAMMARS,
    "guided_decoding": GRAMMARS,
    "guided_grammar": GRAMMARS,
    "guided_json": GRAMMARS,
    "guided_regex": GRAMMARS,
    "length_penalty": BEAMS,
    "logits_processors": "logit_bias, bad_words_ids, allowed_token_ids and grammar change logits",
    "max_length": "pass max_tokens, which does not count the prompt",
    "max_new_tokens": "pass max_tokens",
    "min_new_tokens": "pass min_tokens",
    "no_repeat_ngram_size": "repetition_penalty and bad_words_ids are served",
    "num_beams": BEAMS,
    "num_return_sequences": "pass n",
    "output_kind": "engine.add_request takes it",
    "spaces_between_special_tokens": "the tokenizer decides it",
    "stop_strings": "pass stop",
    "structured_outputs": GRAMMARS,
    "suppress_tokens": "pass logit_bias with -inf, or allowed_token_ids",
    "thinking_token_budget": "LLM.chat and the server's chats take it",
    "top_n_tokens": "pass logprobs",
    "typical_p": "top_k, top_p and min_p are served",
    "use_beam_search": BEAMS,
}
SamplingParams.__init__ = naming_equivalents("SamplingParams", EQUIVALENTS)(SamplingParams.__init__)  # type: ignore[method-assign]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidInput(message)


if RULES.keys() != {entry.name for entry in fields(SamplingParams)}:
    raise TypeError(f"RULES and the fields of SamplingParams differ: {RULES.keys() ^ set(SamplingParams.__slots__)}")
