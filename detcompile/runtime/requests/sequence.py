"""One sequence: its tokens, and where the KV cache holds them."""

import functools
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from detcompile.errors import InvalidInput
from detcompile.runtime.adapters import Adapter
from detcompile.runtime.grammars.matcher import Mask, Matcher
from detcompile.runtime.requests.bad_words import NO_WORDS, BadWords
from detcompile.runtime.requests.outputs import FinishReason
from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.step import NO_SLOT


@dataclass(eq=False, slots=True)
class Sequence:
    """A prompt and the tokens generated after it.

    The keys and values of the first ``num_computed`` tokens are in the cache, or will be written by a launched step.
    KV group g keeps them in the blocks of ``block_tables[g]``. ``num_pending`` (0 or 1) counts tokens drawn on the
    device that are not in ``token_ids`` yet. ``sampling`` always has a seed: if the caller gave none, a random one is
    drawn here and can be read from ``seed`` to repeat the request.

    Raises:
        InvalidInput: there are no tokens.
    """

    token_ids: list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    bad_words: BadWords = NO_WORDS  # words of two or more tokens
    sample_index: int = 0  # index among the request's n samples
    priority: int = 0  # lower is more urgent
    arrival: int = 0  # arrival number of the request
    max_length: int = 1 << 62  # most tokens that the context can hold
    num_computed: int = 0
    num_pending: int = 0
    block_tables: list[list[int]] = field(default_factory=list)
    block_digests: list[bytes] = field(default_factory=list)
    state_slot: int = NO_SLOT  # slot of the recurrent state
    last_step: int = -1  # last step that included this sequence
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token or stop string that ended it
    num_prompt_tokens: int = 0  # 0: all initial tokens are the prompt
    matcher: Matcher | None = None  # grammar state after the generated tokens
    cache_salt: str = ""  # prefixes are shared only among sequences with the same salt
    adapter: Adapter | None = None  # None for the plain model
    ends: frozenset[int] = field(default=frozenset(), init=False)  # stop tokens

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise InvalidInput("a sequence needs at least one token: put the model's BOS token into an empty prompt")
        self.sampling = self.sampling.seeded()
        self.num_prompt_tokens = self.num_prompt_tokens or len(self.token_ids)
        self.ends = _set_of(self.sampling.stop_token_ids)

    @property
    def seed(self) -> int:
        """Return the seed of this request's random numbers."""
        assert self.sampling.seed is not None
        return self.sampling.seed

    @property
    def num_tokens(self) -> int:
        """Number of tokens drawn so far, including pending ones."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_uncomputed(self) -> int:
        """Number of tokens whose keys are not in the cache yet."""
        return self.num_tokens - self.num_computed

    @property
    def num_generated(self) -> int:
        """Number of tokens drawn after the prompt, including pending ones."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def most_tokens(self) -> int:
        """Maximum number of tokens that this sequence can hold."""
        if self.sampling.max_tokens is None:
            return self.max_length
        return min(self.max_length, self.num_prompt_tokens + self.sampling.max_tokens)

    @property
    def generated_ids(self) -> list[int]:
        """Tokens after the prompt, including a final stop token."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def wants_prompt_logits(self) -> bool:
        """True if this sample must produce the request's prompt logprobs."""
        return self.sampling.prompt_logprobs is not None and self.sample_index == 0

    def gives_prompt_logits(self, start: int) -> bool:
        """Return True if a step that starts at ``start`` must return logits for all its tokens."""
        if self.sampling.prompt_logprobs is None:  # fast path: called for every entry of every step
            return False
        return self.sample_index == 0 and start < self.num_prompt_tokens - 1

    def forbidden_after(self, drafted: SequenceOf[int] = ()) -> tuple[int, ...]:
        """Return the tokens that would complete a bad word after ``drafted``; no token may be pending."""
        if self.bad_words is NO_WORDS:  # fast path: called for every row of every step
            return ()
        assert self.num_pending == 0, "bad words need to know every token"
        return self.bad_words.completions(self.token_ids, self.num_prompt_tokens, drafted)

    def mask_after(self, drafted: SequenceOf[int] = ()) -> Mask | None:
        """Return the tokens that the grammar allows after ``drafted``; no token may be pending.

        None without a grammar, or if ``drafted`` breaks the grammar or ends the sequence.
        """
        if self.matcher is None:
            return None
        assert self.num_pending == 0, "a grammar needs to know every token"
        return self.matcher.mask(drafted)

    def append(self, token_id: int) -> None:
        """Append a generated token. May set ``finish_reason``.

        Raises:
            EngineError: the grammar does not allow the token.
        """
        assert self.finish_reason is None, f"token appended to a finished sequence ({self.finish_reason})"
        self.token_ids.append(token_id)
        if token_id in self.ends:
            self.finish_reason, self.stop_reason = "stop", token_id
        elif self.matcher is not None and self._completes(token_id):
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self.most_tokens:
            self.finish_reason = "length"

    def _completes(self, token_id: int) -> bool:
        """Advance the grammar. Return True if nothing may follow the token."""
        assert self.matcher is not None
        self.matcher.append(token_id)
        return self.matcher.complete


@functools.lru_cache(8)  # shared by a request's samples: the set may be as large as the vocabulary
def _set_of(token_ids: tuple[int, ...]) -> frozenset[int]:
    return frozenset(token_ids)
