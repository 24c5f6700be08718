"""GRPOTrainer: TRL's trainer with bitwise equal log-probabilities from the sampler and the trainer."""

import copy
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, set_seed

from detcompile.api import compile as compile_model
from detcompile.api import load_model
from detcompile.errors import InvalidInput
from detcompile.models.compiled import CompiledModel
from detcompile.models.loading import tokenizer_of
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.requests.outputs import SamplingLogprobs
from detcompile.runtime.requests.sampling_params import LARGEST, SamplingParams
from detcompile.templates.training.pointwise import policy_terms
from detcompile.torch_internals.autograd import version_of
from detcompile.training.loading import trainer
from detcompile.training.policy_loss import policy_loss
from detcompile.training.sharding import whole_weights
from detcompile.training.trainer import Trainer
from detcompile.trl.policy import ONLY_VALUES, PolicyTraining, require_options, share_parameters

try:
    import trl
    from trl.trainer import grpo_trainer
except ImportError as error:
    raise ImportError("trl is not installed: pip install '.[trl]' in a checkout of detcompile") from error

LOSSES = ("cispo", "dapo", "dr_grpo")
MICRO_BATCH = "its value depends on the split into micro-batches"
SAMPLER = "detcompile's engine samples the completions"
GRPO_VALUES = ONLY_VALUES | {
    "cast_lm_head_to_fp32": (False, "the head must round as in serving"),
    "delta": (None, "the clipped objective has no second bound"),
    "entropy_coef": (0.0, MICRO_BATCH),
    "generation_kwargs": (None, SAMPLER),
    "importance_sampling_level": ("token", "a sequence's ratio is a sum without a pinned order"),
    "off_policy_mask_threshold": (None, "a sequence's divergence is a sum without a pinned order"),
    "top_entropy_quantile": (1.0, MICRO_BATCH),
    "sync_ref_model": (False, "the reference model keeps its weights"),
    "use_adaptive_entropy": (False, MICRO_BATCH),
    "use_transformers_continuous_batching": (False, SAMPLER),
    "use_vllm": (False, SAMPLER),
}
REFUSED = {  # arguments of the trainer
    "quantization_config": "quantized weights have no gradient",
    "rollout_func": SAMPLER,
}


class GRPOTrainer(PolicyTraining, trl.GRPOTrainer):
    """TRL's GRPOTrainer with completions, log-probabilities and gradients computed by detcompile.

    The sampler's and the trainer's log-probabilities are bitwise equal. The logs show it:
    ``sampling/kl`` and ``sampling/sampling_logp_difference/max`` are 0 until a step has moved the weights. The weights
    after a step do not depend on how its batch is split into ``per_device_train_batch_size``,
    ``gradient_accumulation_steps`` and processes.

    Several processes share the weights by FSDP2. Each samples its part of the batch with its own engine.

    Args:
        model: a name as for ``compile``, or a Hugging Face causal LM in eval mode, which keeps its parameters. In a
            PEFT model with LoRA of linears, as with ``peft_config``, only the adapter is trained, and saved.
        reward_funcs: TRL's.
        args: TRL's GRPOConfig. Losses: "dapo", "dr_grpo", "cispo".
        sampler: compiled model that samples completions, for example over several ranks. Its weights are updated
            from the trained ones. None compiles ``model``.
        engine: configuration of the sampler's engine.
        **keywords: TRL's other arguments.

    Raises:
        InvalidInput: a field of ``args`` or an argument would make gradients depend on micro-batching, or the policy
            differ from the sampler; the message names it.
        UnsupportedModel: the model is not supported, or has no gradient.
    """

    def __init__(
        self,
        model: PreTrainedModel | str | Path,
        reward_funcs: Any = None,
        args: Any = None,
        *,
        sampler: CompiledModel | None = None,
        engine: EngineConfig | None = None,
        **keywords: Any,
    ) -> None:
        args = trl.GRPOConfig("GRPO") if args is None else args
        require_exact(args, keywords)
        held = load_model(model) if isinstance(model, (str, Path)) else model
        if (peft_config := keywords.pop("peft_config", None)) is not None:
            held = _adapted(held, peft_config, args.seed)
        self.sampler = sampler or cast(CompiledModel, compile_model(copy.deepcopy(held)))
        reference = self._trainer_of(held) if args.beta else None
        self.policy = self._trainer_of(held)
        if args.world_size > 1:
            self.policy.shard()
        share_parameters(self.policy, held, recompute=args.gradient_checkpointing)
        keywords.setdefault("processing_class", tokenizer_of(held))
        without_reference = copy.copy(args)
        without_reference.beta = 0.0  # else TRL loads another one
        super().__init__(held, reward_funcs, without_reference, **keywords)
        self.beta = self.args.beta = args.beta
        self.ref_model = reference
        self._engine = self.sampler.engine(engine or EngineConfig())
        self._served: tuple[int, int] | None = None  # step and weights version of the engine's weights
        self._num_drawn = 0

    @property
    def _filters(self) -> dict[str, Any]:
        filters = _filters_of(self.args)
        return {"top_k": filters.top_k, "top_p": filters.top_p, "min_p": filters.min_p}

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator; keep it from wrapping a model whose gradients the policy adds over processes."""
        super().create_accelerator_and_postprocess()
        if self.args.world_size > 1:
            self.accelerator.prepare_model = partial(self.accelerator.prepare_model, evaluation_mode=True)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as TRL does. All processes must call this; the first one writes."""
        if self.args.world_size == 1:
            return super().save_model(output_dir, _internal_call)
        if hasattr(self.model, "peft_config"):
            folder = output_dir or self.args.output_dir
            self.policy.save_adapters(folder)
            if self.args.should_save:
                self.processing_class.save_pretrained(folder)
            return None
        weights = whole_weights(
            self.policy, {name: p.dtype for name, p in self.policy.named_parameters(remove_duplicate=False)}
        )
        if self.args.should_save:
            self._save(output_dir, state_dict=weights)

    def _trainer_of(self, model: PreTrainedModel) -> Trainer:
        """Create a trainer of a copy of the model, with the sampler's orders."""
        sampler = self.sampler
        return trainer(copy.deepcopy(model), numerics=sampler.numerics, max_context=sampler.max_context)

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        """Return TRL's sampler, whose order in an epoch does not depend on where training began."""
        sampler = super()._get_train_sampler(dataset)
        sampler.set_epoch = partial(_begin_epoch, sampler)
        return sampler

    def train(self, *given: Any, **keywords: Any) -> Any:
        """Train as TRL does. The first step copies the current weights to the sampler."""
        self._served = None
        return super().train(*given, **keywords)

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], images: Any, multimodal_fields: Any, *unused: Any, **keywords: Any
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Sample a completion of each prompt with the current weights; return token ids and their log-probabilities."""
        if images or multimodal_fields:
            raise InvalidInput("images are not supported: the policy reads only tokens.")
        step = self.state.global_step
        now = step, sum(version_of(parameter) for parameter in self.policy.parameters())
        if now != self._served:
            self.sampler.update_weights(self.policy)
            self._served, self._num_drawn = now, 0
        before = self._num_drawn + self.accelerator.process_index * len(prompt_ids)
        first = (self.args.seed << 44) + (step << 20) + before
        self._num_drawn += self.accelerator.num_processes * len(prompt_ids)
        params = [
            SamplingParams(
                max_tokens=self.max_completion_length, temperature=self.temperature, logprobs=0, sampling_logprobs=0,
                ignore_eos=True, stop_token_ids=tuple(self.eos_token_ids), seed=(first + place) % 2**64,
                **self._filters,
            )
            for place in range(len(prompt_ids))
        ]  # fmt: skip
        outputs = self._engine.generate(prompt_ids, params, progress=False)
        for output in outputs:
            if output.error is not None:
                raise output.error
        drawn = [output.outputs[0] for output in outputs]
        logprobs = [[cast(SamplingLogprobs, entry.sampling).logprob for entry in one.logprobs or ()] for one in drawn]
        return [one.token_ids for one in drawn], logprobs

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **keywords: Any,
    ) -> tuple[Tensor, Tensor, None]:
        """Compute log-probabilities and entropies [B, logits_to_keep] of the last tokens.

        Args:
            model: ``ref_model`` for the reference model; anything else for the policy.
        """
        others = sorted(name for name, value in keywords.items() if value is not None and not isinstance(value, bool))
        if others:
            raise InvalidInput(f"{', '.join(others)}: the policy reads only tokens.")
        policy = self.ref_model if model is self.ref_model else self.policy
        logprobs, entropies = [], []
        with torch.autocast(input_ids.device.type, enabled=False):
            for ids, mask in zip(*(part.split(batch_size or len(part)) for part in (input_ids, attention_mask))):
                scored = policy.logprobs(ids, mask, temperature=self.temperature, **self._filters)
                logprobs.append(scored[:, -logits_to_keep:])
                entropies.append(scored.entropy[:, -logits_to_keep:])
        return torch.cat(logprobs), torch.cat(entropies), None

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        logprobs, entropies, _ = self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            mask.shape[1],
        )
        logprobs = logprobs.masked_fill(mask == 0, 0.0)  # filters may exclude tokens that were not drawn
        advantages = inputs["advantages"]
        advantages = (advantages if advantages.dim() == 2 else advantages[:, None]) * mask.float()
        self._show(logprobs.detach(), entropies.detach(), mask.bool(), inputs.get("sampling_per_token_logps"))
        old, denominator = inputs.get("old_per_token_logps"), self._denominator(inputs, len(mask))
        if self.loss_type != "cispo":
            loss = policy_loss(logprobs, old, advantages, denominator, (self.epsilon_low, self.epsilon_high))
        else:
            if old is not None:  # else the ratio is 1
                advantages = advantages * _capped_ratio(logprobs, old, self.epsilon_high)
            loss = -(advantages * logprobs).sum(dtype=torch.float64) / denominator
        if not self.beta:
            return loss
        terms = (
            _divergence(logprobs, inputs["ref_per_token_logps"], old, self.args.use_bias_correction_kl) * mask.float()
        )
        self._log_mean("kl", terms.detach()[mask.bool()])
        return loss + self.beta * terms.sum(dtype=torch.float64) / denominator

    def _denominator(self, inputs: dict[str, Any], num_rows: int) -> float:
        """Return the loss denominator: a constant of the step, or the number of sampled tokens."""
        training = self.model.training
        steps = self.current_gradient_accumulation_steps if training else 1
        if self.loss_type == "dr_grpo":
            return float(num_rows * self.accelerator.num_processes * steps * self.max_completion_length)
        drawn = max(1.0, float(inputs["num_items_in_batch"]))
        return drawn * steps / self.args.steps_per_generation if training else drawn

    def _show(self, logprobs: Tensor, entropies: Tensor, mask: Tensor, drawn: Tensor | None) -> None:
        """Log how much the trainer's log-probabilities differ from the sampler's."""
        self._log_mean("entropy", entropies[mask])
        if drawn is None:
            return
        apart = (logprobs - drawn)[mask].double()
        self._log_mean("sampling/kl", apart.exp() - 1 - apart)
        self._log_mean("sampling/sampling_logp_difference/mean", apart.abs())
        largest = torch.cat([apart.abs(), apart.new_zeros(1)]).max()  # a batch may have no tokens
        most = self.accelerator.gather(largest).max()
        self._metrics["train" if self.model.training else "eval"]["sampling/sampling_logp_difference/max"].append(
            float(most)
        )

    def _log_mean(self, name: str, values: Tensor) -> None:
        """Log the mean of the values of all processes; 0 if there are none."""
        sums = torch.stack(
            [values.double().sum(), torch.tensor(float(len(values)), dtype=torch.float64, device=values.device)]
        )
        total, count = self.accelerator.gather(sums).view(-1, 2).sum(0).tolist()
        self._metrics["train" if self.model.training else "eval"][name].append(total / max(1.0, count))


def _capped_ratio(logprobs: Tensor, old: Tensor, most: float) -> Tensor:
    """Return min(e^(logprobs - old), most) in the pinned arithmetic of the clipped objective with advantages 1."""
    given = (tensor.detach().contiguous() for tensor in (logprobs, old, torch.ones_like(old)))
    terms, _ = policy_terms(*given, low=0.0, high=most, denominator=1.0)
    return -terms


def _divergence(logprobs: Tensor, reference: Tensor, old: Tensor | None, is_weighted: bool) -> Tensor:
    """Return e^d - d - 1 of each token, d = reference - logprob, and its gradient, with pinned exponentials.

    This estimates the divergence from the reference model (Schulman, "Approximating KL Divergence", 2020).

    Args:
        old: log-probabilities under the policy that sampled the tokens; None if that is this policy.
        is_weighted: multiply by e^(logprob - old), which has a gradient, too (DeepSeek-V3.2, 2025).
    """
    fixed = logprobs.detach()
    ratio = _capped_ratio(reference, fixed, LARGEST)
    values, slopes = ratio - (reference - fixed) - 1, 1 - ratio
    if is_weighted:
        weights = torch.ones_like(fixed) if old is None else _capped_ratio(fixed, old, LARGEST)
        values, slopes = values * weights, (fixed - reference) * weights
    return values + slopes * (logprobs - fixed)


def _adapted(model: PreTrainedModel, config: Any, seed: int) -> Any:
    """Return a PEFT model with a new adapter, drawn from the seed. TRL has imported PEFT if it is there."""
    set_seed(seed)
    return grpo_trainer.get_peft_model(model, config, autocast_adapter_dtype=False).eval()


def _begin_epoch(sampler: Any, epoch: int) -> None:
    """Advance TRL's sampler by this many epochs."""
    if sampler.shuffle:
        sampler.generator.manual_seed(sampler.seed)
        for _ in range(epoch):
            torch.randperm(sampler.num_samples, generator=sampler.generator)


def require_exact(args: Any, keywords: dict[str, Any]) -> None:
    """Reject options that make gradients depend on micro-batching, or the policy differ from the sampler.

    Raises:
        InvalidInput: a field of ``args`` or an argument in ``keywords`` is not supported.
    """
    if args.loss_type not in LOSSES:
        raise InvalidInput(
            f"loss_type={args.loss_type!r} weights tokens by sequence or micro-batch, or without pinned arithmetic. "
            f"Use one of {', '.join(LOSSES)}, whose weights depend on the global batch only."
        )
    if args.world_size > 1 and args.save_strategy != "no":
        raise InvalidInput(
            f"save_strategy={args.save_strategy.value!r} with {args.world_size} processes: checkpoints would lack most"
            " of the optimizer's state. Pass 'no', and call save_model() in all processes."
        )
    require_options(args, GRPO_VALUES, keywords, REFUSED)
    if not _filters_of(args).filtered:
        return
    if args.beta:
        raise InvalidInput(
            f"beta={args.beta} with top_k, top_p or min_p: the reference would exclude other tokens than the policy, so"
            " their divergence is not defined. Leave beta at 0.0, or the filters out."
        )
    if args.gradient_accumulation_steps % (args.steps_per_generation * args.num_iterations):
        raise InvalidInput(
            f"num_iterations={args.num_iterations} and steps_per_generation={args.steps_per_generation} with top_k,"
            " top_p or min_p: after a step the filters exclude other tokens than in the draw. Train each batch in one"
            f" step: num_iterations=1, and steps_per_generation={args.gradient_accumulation_steps}."
        )


def _filters_of(args: Any) -> SamplingParams:
    return SamplingParams(top_k=args.top_k, top_p=args.top_p, min_p=args.min_p or 0.0)
