"""``generate`` of a compiled model: Hugging Face's arguments and outputs over an engine, or column by column.

What the end of a row needs nobody to see runs over an engine; the rest over models/stepwise.py, with the same tokens.
"""

import threading
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import (
    EosTokenCriteria,
    GenerateDecoderOnlyOutput,
    MaxLengthCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from detcompile.errors import InvalidInput
from detcompile.executors.executor import Executor
from detcompile.models.stepwise import Columns, Stepper
from detcompile.runtime.dense.generation_arguments import GenerationArguments, read_arguments
from detcompile.runtime.dense.given_tensors import require_ids
from detcompile.runtime.dense.padded_batch import check_batch, inferred_mask, row_seeds, unpad
from detcompile.runtime.engine import Engine
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.kv.block_pool import BLOCK_SIZE, whole_blocks
from detcompile.runtime.requests.admission import warn_of_end_tokens
from detcompile.runtime.requests.plain_values import kind, shown
from detcompile.runtime.requests.sampling_params import SamplingParams

__all__ = ["GenerationOutput", "Generator", "append_rows"]

_MAKING = threading.Lock()  # two threads that generate share the engine that one of them makes


@dataclass
class GenerationOutput(GenerateDecoderOnlyOutput):
    """Hugging Face's output of ``generate`` with ``return_dict_in_generate``, and the seeds that repeat it.

    Attributes:
        seeds: each row's own, for ``generate(seed=...)`` with the row alone or in any batch; None of a greedy call.
    """

    seeds: tuple[int, ...] | None = None


class Generator:
    """Continues padded batches, over an engine or a runner that it keeps, so that their CUDA graphs are.

    Attributes:
        engine: serves what needs no column seen; None before the first.
    """

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self._stepper = Stepper()

    def generate(
        self,
        executor: Executor,
        new_engine: Callable[[EngineConfig], Engine],
        tokenizer: Callable[[], Any],
        batch: tuple[Tensor | None, Tensor | None],
        given: Mapping[str, Any],
    ) -> Tensor | GenerationOutput:
        """CompiledModel.generate.

        Args:
            new_engine: makes an engine where the last one cannot hold all rows to their ends.
            tokenizer: gives the model's tokenizer, or None if it has none.
            batch: input_ids and attention_mask, where they were given.
            given: the other arguments of the call.
        """
        input_ids, attention_mask, given = _checked_inputs(*batch, given)
        facts, module = executor.description.facts, executor.description.module
        arguments = read_arguments(module, given, input_ids.shape[1], facts.num_logits)
        criteria = _criteria(arguments, input_ids.shape[1], tokenizer) if arguments.stepwise else None
        if criteria is not None:
            warn_of_end_tokens(tokenizer(), facts.num_logits, arguments.eos_token_id)
            most = max(1, (criteria.max_length or 0) - input_ids.shape[1])
            arguments = replace(arguments, max_new_tokens=most, min_new_tokens=min(arguments.min_new_tokens, most))
        if attention_mask is None:
            attention_mask = inferred_mask(input_ids, arguments.padding, arguments.eos_token_id)
        unpadded = unpad(input_ids, attention_mask)
        check_batch(unpadded, facts.num_token_ids, facts.max_context, arguments.max_new_tokens)
        prompts = [prompt for prompt in unpadded.rows() for _ in range(arguments.num_return_sequences)]
        input_ids = input_ids.repeat_interleave(arguments.num_return_sequences, dim=0)
        if executor.ranks is not None and arguments.do_sample and arguments.seed is None:
            raise InvalidInput("ranks that share a model have to draw the same tokens: pass seed, the same to each")
        seeds = row_seeds(arguments.seed, len(prompts))
        params = _row_params(arguments, seeds)
        if criteria is not None:
            found = self._stepper.generate(executor, input_ids, prompts, params, criteria, arguments)
        else:
            new = self._continued(prompts, params, new_engine, len(facts.kv_groups), arguments.cuda_graphs)
            found = Columns(append_rows(input_ids, new, arguments.padding or 0))
        if not arguments.return_dict_in_generate:
            return found.sequences
        own = tuple(seeds) if arguments.do_sample else None
        return GenerationOutput(sequences=found.sequences, scores=found.scores, logits=found.logits, seeds=own)

    def _continued(
        self,
        prompts: list[list[int]],
        params: list[SamplingParams],
        new_engine: Callable[[EngineConfig], Engine],
        num_groups: int,
        cuda_graphs: bool | None,
    ) -> list[list[int]]:
        """The new tokens of each prompt, by the engine.

        Args:
            num_groups: block tables of a sequence.
        """
        most = max(each.max_tokens or 0 for each in params)
        longest = whole_blocks(max(len(tokens) for tokens in prompts) + most)
        needed = len(prompts) * longest // BLOCK_SIZE * num_groups + 1
        with _MAKING:
            last = self.engine
            if last is None or last.failed or last.config.cuda_graphs != cuda_graphs or last.stats.num_blocks < needed:
                self.engine = last = None  # frees the old cache first
                seats = min(len(prompts), 1024)
                config = EngineConfig(num_blocks=needed + 1, cuda_graphs=cuda_graphs, max_num_seqs=seats)
                self.engine = last = new_engine(config)
        outputs = last.generate(prompts, params, progress=False)
        for output in outputs:
            if output.error is not None:
                raise output.error
        return [output.outputs[0].token_ids for output in outputs]


def append_rows(input_ids: Tensor, rows: SequenceOf[list[int]], pad: int) -> Tensor:
    """[B, C + n] int64: the batch as it is, then each row's own tokens, then padding."""
    longest = max(len(tokens) for tokens in rows)
    new = [tokens + [pad] * (longest - len(tokens)) for tokens in rows]
    return torch.cat([input_ids.long(), torch.tensor(new, device=input_ids.device)], dim=1)


def _checked_inputs(
    input_ids: Tensor | None, attention_mask: Tensor | None, given: Mapping[str, Any]
) -> tuple[Tensor, Tensor | None, dict[str, Any]]:
    """The batch, which Hugging Face's callers also name ``inputs``, and the other arguments."""
    rest = dict(given)
    inputs = rest.pop("inputs", None)
    if (input_ids is None) == (inputs is None):
        raise InvalidInput("generate() needs input_ids, a tensor of token ids [batch, length], once")
    found = inputs if input_ids is None else input_ids
    for name, value in (("input_ids", found), ("attention_mask", attention_mask)):
        if value is not None and not isinstance(value, Tensor):
            raise InvalidInput(
                f"{name} is a {type(value).__name__}: give a tensor; what is no part of the batch goes by its name, as"
                " generation_config=... does"
            )
    assert found is not None
    require_ids(found)
    config = rest.get("generation_config")
    if config is not None and not isinstance(config, GenerationConfig):
        raise InvalidInput(
            f"generation_config {shown(config)} is {kind(config)}: give a GenerationConfig of transformers, or its"
            " settings as arguments of generate()"
        )
    return found, attention_mask, rest


def _row_params(arguments: GenerationArguments, seeds: SequenceOf[int]) -> list[SamplingParams]:
    """How to draw each row: end tokens are those of the arguments, and not the model's."""
    suppressed = dict.fromkeys(arguments.suppress_tokens, -torch.inf)
    return [
        SamplingParams(
            max_tokens=arguments.max_new_tokens,
            min_tokens=arguments.min_new_tokens,
            seed=seed,
            ignore_eos=True,
            stop_token_ids=arguments.eos_token_id,
            logit_bias=suppressed or None,
            bad_words_ids=arguments.bad_words_ids,
            **arguments.sampling,
        )
        for seed in seeds
    ]


def _criteria(
    arguments: GenerationArguments, num_columns: int, own_tokenizer: Callable[[], Any]
) -> StoppingCriteriaList:
    """Those that the arguments ask for, then the caller's; one of the same class takes the place of ours."""
    own: list[Any] = [MaxLengthCriteria(num_columns + arguments.max_new_tokens)]
    if arguments.stop_strings:
        tokenizer = arguments.tokenizer if arguments.tokenizer is not None else own_tokenizer()
        if tokenizer is None:
            raise InvalidInput("stop_strings need the text, and this model has no tokenizer: pass tokenizer=")
        try:
            own.append(StopStringCriteria(tokenizer, list(arguments.stop_strings)))
        except (ValueError, AttributeError, TypeError) as error:
            raise InvalidInput(f"stop_strings with a {type(tokenizer).__name__}: {error}") from error
    if arguments.eos_token_id:
        own.append(EosTokenCriteria(list(arguments.eos_token_id)))
    given = arguments.stopping_criteria
    replaced = [next((theirs for theirs in given if type(theirs) is type(ours)), ours) for ours in own]
    return StoppingCriteriaList([*replaced, *(theirs for theirs in given if theirs not in replaced)])
