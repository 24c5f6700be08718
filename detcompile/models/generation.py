"""``generate`` of a compiled model: Hugging Face's arguments and outputs over an engine, or column by column.

An engine generates, unless an argument must see each column: then models/stepwise.py does, with the same tokens.
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
from detcompile.runtime.dense.padded_batch import check_batch, inferred_mask, require_ids, row_seeds, unpad
from detcompile.runtime.engine import Engine
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.kv.block_pool import BLOCK_SIZE, whole_blocks
from detcompile.runtime.requests.admission import warn_of_end_tokens
from detcompile.runtime.requests.plain_values import kind, shown
from detcompile.runtime.requests.sampling_params import SamplingParams

_ENGINE_LOCK = threading.Lock()  # threads that generate share one new engine


@dataclass
class GenerationOutput(GenerateDecoderOnlyOutput):
    """Hugging Face's output of ``generate`` with ``return_dict_in_generate``, plus the seeds that reproduce it.

    Attributes:
        seeds: each row's seed, for ``generate(seed=...)`` alone or in any batch; None for greedy decoding.
    """

    seeds: tuple[int, ...] | None = None


class Generator:
    """Generates from padded batches; keeps its engine or runner so that captured CUDA graphs are reused.

    Attributes:
        engine: serves calls that need not see each column; None before the first.
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
        """Run CompiledModel.generate.

        Args:
            new_engine: creates an engine if the last one cannot hold all rows to their ends.
            tokenizer: returns the model's tokenizer, or None.
            batch: input_ids and attention_mask, if passed.
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
            raise InvalidInput("ranks that share a model must draw the same tokens: pass the same seed to each rank")
        unread = arguments.seed is None and not arguments.do_sample  # then torch's generator stays as it is
        seeds = row_seeds(0 if unread else arguments.seed, len(prompts))
        params = _row_params(arguments, seeds)
        if criteria is not None:
            columns = self._stepper.generate(executor, input_ids, prompts, params, criteria, arguments)
        else:
            new = self._continued(prompts, params, new_engine, len(facts.kv_groups), arguments.cuda_graphs)
            columns = Columns(append_rows(input_ids, new, arguments.padding or 0))
        if not arguments.return_dict_in_generate:
            return columns.sequences
        used = tuple(seeds) if arguments.do_sample else None
        return GenerationOutput(sequences=columns.sequences, scores=columns.scores, logits=columns.logits, seeds=used)

    def _continued(
        self,
        prompts: list[list[int]],
        params: list[SamplingParams],
        new_engine: Callable[[EngineConfig], Engine],
        num_groups: int,
        cuda_graphs: bool | None,
    ) -> list[list[int]]:
        """Return the new tokens of each prompt, from the engine.

        Args:
            num_groups: block tables per sequence.
        """
        most = max(each.max_tokens or 0 for each in params)
        longest = whole_blocks(max(len(tokens) for tokens in prompts) + most)
        needed = len(prompts) * longest // BLOCK_SIZE * num_groups + 1
        with _ENGINE_LOCK:
            last = self.engine
            if last is None or last.failed or last.config.cuda_graphs != cuda_graphs or last.stats.num_blocks < needed:
                self.engine = last = None  # frees the old cache first
                slots = min(len(prompts), 1024)
                config = EngineConfig(num_blocks=needed + 1, cuda_graphs=cuda_graphs, max_num_seqs=slots)
                self.engine = last = new_engine(config)
        outputs = last.generate(prompts, params, progress=False)
        for output in outputs:
            if output.error is not None:
                raise output.error
        return [output.outputs[0].token_ids for output in outputs]


def append_rows(input_ids: Tensor, rows: SequenceOf[list[int]], pad: int) -> Tensor:
    """Append rows to a batch: [B, C + n] int64 with the batch, then each row's tokens, then padding."""
    longest = max(len(tokens) for tokens in rows)
    new = [tokens + [pad] * (longest - len(tokens)) for tokens in rows]
    return torch.cat([input_ids.long(), torch.tensor(new, device=input_ids.device)], dim=1)


def _checked_inputs(
    input_ids: Tensor | None, attention_mask: Tensor | None, given: Mapping[str, Any]
) -> tuple[Tensor, Tensor | None, dict[str, Any]]:
    """Return the batch, which may also be passed as ``inputs``, and the other arguments."""
    rest = dict(given)
    inputs = rest.pop("inputs", None)
    if (input_ids is None) == (inputs is None):
        raise InvalidInput("generate() needs input_ids, a tensor of token ids [batch, length], once")
    ids = inputs if input_ids is None else input_ids
    for name, value in (("input_ids", ids), ("attention_mask", attention_mask)):
        if value is not None and not isinstance(value, Tensor):
            raise InvalidInput(
                f"{name} is a {type(value).__name__}: pass a tensor; pass other arguments by name, such as"
                " generation_config=..."
            )
    assert ids is not None
    require_ids(ids)
    config = rest.get("generation_config")
    if config is not None and not isinstance(config, GenerationConfig):
        raise InvalidInput(
            f"generation_config {shown(config)} is {kind(config)}: pass a GenerationConfig of transformers, or its"
            " settings as arguments of generate()"
        )
    return ids, attention_mask, rest


def _row_params(arguments: GenerationArguments, seeds: SequenceOf[int]) -> list[SamplingParams]:
    """Return each row's SamplingParams; end tokens are the arguments', not the model's."""
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
    arguments: GenerationArguments, num_columns: int, model_tokenizer: Callable[[], Any]
) -> StoppingCriteriaList:
    """Return the criteria of the arguments, then the caller's; a caller's criterion replaces ours of the same class."""
    criteria: list[Any] = [MaxLengthCriteria(num_columns + arguments.max_new_tokens)]
    if arguments.stop_strings:
        tokenizer = arguments.tokenizer if arguments.tokenizer is not None else model_tokenizer()
        if tokenizer is None:
            raise InvalidInput("stop_strings need a tokenizer, and this model has none: pass tokenizer=")
        try:
            criteria.append(StopStringCriteria(tokenizer, list(arguments.stop_strings)))
        except (ValueError, AttributeError, TypeError) as error:
            raise InvalidInput(f"stop_strings with a {type(tokenizer).__name__}: {error}") from error
    if arguments.eos_token_id:
        criteria.append(EosTokenCriteria(list(arguments.eos_token_id)))
    callers = arguments.stopping_criteria
    merged = [next((theirs for theirs in callers if type(theirs) is type(ours)), ours) for ours in criteria]
    return StoppingCriteriaList([*merged, *(theirs for theirs in callers if theirs not in merged)])
