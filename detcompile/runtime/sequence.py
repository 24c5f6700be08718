"""One request: its tokens, how many of them the cache holds, and where."""

from dataclasses import dataclass, field
from typing import Literal

from detcompile.errors import InvalidInput
from detcompile.runtime.sampling import SamplingParams

__all__ = ["FinishReason", "Sequence"]

FinishReason = Literal["stop", "length"]


@dataclass(eq=False, slots=True)
class Sequence:
    """A prompt and the tokens generated after it.

    ``token_ids[:num_computed]`` have their keys and values in the cache, in the blocks of ``block_table``.
    ``position_ids`` overrides the positions 0, 1, 2… that the model sees (one an element of ``token_ids``); the
    place in the cache is the index in ``token_ids`` all the same. ``sampling`` always has a seed: one is drawn here
    if the caller gave none, and it stays readable in ``seed``, so that the request can be repeated.

    Raises:
        InvalidInput: no token, or not one position a token.
    """

    token_ids: list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    position_ids: list[int] | None = None
    num_computed: int = 0
    block_table: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise InvalidInput("a sequence needs at least one token: put the model's BOS token into an empty prompt")
        if self.position_ids is not None and len(self.position_ids) != len(self.token_ids):
            raise InvalidInput(
                f"{len(self.position_ids)} position_ids for {len(self.token_ids)} tokens: give one a token, or none"
            )
        self.sampling = self.sampling.seeded()
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def seed(self) -> int:
        """Seed of this request's random numbers."""
        assert self.sampling.seed is not None
        return self.sampling.seed

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose keys are not in the cache yet."""
        return len(self.token_ids) - self.num_computed

    @property
    def generated_ids(self) -> list[int]:
        """Tokens after the prompt, a final stop token included."""
        return self.token_ids[self.num_prompt_tokens :]

    def append(self, token_id: int) -> None:
        """Add a generated token; the position after the last one is its own. May set ``finish_reason``."""
        assert self.finish_reason is None, f"a token for a sequence that has finished ({self.finish_reason})"
        self.token_ids.append(token_id)
        if self.position_ids is not None:
            self.position_ids.append(self.position_ids[-1] + 1)
        if token_id in self.sampling.stop_token_ids:
            self.finish_reason = "stop"
        elif len(self.token_ids) - self.num_prompt_tokens >= self.sampling.max_tokens:
            self.finish_reason = "length"
