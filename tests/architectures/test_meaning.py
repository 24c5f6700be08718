"""Compiled logits mean what Hugging Face's mean: beyond every window and chunk, and are no less accurate."""

import copy
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import detcompile
from detcompile.errors import UnsupportedModel
from detcompile.models.compiled import CompiledModel
from tests.exhaustive import EXHAUSTIVE_BY_CASE, exhaustive_unless
from tests.model_cases import ARCHITECTURES, CANONICAL, VOCAB_SIZE, certified, compiled, random_model

# 577 tokens: past blocks of 64 keys, a chunk of 512, and the windows of 70 tokens in tests/model_cases.py.
LENGTH = 577
# Of the norm of the logits, against Hugging Face's model in float64.
SLACK = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm())


def hugging_face(name: str, dtype: torch.dtype, device: str, **changes: object) -> PreTrainedModel:
    """The plain model: eager where scaled_dot_product_attention would leave out a soft cap without a word."""
    model = random_model(name, dtype, device, **changes)
    if getattr(model.config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")
    return model


def exact_logits(plain: PreTrainedModel, ids: Tensor) -> Tensor:
    """The logits in float64, softmaxes too, which Hugging Face's eager attention takes in float32 whatever comes."""

    def softmax(values: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.softmax(values, dim)

    with torch.no_grad(), mock.patch.object(torch.nn.functional, "softmax", softmax):
        return copy.deepcopy(plain).double()(ids, use_cache=False).logits


def tokens() -> Tensor:
    return torch.randint(0, VOCAB_SIZE, (2, LENGTH), generator=torch.Generator().manual_seed(5))


CASES: list[tuple[str, torch.dtype]] = [(name, torch.float32) for name in ARCHITECTURES]
# The axes run in it. A few, as compiling takes the time: plain, caps and windows, joined linears, LayerNorms and
# neighboring features rotated, attention beside the MLP.
CASES += [(name, torch.bfloat16) for name in ("llama", "gemma2", "phi3", "cohere", "falcon")]
CASES += [("gpt2", torch.float16)]
# Graphs that are also run without Inductor.
GRAPHS = ("gptj", "gpt_neox", "opt", "bloom", "granite_swa", "olmo2")
PARAMETERS = [
    pytest.param(
        name,
        dtype,
        marks=() if (name, dtype) in CANONICAL else EXHAUSTIVE_BY_CASE,
        id=f"{name}-{str(dtype).removeprefix('torch.')}",
    )
    for name, dtype in CASES
]


def model_under_test(name: str, dtype: torch.dtype, device: str) -> CompiledModel:
    """Compiled; on CPUs the certified graph alone where the tests of the axes compile another dtype, for time."""
    if device == "cpu" and (dtype is torch.float16 or (dtype is torch.float32 and (name, torch.bfloat16) in CASES)):
        return certified(random_model(name, dtype), max_context=1024)
    return compiled(name, dtype, device)


@pytest.mark.parametrize(("name", "dtype"), PARAMETERS)
def test_logits_are_those_of_hugging_face(name: str, dtype: torch.dtype, device: str) -> None:
    assert_as_accurate(model_under_test(name, dtype, device), name, dtype, device)


@pytest.mark.parametrize("name", exhaustive_unless(lambda name: name in ("gptj", "bloom"), GRAPHS))
def test_logits_of_the_graph_are_those_of_hugging_face(name: str) -> None:
    model = certified(random_model(name, torch.float32), max_context=1024)
    assert_as_accurate(model, name, torch.float32, "cpu")


def assert_as_accurate(model: CompiledModel, name: str, dtype: torch.dtype, device: str) -> None:
    """The model's logits are as near to float64's as those of plain torch."""
    ids = tokens().to(device)
    plain = hugging_face(name, dtype, device)
    reference = exact_logits(plain, ids)
    with torch.no_grad():
        expected = plain(ids, use_cache=False).logits
    actual = model(ids).logits
    ours, theirs = relative_error(actual, reference), relative_error(expected, reference)
    assert ours < SLACK[dtype]
    assert ours <= 1.05 * theirs, f"{name}: error against float64 {ours:.3e}, plain torch's {theirs:.3e}"


# What the certified architectures may also be told: flags that take another way through the model or our adapters.
USUAL_VARIANTS = ("bloom with heads that are no power of two", "falcon with one key head")
VARIANTS = {
    "bloom with heads that are no power of two": ("bloom", {"n_head": 5}),
    "bloom with residuals after the norm": ("bloom", {"apply_residual_connection_post_layernorm": True}),
    "falcon with one key head": ("falcon", {"new_decoder_architecture": False, "multi_query": True}),
    "falcon with as many key heads": (
        "falcon",
        {"new_decoder_architecture": False, "multi_query": False, "num_kv_heads": 4},
    ),
    "falcon, attention before the MLP": (
        "falcon",
        {"new_decoder_architecture": False, "multi_query": True, "parallel_attn": False, "bias": True},
    ),
    "falcon with one norm": ("falcon", {"num_ln_in_parallel_attn": 1}),
    "gptj turned whole": ("gptj", {"rotary_dim": 20}),
    "gemma2 without a cap": ("gemma2", {"attn_logit_softcapping": None}),
    "olmo2 with wide heads": ("olmo2", {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 160}),
    "opt with norms after": ("opt", {"do_layer_norm_before": False}),
}


@pytest.mark.parametrize("variant", exhaustive_unless(lambda variant: variant in USUAL_VARIANTS, VARIANTS))
def test_variants_mean_the_same(variant: str) -> None:
    name, changes = VARIANTS[variant]
    changes = {"n_layer" if name in ("bloom", "gptj") else "num_hidden_layers": 1, **changes}
    ids = tokens()
    with torch.no_grad():
        expected = hugging_face(name, torch.float32, "cpu", **changes)(ids, use_cache=False).logits
    model = certified(random_model(name, torch.float32, **changes), max_context=1024)
    assert relative_error(model(ids).logits, expected) < SLACK[torch.float32]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("falcon", {"alibi": True}, "alibi=True"),
        ("bloom", {"slow_but_exact": True, "pretraining_tp": 2}, "slow_but_exact"),
    ],
)
def test_configurations_that_no_adapter_does_are_refused(name: str, changes: dict, message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        detcompile.compile(random_model(name, torch.float32, **changes), max_context=1024)


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_left_padding_moves_nothing(name: str, device: str) -> None:
    model = compiled(name, torch.float32, device)
    ids = tokens()[:, :70].to(device)
    mask = torch.ones_like(ids)
    mask[0, :13] = 0
    padded = model(ids, mask).logits
    assert torch.equal(padded[0, 13:], model(ids[:1, 13:]).logits[0])
    assert not padded[0, :13].any()


def test_the_loss_is_cross_entropy(device: str) -> None:
    model = compiled("qwen3", torch.float32, device)
    ids = tokens()[:, :40].to(device)
    labels = ids.clone()
    labels[0, :7] = -100
    out = model(ids, labels=labels)
    expected = random_model("qwen3", torch.float32, device)(ids, labels=labels).loss
    assert relative_error(out.loss, expected) < 1e-5


@pytest.mark.parametrize("kept", [1, 5, [0, 39], [3]])
def test_logits_to_keep_are_columns_of_all_logits(kept: int | list[int], device: str) -> None:
    model = compiled("gpt2", torch.float32, device)
    ids = tokens()[:, :40].to(device)
    everything = model(ids).logits
    columns = slice(-kept, None) if isinstance(kept, int) else kept
    some = model(ids, logits_to_keep=kept if isinstance(kept, int) else torch.tensor(kept)).logits
    assert torch.equal(some, everything[:, columns])


def test_position_ids_are_the_callers(device: str) -> None:
    ids = tokens()[:, :30].to(device)
    positions = torch.arange(7, 37, device=device)[None].repeat(2, 1)
    plain = random_model("qwen3", torch.float32, device)
    with torch.no_grad():
        expected = plain(ids, position_ids=positions, use_cache=False).logits
    assert relative_error(compiled("qwen3", torch.float32, device)(ids, position_ids=positions).logits, expected) < 1e-5


def test_an_architecture_that_no_code_names_compiles() -> None:
    """cohere: nothing in the package spells it, so every other architecture of its kind has the same chance."""
    package = detcompile.__path__[0]
    sources = [p.read_text() for p in __import__("pathlib").Path(package).rglob("*.py")]
    assert not any("cohere" in source for source in sources)
    assert compiled("cohere", torch.bfloat16).certificate.counts["attention"] == 2


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_that_looks_at_the_batch_is_frozen(kind: str) -> None:
    """With a frozen table a short row's bits do not move when a row past the threshold joins the batch."""
    half = ARCHITECTURES["llama"]["head_dim"] // 2
    scaling = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "longrope":
        scaling |= {
            "short_factor": [1.0] * half,
            "long_factor": [2.0] * half,
            "original_max_position_embeddings": 64,
        }
    model = random_model("llama", torch.float32, rope_parameters=scaling, max_position_embeddings=64)
    frozen = certified(model, max_context=256)
    ids = tokens()
    short = frozen(ids[:1, :20]).logits
    both = torch.zeros(2, 200, dtype=torch.int64)
    both[0, :20], both[1] = ids[0, :20], ids[1, :200]
    mask = torch.ones_like(both)
    mask[0, 20:] = 0
    assert torch.equal(frozen(both, mask).logits[0, :20], short[0])
    plain = random_model("llama", torch.float32, rope_parameters=scaling, max_position_embeddings=64)
    with torch.no_grad():
        expected = plain(ids[:1, :256], use_cache=False).logits  # as long as the frozen table
    assert relative_error(frozen(ids[:1, :256]).logits, expected) < 1e-5
