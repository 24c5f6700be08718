"""DraftedSequence: a drafter's read-only view of a sequence."""

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Any, overload

from detcompile.runtime.requests.sampling_params import SamplingParams
from detcompile.runtime.requests.sequence import Sequence


class DraftedSequence:
    """A read-only view of a sequence, which exists from its first step to ``Drafter.forget``."""

    __slots__ = ("_sampling", "_sequence")

    def __init__(self, sequence: Sequence) -> None:
        self._sequence, self._sampling = sequence, sequence.sampling
        if self._sampling.logit_bias is not None:
            self._sampling = replace(self._sampling, logit_bias=dict(self._sampling.logit_bias))

    @property
    def token_ids(self) -> SequenceOf[int]:
        """The prompt and the generated tokens; slices are lists."""
        return _ReadOnly(self._sequence.token_ids)

    @property
    def sampling(self) -> SamplingParams:
        """The request's parameters, with a seed."""
        return self._sampling

    @property
    def sample_index(self) -> int:
        """Index of this sample among the request's n samples."""
        return self._sequence.sample_index

    @property
    def seed(self) -> int:
        """Seed of this request's random numbers."""
        return self._sequence.seed

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of the prompt."""
        return self._sequence.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        """Number of tokens so far, including the prompt."""
        return self._sequence.num_tokens

    @property
    def num_generated(self) -> int:
        """Number of tokens after the prompt."""
        return self._sequence.num_generated

    @property
    def generated_ids(self) -> list[int]:
        """A copy of the tokens after the prompt."""
        return self._sequence.generated_ids

    @property
    def max_length(self) -> int:
        """Most tokens that the context can hold."""
        return self._sequence.max_length

    @property
    def most_tokens(self) -> int:
        """Maximum number of tokens that this sequence can hold."""
        return self._sequence.most_tokens

    @property
    def priority(self) -> int:
        """Priority; lower is more urgent."""
        return self._sequence.priority


class _ReadOnly(SequenceOf[int]):
    """A read-only list of token ids that compares and adds like a list."""

    __slots__ = ("_list",)

    def __init__(self, listed: list[int]) -> None:
        self._list = listed

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: Any) -> Any:
        return self._list[index]

    def __len__(self) -> int:
        return len(self._list)

    def __iter__(self) -> Iterator[int]:
        return iter(self._list)

    def __eq__(self, other: object) -> bool:
        return self._list == (other._list if isinstance(other, _ReadOnly) else other)

    __hash__ = None  # type: ignore[assignment]

    def __add__(self, other: list[int]) -> list[int]:
        return self._list + other

    def __repr__(self) -> str:
        return repr(self._list)
