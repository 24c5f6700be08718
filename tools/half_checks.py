"""Compile the architectures certified in float32 in a 16-bit dtype: `python -m tools.half_checks bfloat16`.

Certified graphs are run as they are, operation by operation. A line is printed for each architecture, with its error
and that of eager in the same dtype, then the counts. Names after the dtype restrict the run to these.
"""

import contextlib
import json
import sys
import tempfile
from collections import Counter
from unittest import mock

import torch
from torch import Tensor
from transformers import PreTrainedModel

import detcompile
from detcompile.errors import DetcompileError
from detcompile.passes import program_source
from detcompile.passes.programs.aot import run_plainly
from tools.generate_models import RESULTS
from tools.model_checks import NUMERICS, Result, one_line, refusal_of, two_rows
from tools.model_configs import MAX_CONTEXT, tiny_model

__all__ = ["ERROR_LIMIT", "examine_half", "loaded"]

ERROR_LIMIT = 1.5  # of the error that eager has in the same dtype


def examine_half(model_type: str, dtype: torch.dtype) -> Result:
    """Examine an architecture in a 16-bit dtype.

    Returns:
        verdict: 'certified', 'refused' or 'wrong' (an infinity, other bits alone than beside another row, or an error
            beyond ERROR_LIMIT times eager's); reason: why, where it is not certified; error: the median over tokens of
            how far the logits are from eager float32's, as a part of their norm; eager: the same of eager in ``dtype``.
            A median, since where a router's experts are almost equal either dtype may choose others for a token.
    """
    ids = two_rows()
    with torch.no_grad():
        expected = tiny_model(model_type, "eager")(input_ids=ids, use_cache=False).logits
        result: Result = {}
        with contextlib.suppress(RuntimeError):  # models that multiply by weights of another dtype
            eager = loaded(model_type, dtype, "eager")(input_ids=ids, use_cache=False).logits
            result["eager"] = median_error(eager, expected)
    try:
        with mock.patch.object(program_source, "compile_fx_inner", run_plainly):
            model = detcompile.compile(loaded(model_type, dtype), numerics=NUMERICS, max_context=MAX_CONTEXT)
            both, *alone = (model(rows).logits for rows in (ids, *ids.split(1)))
    except DetcompileError as error:
        return result | {"verdict": "refused", "reason": refusal_of(error)}
    except Exception as error:
        return result | {"verdict": "wrong", "reason": f"unexpected: {one_line(error)}"}
    result["error"] = median_error(both, expected)
    reason = ""
    if not bool(both.isfinite().all()):
        reason = "logits are not finite"
    elif not torch.equal(both, torch.cat(alone)):
        reason = "other bits beside another row"
    elif result["error"] > ERROR_LIMIT * result.get("eager", float("inf")):
        reason = f"its error is {result['error'] / result['eager']:.1f} times eager's"
    return result | {"verdict": "wrong" if reason else "certified", "reason": reason}


def loaded(model_type: str, dtype: torch.dtype, implementation: str | None = None) -> PreTrainedModel:
    """Save ``tiny_model`` and load it in ``dtype``; modules that transformers keeps in float32 stay so."""
    model = tiny_model(model_type, implementation)
    chosen = {} if implementation is None else {"attn_implementation": implementation}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        half = type(model).from_pretrained(folder, dtype=dtype, local_files_only=True, **chosen).eval()
    if implementation is not None and half._can_set_experts_implementation():
        half.set_experts_implementation(implementation)
    return half


def median_error(actual: Tensor, expected: Tensor) -> float:
    """Return the median over tokens of norm(actual - expected) / norm(expected), for logits [B, T, V]."""
    actual, expected = actual.double(), expected.double()
    return float(((actual - expected).norm(dim=-1) / expected.norm(dim=-1)).median())


def main() -> None:
    """Examine what the arguments name, one after the other."""
    dtype = getattr(torch, sys.argv[1])
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]
    names = sys.argv[2:] or [name for name, row in rows.items() if row["verdict"] == "certified"]
    verdicts: Counter[str] = Counter()
    for name in names:
        row = examine_half(name, dtype)
        verdicts[row["verdict"]] += 1
        errors = " ".join(f"{key} {row[key]:.1e}" for key in ("error", "eager") if key in row)
        print(f"{name}: {row['verdict']} {row['reason']} {errors}", flush=True)
        torch._dynamo.reset()
    print(dict(verdicts))


if __name__ == "__main__":
    main()
