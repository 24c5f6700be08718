"""The parts of a fingerprint. Equal fingerprints mean equal bits."""

import hashlib
import json
import platform
from collections.abc import Mapping
from typing import Any

import torch
import transformers
import triton

from detcompile.digests import BITS_VERSION, source_digest
from detcompile.orders.exact import DEFINITION
from detcompile.orders.numerics import Numerics
from detcompile.passes.programs.lanes import vector_isa
from detcompile.passes.proof.certificate import Certificate
from detcompile.runtime.requests.plain_values import stop_tokens
from detcompile.templates.cpu import library as cpu_library
from detcompile.templates.cpu.shared_objects import compiler_version
from detcompile.torch_internals.inductor_settings import inductor_config

VOLATILE_CONFIG = ("_name_or_path", "transformers_version", "architectures", "torch_dtype", "dtype")


def fingerprint_parts(
    config: str,
    numerics: Numerics,
    certificate: Certificate,
    program: str,
    max_context: int,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, str]:
    """Return all parts of the fingerprint by name, except weights and end tokens.

    Args:
        config: result of ``config_digest`` when the model was lowered.
        program: digest of the certified graph (passes.programs.canonical_form).
        dtype: dtype of the KV cache.
    """
    parts = {
        "program": program,
        "config": config,
        "numerics": str(numerics),
        "orders": "; ".join(certificate.orders),
        "max_context": str(max_context),
        "kv_dtype": str(dtype),
        "bits_version": BITS_VERSION,
        "source": source_digest(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "device": _device(device),
    }
    if numerics.is_exact:  # no device, release or order decides a bit; weights and program hold what the config says
        kept = {name: parts[name] for name in ("program", "max_context", "source")}
        return kept | {"numerics": numerics.arithmetic, "bits_version": DEFINITION}
    return parts


def config_digest(config: Mapping[str, object]) -> str:
    """Return the sha256, in hex, of a model's config. Take it at lowering: later changes do not change the program."""
    return hashlib.sha256(json.dumps(_fixed(config), sort_keys=True, default=str).encode()).hexdigest()


def _fixed(value: Any) -> Any:
    """Return a config without the keys that move no bit, at every depth, and with sets in order."""
    if isinstance(value, Mapping):
        return {key: _fixed(item) for key, item in value.items() if key not in VOLATILE_CONFIG}
    if isinstance(value, (list, tuple)):
        return [_fixed(item) for item in value]
    return sorted(map(str, value)) if isinstance(value, (set, frozenset)) else value


def end_tokens(module: Any) -> str:
    """Return the fingerprint part with the current end tokens, which are also masked until ``min_tokens``.

    Raises:
        InvalidInput: ``eos_token_id`` of the model's generation_config is invalid.
    """
    return str(sorted(set(stop_tokens(module))))


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        ptxas = getattr(getattr(triton, "knobs", None), "nvidia", None)
        version = getattr(getattr(ptxas, "ptxas", None), "version", "unknown")
        return f"{torch.cuda.get_device_name(device)} sm_{major}{minor} cuda {torch.version.cuda} ptxas {version}"
    vectors = f"inductor {vector_isa()} simdlen {inductor_config.cpp.simdlen}"
    return f"{platform.machine()} {cpu_library.isa()} {vectors} {compiler_version()}"
