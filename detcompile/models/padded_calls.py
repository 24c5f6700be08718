"""Padded batches through an executor, as Hugging Face's callers give them: logits of one call, and generation."""

import threading
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutput

from detcompile.errors import InvalidInput
from detcompile.executors.executor import Executor
from detcompile.runtime.dense.padded_batch import UnpaddedBatch, check_batch, keep_columns, language_loss, repad
from detcompile.runtime.dense.step import dense_step
from detcompile.runtime.engine import Engine
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.kv.block_pool import BLOCK_SIZE, whole_blocks
from detcompile.runtime.requests.sampling_params import SamplingParams

__all__ = ["Generator", "append_rows", "padded_output"]

_MAKING = threading.Lock()  # two threads that generate share the engine that one of them makes


def padded_output(
    executor: Executor, batch: UnpaddedBatch, labels: Tensor | None, logits_to_keep: int | Tensor
) -> CausalLMOutput:
    """Logits [B, K, V] of one step over a KV cache of its own, zeros at padding, and the loss where there are labels.

    Args:
        labels: [B, C], -100 where there is none.
        logits_to_keep: the last so many columns, or those of an index tensor [K]; 0 keeps all.

    Raises:
        InvalidInput: a token, a length, a position or a label out of range.
    """
    keeps_all = not isinstance(logits_to_keep, Tensor) and not logits_to_keep
    if labels is not None and not (keeps_all and labels.shape == batch.mask.shape):
        raise InvalidInput("labels need the shape of input_ids and all logits: pass logits_to_keep=0")
    facts = executor.description.facts
    check_batch(batch, facts.num_token_ids, facts.max_context)
    rows, mask = keep_columns(batch.mask, logits_to_keep)
    arrays, num_blocks = dense_step(batch, len(facts.kv_groups), rows)
    num_states = len(batch.lengths) if facts.state_shapes else 0
    runner = executor.new_runner(num_blocks, BLOCK_SIZE, False, num_states)
    logits = repad(runner.run(arrays), mask)
    return CausalLMOutput(loss=None if labels is None else language_loss(logits, labels, mask), logits=logits)


class Generator:
    """Continues prompts over an engine that it keeps, so that its CUDA graphs are.

    Attributes:
        engine: serves the prompts; None before the first.
    """

    def __init__(self) -> None:
        self.engine: Engine | None = None

    def continued(
        self,
        prompts: list[list[int]],
        params: list[SamplingParams],
        new_engine: Callable[[EngineConfig], Engine],
        num_groups: int,
        cuda_graphs: bool | None,
    ) -> list[list[int]]:
        """The new tokens of each prompt.

        Args:
            new_engine: makes an engine where the last one cannot hold all prompts to their ends.
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
