"""How checkpoints lay out quantized linears, read into the one layout of templates/quantized/weights.py.

Sizes of groups and blocks are read from the checkpoint's config, and shapes that contradict it are refused.

Legend: N output features, K input features, G groups of K, per = 32 / bits numbers in an int32 word. A reader takes the
tensors of one linear by their names in the checkpoint. It returns the weight, and the order of K by group if groups do
not hold successive k.

| method | layout | source |
|---|---|---|
| fp8 | weight e4m3 [N, K], weight_scale_inv by blocks or one | transformers, FineGrainedFP8Config |
| gptq | qweight [K / per, N], qzeros [G, N / per], scales [G, N], g_idx [K] | GPTQModel; "gptq" keeps z - 1 |
| awq | qweight [K, N / 8], qzeros [G, N / 8], scales [G, N], nibbles in the order of `AWQ_NIBBLES` | AutoAWQ, "gemm" |
| compressed-tensors | weight_packed [N, K / per] of q + 2^(bits - 1), or weight [N, K]; weight_scale [N, G] | its own |
| mxfp4 | of E experts: blocks [E, N, G, 16] of nibbles, the low one first, scales [E, N, G] | OCP MX 1.0, gpt-oss |
| gguf | qweight, scales, mins as in templates/quantized/weights.py, group [1] | models/gguf/packing.py |
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from detcompile.errors import UnsupportedModel
from detcompile.templates.quantized.weights import QuantizedWeight, pack_nibbles

OTHERWISE = "load an unquantized checkpoint, or quantize it in another way"
FP8_BLOCK = (128, 128)  # default of transformers' FineGrainedFP8Config
MODULE_CLASS = "module class"  # key of the config that a reader takes, of modules other than linears
FORMAT_KEYS = ("checkpoint_format", "format")  # in transformers' order of precedence
AWQ_NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that a word holds in its i-th nibble
E2M1 = [sign * value for sign in (1.0, -1.0) for value in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]
Tensors = Mapping[str, Tensor]
Read = tuple[QuantizedWeight, Tensor | None]


class Layout(NamedTuple):
    """One quantization method: the tensors that mark a quantized linear, and how its config and tensors are read.

    ``read(name, tensors, config)``; ``check(config)`` raises UnsupportedModel for a variant that is not read.
    """

    marks: tuple[str, ...]
    check: Callable[[Mapping[str, Any]], None]
    read: Callable[[str, Tensors, Mapping[str, Any]], Read]


def unpack_words(words: Tensor, bits: int, dim: int) -> Tensor:
    """int32 words of 32 / bits unsigned numbers each, lowest bits first, along ``dim`` -> uint8, that dim longer."""
    shifts = torch.arange(0, 32, bits, device=words.device)
    numbers = words.unsqueeze(dim + 1) >> shifts.view(*(1,) * (dim + 1), -1, *(1,) * (words.dim() - dim - 1))
    return (numbers & (1 << bits) - 1).to(torch.uint8).flatten(dim, dim + 1)


def _unpacked(name: str, tensors: Tensors, leaf: str, bits: int, dim: int) -> Tensor:
    """Return `unpack_words` of a linear's tensor.

    Raises:
        UnsupportedModel: its words are not of 32 bits.
    """
    words = tensors[leaf]
    if words.dtype is not torch.int32 or words.dim() != 2:
        raise UnsupportedModel(f"{name}.{leaf} is {words.dtype}, but must be a matrix of int32 words: {OTHERWISE}")
    return unpack_words(words, bits, dim)


def float8_weight(name: str, weight: Tensor, scales: Tensor, block: tuple[int, int] | None) -> QuantizedWeight:
    """Convert a float8 linear to our layout.

    Args:
        name: path of the linear, for messages.
        weight: e4m3 [N, K].
        scales: one for the matrix, [N] or [N, 1] one per feature, or [ceil(N / rows), ceil(K / columns)].
        block: (rows, columns) that share a scale, as the config states it; None if it states none.

    Raises:
        UnsupportedModel: another float8, or scales of another shape.
    """
    if weight.dtype is not torch.float8_e4m3fn:
        raise UnsupportedModel(f"{name}.weight is {weight.dtype}, but must be float8_e4m3fn: " + OTHERWISE)
    if scales.dtype is torch.uint8:
        raise UnsupportedModel(f"{name}: scales of eight exponent bits (mxfp8) are not read: " + OTHERWISE)
    n, k = weight.shape
    scales = scales.reshape(1, 1) if scales.numel() == 1 else scales
    scales = scales[:, None] if scales.dim() == 1 else scales
    rows, group = block or ((n, k) if scales.shape == (1, 1) else (1, k))
    if scales.shape != (-(-n // rows), -(-k // group)):
        raise UnsupportedModel(
            f"{name}: scales {tuple(scales.shape)} do not fit a weight of {n} x {k} in blocks of {rows} x {group}, as"
            " its config has them: fetch the checkpoint again, or " + OTHERWISE
        )
    exact = scales if scales.dtype in (torch.float16, torch.bfloat16) else scales.float()
    return QuantizedWeight(weight, exact.t().contiguous(), None, None, k, min(group, k), min(rows, n))


def block_of(size: Any) -> tuple[int, int] | None:
    """Return a config's (rows, columns) of a block; None if scales are per matrix or per feature.

    Raises:
        UnsupportedModel: it is not a pair of positive integers.
    """
    if size is None:
        return None
    pair = tuple(size) if isinstance(size, (list, tuple)) else ()
    if len(pair) != 2 or not all(type(extent) is int and extent > 0 for extent in pair):
        raise UnsupportedModel(f"a block of weights must be [rows, columns], got {size!r}: {OTHERWISE}")
    return pair


def _read_fp8(name: str, tensors: Tensors, config: Mapping[str, Any]) -> Read:
    block = block_of(config.get("weight_block_size", FP8_BLOCK))
    return float8_weight(name, tensors["weight"], tensors["weight_scale_inv"], block), None


def _check_fp8(config: Mapping[str, Any]) -> None:
    _require(config, "fp8", "fmt", (None, "e4m3", "float8_e4m3fn"))
    block_of(config.get("weight_block_size"))


def _check_gptq(config: Mapping[str, Any]) -> None:
    _require(config, "gptq", "bits", (4, 8))
    for key in FORMAT_KEYS:
        _require(config, "gptq", key, (None, "gptq", "gptq_v2"))


def _is_gptq_v2(config: Mapping[str, Any]) -> bool:
    written = (config[key].lower() for key in FORMAT_KEYS if config.get(key) is not None)
    return next(written, "gptq") == "gptq_v2"


def _of_module(name: str, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of one linear: the first pattern of GPTQModel's `dynamic` that matches overrides others.

    Raises:
        UnsupportedModel: a pattern says that it is not quantized, or overrides bits with a number that is not read.
    """
    for pattern, overrides in (config.get("dynamic") or {}).items():
        excludes = pattern.startswith("-:")
        if not re.match(pattern.removeprefix("-:").removeprefix("+:"), name):
            continue
        if excludes:
            raise UnsupportedModel(f"{name} is quantized, and `dynamic` of its config excludes it: {OTHERWISE}")
        settings = {**config, **overrides}
        _require(settings, f"gptq, `dynamic` {pattern!r}", "bits", (4, 8))
        return settings
    return config


def _groups(name: str, k: int, count: int, group: Any) -> int:
    """Return the number of k that share a scale.

    Args:
        count: groups of the scales. group: as the config states it; -1 or None if one group has all of K.

    Raises:
        UnsupportedModel: they contradict each other.
    """
    size = k if group in (-1, None) else group
    if type(size) is not int or size < 1 or -(-k // size) != count:
        raise UnsupportedModel(
            f"{name}: {count} groups of scales do not fit K={k} in groups of {size}, which its config states: fetch the"
            " checkpoint again, or " + OTHERWISE
        )
    return size


def _read_gptq(name: str, tensors: Tensors, config: Mapping[str, Any]) -> Read:
    config = _of_module(name, config)
    bits = config["bits"]
    q = _unpacked(name, tensors, "qweight", bits, 0).t()
    zeros = _unpacked(name, tensors, "qzeros", bits, 1).to(torch.int16)
    if not _is_gptq_v2(config):
        zeros = zeros + 1
    k = q.shape[1]
    group = _groups(name, k, len(zeros), config.get("group_size"))
    in_turn = torch.arange(k, device=q.device) // group
    of_k = tensors.get("g_idx", in_turn)
    if not config.get("desc_act") and not of_k.any():  # some tools leave g_idx unset if groups are in order
        of_k = in_turn
    order = None
    if not torch.equal(of_k.long(), in_turn):
        order = of_k.argsort(stable=True)
        if not torch.equal(of_k[order].long(), in_turn):
            raise UnsupportedModel(f"{name}.g_idx: groups that are not of {group} k each are not read: " + OTHERWISE)
        q = q[:, order]
    return _integers(q, tensors["scales"], zeros[:, : len(q)], bits, group), order


def _check_awq(config: Mapping[str, Any]) -> None:
    _require(config, "awq", "bits", (4,), "w_bit")
    for key in ("version", *FORMAT_KEYS):
        _require(config, "awq", key, (None, "gemm"))
    if config.get("backend") == "llm-awq":
        raise UnsupportedModel(
            f"awq with backend='llm-awq', which packs words in another way, is not read: {OTHERWISE}"
        )
    _require(config, "awq", "zero_point", (None, True))


def _read_awq(name: str, tensors: Tensors, config: Mapping[str, Any]) -> Read:
    places = torch.tensor(AWQ_NIBBLES, device="cpu").argsort()

    def columns(leaf: str) -> Tensor:
        numbers = _unpacked(name, tensors, leaf, 4, 1)
        return numbers.unflatten(1, (-1, 8))[:, :, places.to(numbers.device)].flatten(1)

    q, zeros = columns("qweight").t(), columns("qzeros").to(torch.int16)
    group = _groups(name, q.shape[1], len(zeros), config.get("group_size", config.get("q_group_size")))
    return _integers(q, tensors["scales"], zeros, 4, group), None


def _check_compressed(config: Mapping[str, Any]) -> None:
    _require(config, "compressed-tensors", "format", ("pack-quantized", "int-quantized", "float-quantized"))
    if config.get("kv_cache_scheme") is not None:
        raise UnsupportedModel(
            "compressed-tensors: kv_cache_scheme quantizes keys and values, which is not read: remove it from the"
            " config.json, so that they keep the model's dtype, or load an unquantized checkpoint"
        )
    sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise UnsupportedModel(f"compressed-tensors: sparsity_config has format {sparsity!r}, not read: {OTHERWISE}")
    if (config.get("transform_config") or {}).get("config_groups"):
        raise UnsupportedModel(
            f"compressed-tensors: transform_config multiplies activations by further matrices, not read: {OTHERWISE}"
        )
    for name, group in (config.get("config_groups") or {"config_groups": {}}).items():
        if not isinstance(group, Mapping):
            raise UnsupportedModel(
                f"compressed-tensors: {name} of config_groups is a preset, which is not read: write its weights' type,"
                " num_bits and group_size into config.json, or load an unquantized checkpoint"
            )
        weights = group.get("weights") or {}
        kind = weights.get("type"), weights.get("num_bits")
        if kind not in (("int", 4), ("int", 8), ("float", 8)) or group.get("format") not in (None, config["format"]):
            held = f"{kind[0]}{kind[1]}" if weights else "no weights"
            raise UnsupportedModel(
                f"compressed-tensors: {name} holds {held}, which is not read (known: int4, int8, float8): load an "
                "unquantized checkpoint, or quantize it again as one of these"
            )


def _read_compressed(name: str, tensors: Tensors, config: Mapping[str, Any]) -> Read:
    if "weight_g_idx" in tensors:
        raise UnsupportedModel(f"{name}: compressed-tensors with an order of activations is not read: " + OTHERWISE)
    scheme = _scheme(name, config)
    weight, zeros = tensors.get("weight"), tensors.get("weight_zero_point")
    if config["format"] == "float-quantized":
        if zeros is not None and bool(zeros.float().any()):
            raise UnsupportedModel(f"{name}: float8 with zero points is not read: {OTHERWISE}")
        block = block_of(scheme.get("block_structure"))
        return float8_weight(name, tensors["weight"], tensors["weight_scale"], block), None
    if weight is None:
        bits = scheme["num_bits"]
        q = _unpacked(name, tensors, "weight_packed", bits, 1)[:, : int(tensors["weight_shape"][1])]
    elif weight.dtype is torch.int8:
        q, bits = weight.to(torch.int16) + 128, 8
    else:
        raise UnsupportedModel(f"{name}.weight is {weight.dtype}, not compressed to int8: {OTHERWISE}")
    if zeros is not None and zeros.dtype is torch.int32:
        zeros = _unpacked(name, tensors, "weight_zero_point", bits, 0)[: len(q)].to(torch.int16)
    elif zeros is not None:  # signed, one in a byte
        zeros = zeros.to(torch.int16) + (1 << bits - 1)
    scales_GN = _by_rows(name, tensors["weight_scale"], len(q)).t()
    zeros_GN = None if zeros is None else _by_rows(name, zeros, len(q)).t()
    group = _groups(name, q.shape[1], len(scales_GN), scheme.get("group_size"))
    return _integers(q, scales_GN, zeros_GN, bits, group), None


def _read_mxfp4(name: str, tensors: Tensors, config: Mapping[str, Any]) -> Read:
    raise UnsupportedModel(f"{name}: mxfp4 is supported for experts only: {OTHERWISE}")


def mxfp4_values(name: str, blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the float32 values [E, K, N] of MXFP4 blocks [E, N, G, 16] and scales [E, N, G], both uint8.

    A value is E2M1 times a power of two, E8M0 with bias 127 (OCP Microscaling Formats 1.0, sections 5.3 and 5.4).

    Raises:
        UnsupportedModel: other shapes or dtypes, or a scale of NaN.
    """
    _require_mxfp4(name, blocks, scales)
    values = torch.tensor(E2M1, device=blocks.device)[_codes(blocks)]
    factors = _power_of_two(scales.int() - 127)
    return (values * factors.repeat_interleave(32, 2)).transpose(1, 2)


def mxfp4_weight(name: str, blocks: Tensor, scales: Tensor) -> QuantizedWeight:
    """Return MXFP4 experts as one weight [E * N, K] of eight bits: twice E2M1, and half the power of two as bfloat16.

    Raises:
        UnsupportedModel: as `mxfp4_values`.
    """
    _require_mxfp4(name, blocks, scales)
    doubled = (2 * torch.tensor(E2M1, device=blocks.device)).to(torch.int8)
    factors = _power_of_two(scales.int() - 128).to(torch.bfloat16)
    w = doubled[_codes(blocks)].flatten(0, 1)
    return QuantizedWeight(w, factors.flatten(0, 1).t().contiguous(), None, None, w.shape[1], 32, 1)


def _power_of_two(exponents: Tensor) -> Tensor:
    """Return 2^e in float32, e from -149 to 127, built from its bits: a library function may round it."""
    normal = exponents + 127 << 23
    return torch.where(exponents < -126, 1 << (exponents + 149).clamp(0, 23), normal).view(torch.float32)


def _codes(blocks: Tensor) -> Tensor:
    """Blocks [E, N, G, 16] of nibbles -> int32 [E, N, 32 G]."""
    return torch.stack([blocks & 15, blocks >> 4], -1).flatten(2).int()


def _require_mxfp4(name: str, blocks: Tensor, scales: Tensor) -> None:
    sizes = f"blocks {tuple(blocks.shape)} {blocks.dtype} and scales {tuple(scales.shape)} {scales.dtype}"
    is_bytes = blocks.dtype is torch.uint8 and scales.dtype is torch.uint8
    if not is_bytes or blocks.dim() != 4 or blocks.shape[3] != 16 or scales.shape != blocks.shape[:3]:
        raise UnsupportedModel(f"{name}: {sizes} are not mxfp4 blocks of 32 values: {OTHERWISE}")
    if bool((scales == 255).any()):
        raise UnsupportedModel(f"{name}: a scale of its blocks is NaN: fetch the checkpoint again, or {OTHERWISE}")


def _read_gguf(name: str, tensors: Tensors, config: Mapping[str, Any]) -> Read:
    scales, group = tensors["scales"], int(tensors["group"])
    return QuantizedWeight(tensors["qweight"], scales, None, tensors.get("mins"), group * len(scales), group, 1), None


def _by_rows(name: str, values: Tensor, n: int) -> Tensor:
    """Return scales or zeros as [N, G], expanded if they have one value per feature or one in all."""
    rows = values.reshape(-1, 1) if values.dim() < 2 else values
    if len(rows) not in (1, n):
        raise UnsupportedModel(
            f"{name}: scales or zeros {tuple(values.shape)} do not have one row for each of {n} features: {OTHERWISE}"
        )
    return rows.expand(n, -1)


def _scheme(name: str, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config's scheme for a module's weights: of the group that names it or its class.

    Raises:
        UnsupportedModel: no group does.
    """
    groups = [(group.get("targets") or (), group["weights"]) for group in config["config_groups"].values()]
    for targets, weights in groups:
        if any(target == name or (target[:3] == "re:" and re.match(target[3:], name)) for target in targets):
            return weights
    for targets, weights in groups:
        if config.get(MODULE_CLASS, "Linear") in targets:
            return weights
    raise UnsupportedModel(f"{name} is quantized, and no group of the config's config_groups names it: {OTHERWISE}")


def _integers(q: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, group: int) -> QuantizedWeight:
    """q [N, K] and zeros [G, N], unsigned -> our layout. Zeros are left out if all are the middle value."""
    middle = 1 << bits - 1
    if zeros is not None and bool((zeros == middle).all()):
        zeros = None
    if bits == 4:
        kept = zeros
        packed = pack_nibbles(q)
    else:
        kept = None if zeros is None else zeros - middle
        packed = (q.to(torch.int16) - middle).to(torch.int8).contiguous()
    kept = None if kept is None else kept.contiguous()
    return QuantizedWeight(packed, scales.contiguous(), kept, None, q.shape[1], group, 1)


def _require(
    config: Mapping[str, Any], method: str, key: str, known: tuple[Any, ...], other_name: str | None = None
) -> None:
    value = config.get(key, config.get(other_name) if other_name else None)
    value = value.lower() if isinstance(value, str) else value
    if value not in known:
        listed = ", ".join(str(item) for item in known if item is not None)
        raise UnsupportedModel(
            f"{method} with {key}={value!r} is not read (known: {listed}): load an unquantized checkpoint, or quantize "
            "it again as one of these"
        )


LAYOUTS: Mapping[str, Layout] = {
    "fp8": Layout(("weight_scale_inv",), _check_fp8, _read_fp8),
    "gptq": Layout(("qweight",), _check_gptq, _read_gptq),
    "awq": Layout(("qweight",), _check_awq, _read_awq),
    "compressed-tensors": Layout(("weight_packed", "weight_scale"), _check_compressed, _read_compressed),
    "mxfp4": Layout(("blocks",), lambda config: None, _read_mxfp4),
    "gguf": Layout(("qweight",), lambda config: None, _read_gguf),
}
