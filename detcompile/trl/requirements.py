"""Supported GRPOConfig options: losses independent of micro-batching, completions sampled from the policy."""

from typing import Any

from detcompile.errors import InvalidInput

__all__ = ["require_exact"]

LOSSES = ("cispo", "dapo", "dr_grpo")
OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")  # replaced by detcompile.AdamW
MICRO_BATCH = "its value depends on the split into micro-batches"
SAMPLER = "detcompile's engine samples the completions"
FILTER = "completions would be sampled from another distribution than the trained one"
ALONE: dict[str, tuple[Any, str]] = {  # field -> the only supported value, and the reason
    "beta": (0.0, "the divergence from the reference model has no pinned exponential"),
    "cast_lm_head_to_fp32": (False, "the head must round as in serving"),
    "delta": (None, "the clipped objective has no second bound"),
    "entropy_coef": (0.0, MICRO_BATCH),
    "fp16": (False, "a scaled loss exceeds the range in which sums are exact"),
    "generation_kwargs": (None, SAMPLER),
    "importance_sampling_level": ("token", "a sequence's ratio is a sum without a pinned order"),
    "min_p": (None, FILTER),
    "off_policy_mask_threshold": (None, "a sequence's divergence is a sum without a pinned order"),
    "repetition_penalty": (1.0, FILTER),
    "top_entropy_quantile": (1.0, MICRO_BATCH),
    "top_k": (0, FILTER),
    "top_p": (1.0, FILTER),
    "use_adaptive_entropy": (False, MICRO_BATCH),
    "use_liger_kernel": (False, "layers must be those of serving"),
    "use_transformers_continuous_batching": (False, SAMPLER),
    "use_vllm": (False, SAMPLER),
}
REFUSED = {  # arguments of the trainer
    "peft_config": "adapters are not served",
    "quantization_config": "quantized weights have no gradient",
    "rollout_func": SAMPLER,
}


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
    for name, (served, why) in ALONE.items():
        if (value := getattr(args, name)) != served:
            raise InvalidInput(f"{name}={value!r} is not served: {why}. Leave it at {served!r}.")
    if (optim := str(getattr(args.optim, "value", args.optim))) not in OPTIMIZERS:
        raise InvalidInput(f"optim={optim!r} is not served: use adamw_torch, or pass optimizers=(yours, None).")
    if args.world_size > 1:
        raise InvalidInput(f"{args.world_size} processes: gradients are not summed over processes. Start one process.")
    for name, why in REFUSED.items():
        if keywords.get(name) is not None:
            raise InvalidInput(f"{name} is not served: {why}.")
