"""One sequence: its tokens, how many of them the cache holds, and where."""

import functools
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Literal

from detcompile.errors import InvalidInput
from detcompile.runtime.grammars.matcher import Mask, Matcher
from detcompile.runtime.requests.bad_words import NO_WORDS, BadWords
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.step import NO_SLOT

__all__ = ["FinishReason", "Sequence"]

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(eq=False, slots=True)
class Sequence:
    """A prompt and the tokens generated after it, some of which it may begin with.

    The first ``num_computed`` tokens have their keys and values in the cache, or in a step that was launched; group g's
    are in the blocks of ``block_tables[g]``. ``num_pending`` (0 or 1) tokens more than ``token_ids`` were drawn on the
    device and not read back yet. ``sampling`` always has a seed: one is drawn here if the caller gave none, and it
    stays readable in ``seed``, so that the request can be repeated.

    Raises:
        InvalidInput: no token.
    """

    token_ids: list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    bad_words: BadWords = NO_WORDS  # of more than one token
    sample_index: int = 0  # which of a request's n samples this is
    priority: int = 0  # lower is more urgent
    arrival: int = 0  # counts requests
    max_length: int = 1 << 62  # tokens that the context has room for
    num_computed: int = 0
    num_pending: int = 0
    block_tables: list[list[int]] = field(default_factory=list)
    block_digests: list[bytes] = field(default_factory=list)
    state_slot: int = NO_SLOT  # of the states that a model's layers carry from token to token
    last_step: int = -1  # the last step that this sequence had a part in
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token or string that ended it
    num_prompt_tokens: int = 0  # 0: all tokens that it begins with
    matcher: Matcher | None = None  # stands where the tokens after the prompt do
    cache_salt: str = ""  # sequences of another salt share no cached prefix with it
    ends: frozenset[int] = field(default=frozenset(), init=False)  # tokens that end it

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise InvalidInput("a sequence needs at least one token: put the model's BOS token into an empty prompt")
        self.sampling = self.sampling.seeded()
        self.num_prompt_tokens = self.num_prompt_tokens or len(self.token_ids)
        self.ends = _set_of(self.sampling.stop_token_ids)

    @property
    def seed(self) -> int:
        """Seed of this request's random numbers."""
        assert self.sampling.seed is not None
        return self.sampling.seed

    @property
    def num_tokens(self) -> int:
        """Tokens drawn so far, also those that were not read back yet."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose keys are not in the cache yet."""
        return self.num_tokens - self.num_computed

    @property
    def num_generated(self) -> int:
        """Tokens drawn after the prompt, pending ones included."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def most_tokens(self) -> int:
        """Tokens that this sequence can ever hold."""
        if self.sampling.max_tokens is None:
            return self.max_length
        return min(self.max_length, self.num_prompt_tokens + self.sampling.max_tokens)

    @property
    def generated_ids(self) -> list[int]:
        """Tokens after the prompt, a final stop token included."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def wants_prompt_logits(self) -> bool:
        """Whether prompt logprobs are asked for, and this is the sample that they are taken from."""
        return self.sampling.prompt_logprobs is not None and self.sample_index == 0

    def gives_prompt_logits(self, start: int) -> bool:
        """Whether the logits of all its tokens from ``start`` on are wanted in a step."""
        if self.sampling.prompt_logprobs is None:  # asked of every entry of every step
            return False
        return self.sample_index == 0 and start < self.num_prompt_tokens - 1

    def forbidden_after(self, drafted: SequenceOf[int] = ()) -> tuple[int, ...]:
        """Tokens that would complete a bad word behind its own and ``drafted`` ones; none may be pending."""
        if self.bad_words is NO_WORDS:  # asked of every row of every step
            return ()
        assert self.num_pending == 0, "bad words need to know every token"
        return self.bad_words.completions(self.token_ids, self.num_prompt_tokens, drafted)

    def mask_after(self, drafted: SequenceOf[int] = ()) -> Mask | None:
        """Tokens that its grammar lets follow its own and ``drafted`` ones; none may be pending.

        None without a grammar, and where drafted ones break it or end the sequence.
        """
        if self.matcher is None:
            return None
        assert self.num_pending == 0, "a grammar needs to know every token"
        return self.matcher.mask(drafted)

    def append(self, token_id: int) -> None:
        """Add a generated token. May set ``finish_reason``.

        Raises:
            EngineError: its grammar cannot go on.
        """
        assert self.finish_reason is None, f"a token for a sequence that has finished ({self.finish_reason})"
        self.token_ids.append(token_id)
        if token_id in self.ends:
            self.finish_reason, self.stop_reason = "stop", token_id
        elif self.matcher is not None and self._completes(token_id):
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self.most_tokens:
            self.finish_reason = "length"

    def _completes(self, token_id: int) -> bool:
        """Follow the grammar; whether nothing can come behind the token."""
        assert self.matcher is not None
        self.matcher.append(token_id)
        return self.matcher.complete


@functools.lru_cache(8)  # a request's samples share it: there may be as many as the vocabulary has tokens
def _set_of(token_ids: tuple[int, ...]) -> frozenset[int]:
    return frozenset(token_ids)
