"""Run every check on one architecture: eager, capture, certificate, meaning, axes, and the plan for two ranks.

``examine`` returns a dictionary of plain values for docs/models.json, ``examine_on_gpu`` with one for
docs/models_gpu.json; neither raises.
"""

import contextlib
import random
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import detcompile
from detcompile import EngineConfig, SamplingParams
from detcompile.commands.axes import AXES, Configuration, Tokens, configurations, measure
from detcompile.errors import DetcompileError
from detcompile.models.compiled import CompiledModel
from detcompile.orders.numerics import Numerics
from detcompile.parallel import TensorParallel
from detcompile.passes import program_source
from detcompile.passes.adapters.modules import replace_experts
from detcompile.passes.adapters.scans import pin_recurrences
from detcompile.passes.capture import freeze_rope, probe_attention
from detcompile.passes.modules.experts import pin_experts
from detcompile.passes.modules.positions import give_positions
from detcompile.passes.programs.aot import run_plainly
from detcompile.passes.sharding.shard import shard
from tools.model_configs import MAX_CONTEXT, OUTSIDE, VOCAB_SIZE, tiny_model

__all__ = [
    "AXES_MEASURED",
    "EXACT_LIMIT",
    "GPU_AXES",
    "LENGTH",
    "MEANING_LIMIT",
    "NUMERICS",
    "Result",
    "examine",
    "examine_exactly",
    "examine_on_gpu",
    "one_line",
    "refusal_of",
    "require_served",
    "served",
    "relative_error",
    "two_rows",
]

LENGTH = 200  # tokens: past WINDOW, a chunk of keys, and the threshold of rotary tables (tools/model_configs.py)
AXES_MEASURED = ("batch", "composition", "padding", "chunking", "decode", "kv")
GPU_AXES = (*AXES_MEASURED, "cuda_graphs")
CONFIGURATIONS = 3  # of each axis for each of two targets, the first of them the target alone
NUMERICS = Numerics(tp_sizes=(1, 2), kv_chunk=64)
MEANING_LIMIT = 2e-5  # norm of the logits' difference from eager float32, divided by the norm of eager's
EXACT_LIMIT = 2e-2  # the same in exact16

SERVED = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PROMPT_LENGTHS = (9, 19, 29)

Result = dict[str, Any]


def served(model_type: str) -> dict[str, str]:
    """Compile and serve an architecture as users do; return "yes" or what went wrong, by dtype."""
    result = {}
    for name, dtype in SERVED.items():
        try:
            require_served(detcompile.compile(tiny_model(model_type).to(dtype), max_context=MAX_CONTEXT))
            result[name] = "yes"
        except Exception as error:  # whatever it is, the page says it
            result[name] = refusal_of(error)
    return result


def require_served(model: CompiledModel) -> None:
    """Run the model and an engine on three prompts, together and each alone.

    Raises:
        AssertionError: logits are not finite or all alike, or a prompt alone has other bits than among the others.
    """
    ids = (torch.arange(3 * 40) * 13 % (VOCAB_SIZE - 10) + 5).view(3, 40)
    logits = model(ids).logits
    assert bool(logits.isfinite().all()) and len(logits.unique()) > logits.numel() // 100, "logits that say nothing"
    for row in range(3):
        assert torch.equal(model(ids[row : row + 1]).logits, logits[row : row + 1]), f"row {row} alone has other bits"
    engine = model.engine(EngineConfig(num_blocks=40, max_num_batched_tokens=64))
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=6, logprobs=2, ignore_eos=True)
    prompts = [row[:length].tolist() for row, length in zip(ids, PROMPT_LENGTHS, strict=True)]
    together = engine.generate(prompts, params, progress=False)
    for number, (prompt, crowded) in enumerate(zip(prompts, together, strict=True)):
        (alone,) = engine.generate([prompt], params, progress=False)
        first, second = alone.outputs[0], crowded.outputs[0]
        assert len(first.token_ids) == params.max_tokens, f"prompt {number} ended early"
        same = (first.token_ids, first.logprobs) == (second.token_ids, second.logprobs)
        assert same, f"prompt {number} alone has another answer"


def examine(model_type: str, codegen: bool = True) -> Result:
    """Return the row of an architecture.

    Args:
        codegen: False runs the certified graph as it is, operation by operation, which takes a fraction of the time;
            the axes, which are about the generated code too, are left out then.

    Returns:
        verdict: 'certified', 'refused', 'outside' (no eager forward from input_ids alone) or 'wrong' (compiled, but
            another meaning or other bits: a bug); reason: why, where it is not certified; causal: False where a refused
            one's eager logits follow later tokens. For certified ones meaning
            (relative error), axes (name -> holds), tp2 ('yes' or the refusal), operations (of the certificate), and
            with codegen served (as that function returns).
    """
    start = time.monotonic()
    with contextlib.nullcontext() if codegen else mock.patch.object(program_source, "compile_fx_inner", run_plainly):
        result = _examine(model_type, codegen)
    return result | {"seconds": round(time.monotonic() - start, 1)}


def examine_exactly(model_type: str) -> Result:
    """Return an architecture's result in exact16; the certified graph runs operation by operation.

    Returns:
        meaning: the relative error against eager float32. Or reason: why it is rejected, or what failed.
    """
    ids = two_rows()
    with torch.no_grad():
        expected = tiny_model(model_type, "eager")(input_ids=ids, use_cache=False).logits
    numerics = Numerics(arithmetic="exact16")
    try:
        with mock.patch.object(program_source, "compile_fx_inner", run_plainly):
            compiled = detcompile.compile(tiny_model(model_type), numerics=numerics, max_context=MAX_CONTEXT)
        return {"meaning": relative_error(compiled(ids).logits, expected)}
    except DetcompileError as error:
        return {"reason": refusal_of(error)}
    except Exception as error:
        return {"reason": f"unexpected: {one_line(error)}"}


def examine_on_gpu(model_type: str) -> Result:
    """Return the row of an architecture on this machine's GPU: its meaning in float32, its axes in bfloat16.

    Returns:
        verdict: 'certified', 'refused' or 'wrong'; reason, meaning (against eager float32 on the CPU) and axes as in
            `examine`.
    """
    start = time.monotonic()
    try:
        result = _examine_on_gpu(model_type)
    except DetcompileError as error:
        result = {"verdict": "refused", "reason": refusal_of(error)}
    except Exception as error:
        result = {"verdict": "wrong", "reason": f"unexpected: {one_line(error)}"}
    return result | {"seconds": round(time.monotonic() - start, 1)}


def _examine_on_gpu(model_type: str) -> Result:
    ids = two_rows()
    with torch.no_grad():
        expected = tiny_model(model_type, "eager")(input_ids=ids, use_cache=False).logits
    single, half = (
        detcompile.compile(tiny_model(model_type).to("cuda", dtype), numerics=NUMERICS, max_context=MAX_CONTEXT)
        for dtype in (torch.float32, torch.bfloat16)
    )
    meaning = relative_error(single(ids.cuda()).logits.cpu(), expected)
    axes = {axis: measure(half, plan).holds for axis, plan in _plans(GPU_AXES)}
    return {"meaning": meaning, "axes": axes} | _verdict(meaning, axes)


def two_rows() -> Tensor:
    """Return the ids [2, LENGTH] that every architecture is run on."""
    return torch.randint(3, VOCAB_SIZE, (2, LENGTH), generator=torch.Generator().manual_seed(5))


def _examine(model_type: str, codegen: bool) -> Result:
    if model_type in OUTSIDE:
        return {"verdict": "outside", "reason": OUTSIDE[model_type]}
    ids = two_rows()
    try:
        plain = tiny_model(model_type, "eager")
        with torch.no_grad():
            expected = plain(input_ids=ids, use_cache=False).logits
    except Exception as error:  # whatever a model of the list raises is its reason
        return {"verdict": "outside", "reason": one_line(error)}
    if expected.shape != (2, LENGTH, expected.shape[-1]) or not bool(expected.isfinite().all()):
        return {"verdict": "outside", "reason": f"eager logits {tuple(expected.shape)}, not all finite"}
    causal = {} if _is_causal(plain, ids, expected) else {"causal": False}
    try:
        compiled = detcompile.compile(tiny_model(model_type), numerics=NUMERICS, max_context=MAX_CONTEXT)
    except DetcompileError as error:
        return {"verdict": "refused", "kind": type(error).__name__, "reason": refusal_of(error)} | causal
    except Exception as error:  # not one of ours: a refusal without a name, which the page says
        return {
            "verdict": "refused",
            "kind": type(error).__name__,
            "reason": f"unexpected: {one_line(error)}",
        } | causal
    return _measure(model_type, compiled, ids, expected, AXES_MEASURED if codegen else ())


def _is_causal(plain: Any, ids: Tensor, expected: Tensor) -> bool:
    """Return whether a token's logits are independent of later tokens."""
    half, other = LENGTH // 2, ids.clone()
    other[:, half:] = (ids[:, half:] + 1) % VOCAB_SIZE
    with torch.no_grad():
        logits = plain(input_ids=other, use_cache=False).logits
    return relative_error(logits[:, :half], expected[:, :half]) < MEANING_LIMIT


def _measure(model_type: str, compiled: CompiledModel, ids: Tensor, expected: Tensor, axes: tuple[str, ...]) -> Result:
    result: Result = {"operations": compiled.certificate.counts}
    try:
        result["meaning"] = relative_error(compiled(ids).logits, expected)
        result["axes"] = {axis: measure(compiled, plan).holds for axis, plan in _plans(axes)}
    except Exception as error:
        return result | {"verdict": "wrong", "reason": f"compiled, then failed: {one_line(error)}"}
    result |= _verdict(result["meaning"], result["axes"])
    if result["verdict"] == "certified":
        result |= {"tp2": _two_ranks(model_type)} | ({"served": served(model_type)} if axes else {})
    return result


def _verdict(meaning: float, axes: dict[str, bool]) -> Result:
    if not meaning < MEANING_LIMIT:
        return {"verdict": "wrong", "reason": f"differs from eager by {meaning:.1e}"}
    failed = [axis for axis, holds in axes.items() if not holds]
    if failed:
        return {"verdict": "wrong", "reason": f"other bits along {', '.join(failed)}"}
    return {"verdict": "certified", "reason": ""}


def _plans(axes: tuple[str, ...]) -> Iterator[tuple[str, list[Configuration]]]:
    rng = random.Random(0)
    prompts: list[Tokens] = [tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(n)) for n in (140, 66, 17, 90, 5)]
    for axis in axes:
        assert axis in AXES
        yield axis, configurations(axis, prompts, CONFIGURATIONS, random.Random(axis))


def _two_ranks(model_type: str) -> str:
    """Return 'yes' if both ranks' shares of the model can be made, otherwise why not."""
    for rank in range(2):
        model = tiny_model(model_type)
        try:
            give_positions(model)
            freeze_rope(model, MAX_CONTEXT)
            pin_experts(model)
            if replace_experts(model):
                return "experts that take no implementation from outside, over several ranks"
            if pin_recurrences(model) is not None:
                return "layers with a state over several ranks"
            attention, _ = probe_attention(model, NUMERICS.kv_chunk)
            shard(model, attention, NUMERICS, TensorParallel(size=2, rank=rank, group="never asked"))
        except DetcompileError as error:
            return refusal_of(error)
        except Exception as error:
            return f"unexpected: {one_line(error)}"
    return "yes"


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference divided by that of ``expected``; NaN if a value is not finite."""
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm())


def refusal_of(error: Exception) -> str:
    """Return the offending operation, or the first sentence of the refusal."""
    offenders = getattr(error, "offenders", ())
    if offenders:
        more = f" (and {len(offenders) - 1} more)" if len(offenders) > 1 else ""
        return f"{offenders[0]}{more}"
    return one_line(error)


def one_line(error: Exception) -> str:
    """Return the first line of an error, after its class if it is not one of ours."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__ + ': ' if not isinstance(error, DetcompileError) else ''}{lines[0] if lines else ''}"
