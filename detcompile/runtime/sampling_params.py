"""SamplingParams: how to draw, and when to end, the tokens of one request. Names and meanings follow vLLM."""

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from detcompile.errors import InvalidInput

__all__ = ["SamplingParams"]

MIN_TEMPERATURE = 1e-5  # below it, logits / temperature may leave fp32's range
MAX_PENALTY = 2.0  # of presence and frequency


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How to draw the tokens of one request, and when to end it.

    The logits are changed in this order: logit_bias and min_tokens, penalties, temperature, top_k, top_p on what is
    left, min_p. Ties go to the lowest token id.

    Args:
        n: completions of one prompt; each has random numbers of its own.
        max_tokens: generated tokens at most; None: as many as the context holds.
        min_tokens: neither a stop token nor a stop string ends the request up to this many tokens.
        temperature: divides the logits; 0 is greedy.
        top_p: keep the fewest tokens whose probabilities reach top_p; 1 keeps all.
        top_k: keep the k likeliest tokens; 0 or -1 keeps all.
        min_p: keep tokens at least min_p times as likely as the likeliest; 0 keeps all.
        seed: 0 <= seed < 2^64; None draws a fresh one for each request. Requests that share a seed share their noise.
        stop: a string, or several, that end the request where they appear in its text.
        stop_token_ids: tokens that end the request; they are part of its output.
        ignore_eos: go on after the model's end-of-sequence token.
        include_stop_str_in_output: keep the stop string that ended the request.
        skip_special_tokens: leave special tokens out of the text.
        logprobs: how many of the likeliest tokens to report with each token, beside itself; None: no logprobs.
        prompt_logprobs: the same for the tokens of the prompt.
        repetition_penalty: above 1, makes tokens of the prompt and the output less likely; below 1, more likely.
        presence_penalty: in [-2, 2], is taken from the logits of tokens in the output.
        frequency_penalty: in [-2, 2], is taken from a token's logit once for each time it is in the output.
        logit_bias: is added to the logits of some tokens; -inf forbids one.

    Raises:
        InvalidInput: a value out of range.
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
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", {int(t): float(b) for t, b in self.logit_bias.items()})
        self._check_drawing()
        self._check_penalties()
        self._check_ends()
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            _require(count is None or count >= 0, f"{name} {count} must be None, or a number of tokens")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, without noise."""
        return self.temperature == 0

    @property
    def filtered(self) -> bool:
        """Whether some token may be left out before drawing."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def penalised(self) -> bool:
        """Whether the tokens so far change the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def plain(self) -> bool:
        """Whether each token is the likeliest by the model's own logits, and nothing else of them is asked."""
        changed = self.min_tokens or self.logit_bias or self.penalised
        return self.greedy and self.logprobs is None and not changed

    def seeded(self) -> "SamplingParams":
        """These parameters with a seed: their own, or a fresh one from the operating system."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(64))

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse what a model of ``vocab_size`` tokens cannot serve.

        Raises:
            InvalidInput: an id that is no token of the model, or more logprobs than it has tokens.
        """
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", self.logit_bias or ())):
            bad = [token for token in ids if token >= vocab_size]
            _require(not bad, f"{name} holds token {bad[:1]}; the model's ids are 0 to {vocab_size - 1}")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            _require((count or 0) <= vocab_size, f"{name} {count} is more than the model's {vocab_size} tokens")

    def _check_drawing(self) -> None:
        _require(self.n >= 1, f"n {self.n} must be at least 1")
        _require(
            self.temperature == 0 or MIN_TEMPERATURE <= self.temperature < math.inf,
            f"temperature {self.temperature} must be 0 (greedy), or finite and at least {MIN_TEMPERATURE}",
        )
        _require(self.top_k >= -1, f"top_k {self.top_k} must be positive, or 0 or -1 to keep all tokens")
        _require(0 < self.top_p <= 1, f"top_p {self.top_p} must be above 0 and at most 1 (1 keeps all tokens)")
        _require(0 <= self.min_p <= 1, f"min_p {self.min_p} must be between 0 (keeps all tokens) and 1")
        _require(self.seed is None or 0 <= self.seed < 1 << 64, f"seed {self.seed} must be None or in [0, 2^64)")

    def _check_penalties(self) -> None:
        _require(
            0 < self.repetition_penalty < math.inf,
            f"repetition_penalty {self.repetition_penalty} must be positive and finite (1 changes nothing)",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            penalty = getattr(self, name)
            _require(abs(penalty) <= MAX_PENALTY, f"{name} {penalty} must be between -{MAX_PENALTY} and {MAX_PENALTY}")
        for token, bias in (self.logit_bias or {}).items():
            _require(token >= 0, f"logit_bias holds {token}, which is no token id")
            _require(bias < math.inf, f"logit_bias of token {token} is {bias}: it must be finite, or -inf")

    def _check_ends(self) -> None:
        _require(self.max_tokens is None or self.max_tokens >= 1, f"max_tokens {self.max_tokens} must be at least 1")
        _require(
            self.min_tokens >= 0 and (self.max_tokens is None or self.min_tokens <= self.max_tokens),
            f"min_tokens {self.min_tokens} must be between 0 and max_tokens {self.max_tokens}",
        )
        strings = all(isinstance(text, str) and text for text in self.stop)
        _require(strings, f"stop {self.stop!r} must be a string or several, none of them empty")
        _require(all(t >= 0 for t in self.stop_token_ids), f"stop_token_ids {self.stop_token_ids} must be token ids")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidInput(message)
