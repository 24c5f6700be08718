"""AsyncGRPOTrainer: TRL's asynchronous trainer over ``detcompile serve``, with the server's bits in the trainer."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from detcompile.errors import InvalidInput
from detcompile.orders.numerics import Numerics
from detcompile.training.loading import trainer
from detcompile.trl.policy import FILTER, ONLY_VALUES, PolicyTraining, require_options, share_parameters
from detcompile.trl.weight_transfer import FolderWeightTransfer

try:
    from trl.import_utils import TRLExperimentalWarning
except ImportError as error:
    raise ImportError("trl is not installed: pip install '.[trl]' in a checkout of detcompile") from error
with warnings.catch_warnings():
    warnings.simplefilter("ignore", TRLExperimentalWarning)
    from trl.experimental import async_grpo
    from trl.experimental.async_grpo import async_grpo_trainer, async_rollout_worker
    from trl.trainer.utils import FusedCausalLMOutput

ASYNC_VALUES = ONLY_VALUES | {
    "min_p": (None, FILTER),
    "top_k": (0, FILTER),
    "top_p": (1.0, FILTER),
    "temperature": (1.0, "the server's log-probabilities are the model's, at temperature 1"),
}
REFUSED = {"peft_config": "adapters are not supported"}  # arguments of the trainer


class AsyncGRPOTrainer(PolicyTraining, async_grpo.AsyncGRPOTrainer):
    """TRL's AsyncGRPOTrainer: completions from ``detcompile serve``, log-probabilities and gradients from a trainer.

    TRL's logs have ``kl`` and ``ratio``. With ``max_staleness=0`` they are exactly 0 and 1 in each step: each batch was
    drawn with the weights that it trains. Older samples have another policy, and TRL's ratio is to that policy.

    The server must have been started with ``--admin-key`` and serve ``model``. TRL requires the package vllm, which its
    rollout worker does not use; here it may be absent.

    Args:
        model: folder of the model, or its id on the Hub, as the server was started with.
        reward_funcs: TRL's.
        args: TRL's AsyncGRPOConfig. With ``max_staleness=0``, ``token_budget`` must be 0.
        weight_transfer: sends weights to the server. None takes a ``FolderWeightTransfer`` to
            ``args.vllm_server_base_url``, with the folder "weights" in ``args.output_dir``.
        numerics, max_context: as in ``trainer``: the server's.
        **keywords: TRL's other arguments.

    Raises:
        InvalidInput: a field of ``args`` or an argument is not supported; the message names it.
        UnsupportedModel: the model is not supported, or has no gradient.
    """

    def __init__(
        self,
        model: str | Path,
        reward_funcs: Any = None,
        args: Any = None,
        *,
        weight_transfer: Any = None,
        numerics: Numerics | None = None,
        max_context: int | None = None,
        **keywords: Any,
    ) -> None:
        args = async_grpo.AsyncGRPOConfig("AsyncGRPO") if args is None else args
        require_options(args, ASYNC_VALUES, keywords, REFUSED)
        if args.world_size > 1:
            raise InvalidInput(f"{args.world_size} processes: gradients are not summed over them. Start one process.")
        if args.max_staleness == 0 and args.token_budget != 0:
            raise InvalidInput(
                f"max_staleness=0 needs token_budget=0, not {args.token_budget!r}: with a budget, TRL keeps a sample of"
                " a full batch for the next step"
            )
        if weight_transfer is None:
            weight_transfer = FolderWeightTransfer(args.vllm_server_base_url, Path(args.output_dir, "weights"))
        policy = trainer(model, numerics=numerics, max_context=max_context, device=args.device)
        with _requirements_lifted():
            super().__init__(str(model), reward_funcs, args, weight_transfer=weight_transfer, **keywords)
        if self.aux_loss_enabled:
            raise InvalidInput("router_aux_loss_coef: the router's loss is not supported. Set it to 0.0.")
        self.policy = policy
        share_parameters(policy, self.model, recompute=args.gradient_checkpointing)
        self.model.forward = partial(self._score)  # for TRL's compute_loss; accelerate would rebind a method

    def get_train_dataloader(self) -> Any:
        """Return TRL's loader. With ``max_staleness=0`` it reads no batch ahead, which would be drawn before a step."""
        loader = super().get_train_dataloader()
        return loader if self.args.max_staleness else loader.base_dataloader

    def _score(
        self,
        *,
        input_ids: Tensor,
        tree_kv_index: Tensor,
        tree_cu_seqlens_k: Tensor,
        fused_lm_head: bool,
        **unused: Any,
    ) -> FusedCausalLMOutput:
        """Return the log-probability and the entropy [1, T] of the token after each token of a packed tree.

        Args:
            input_ids: [1, T], the tree's tokens in depth-first order. Completions of a prompt share its tokens.
            tree_kv_index, tree_cu_seqlens_k: the path from the root to the end of each segment.
            fused_lm_head: True.
            **unused: positions and labels, which follow from the tree.
        """
        paths = [tree_kv_index[start:end] for start, end in pairwise(tree_cu_seqlens_k.tolist())]
        after = [*paths[1:], tree_kv_index[:0]]
        sequences = [path for path, following in zip(paths, after) if not _continues(following, path)]
        ids = pad_sequence([input_ids[0, path] for path in sequences], batch_first=True)
        lengths = torch.tensor([len(path) for path in sequences], dtype=torch.int64, device=ids.device)
        mask = torch.arange(ids.shape[1], dtype=torch.int64, device=ids.device) < lengths[:, None]
        with torch.autocast(ids.device.type, enabled=False):
            logprobs = self.policy.logprobs(ids, mask.long())
        entropy = _packed(logprobs.entropy, sequences)
        return FusedCausalLMOutput(log_probs=_packed(logprobs, sequences), entropy=entropy)

    def _streaming_iter(self) -> Iterator[tuple[str, Tensor]]:
        """Return the weights, rounded to the model's dtype as the forward rounds them."""
        return iter(self.policy.serving_weights().items())


def _continues(path: Tensor, begun: Tensor) -> bool:
    """Return True if ``path`` extends ``begun``."""
    return len(path) > len(begun) and bool(path[len(begun) - 1] == begun[-1])


def _packed(values: Tensor, sequences: list[Tensor]) -> Tensor:
    """Return values [S, C - 1] of sequences in the order of the tree: [1, T].

    A token that sequences share comes from the first one. All have the same bits.
    """
    values, parts, end = pad(values, (0, 1)), [], 0
    for row, path in zip(values, sequences, strict=True):
        start, end = end, int(path[-1]) + 1
        parts.append(row[len(path) - (end - start) : len(path)])
    return torch.cat(parts)[None]


@contextmanager
def _requirements_lifted() -> Iterator[None]:
    """Allow TRL's trainer to be created without CUDA and without the package vllm, which it does not use."""
    available, peak_flops = async_rollout_worker.is_vllm_available, async_grpo_trainer.get_peak_flops_per_device
    async_rollout_worker.is_vllm_available = lambda: True
    if not torch.cuda.is_available():
        async_grpo_trainer.get_peak_flops_per_device = lambda accelerator, dtype: None  # else it asks CUDA
    try:
        yield
    finally:
        async_rollout_worker.is_vllm_available = available
        async_grpo_trainer.get_peak_flops_per_device = peak_flops
