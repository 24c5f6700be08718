"""compile() with exact integer arithmetic: golden logits in any batch, and undefined operations are rejected."""

import copy
import functools
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor import config as inductor_config
from torch._inductor import virtualized
from torch._inductor.lowering import lowerings, make_pointwise
from transformers import AutoConfig, AutoModel

import detcompile
from benchmarks.exact_accuracy import exact as in_exact_arithmetic
from benchmarks.exact_hash import EXPECTED, digest, fixed_text
from benchmarks.exact_journal import resume
from benchmarks.exact_receipts import check
from detcompile import Backend, CompiledModel, EngineConfig, Numerics, SamplingParams
from detcompile.archives.description import facts_of, read_sizes
from detcompile.commands.axes import AXES, Configuration, score
from detcompile.errors import InvalidInput, NumericsError, UncertifiedOp, UnsupportedModel
from detcompile.models.wheel_models import SMOLLM2, local_file
from detcompile.passes.modules.exact import use_exact_arithmetic
from detcompile.runtime.speculation.speculator import SpeculationConfig
from detcompile.templates.cpu.library import supported_isas
from detcompile.templates.exact.rope import frequencies_of, rope_tables
from detcompile.weights import weight_addresses
from tests.bits import assert_bitwise_equal
from tests.exact import definition as exact
from tests.exact import golden
from tests.exhaustive import EXHAUSTIVE, exhaustive_unless
from tests.invariance.axis import tokens
from tests.model_cases import LLAMA, VOCAB_SIZE, certified, random_model
from tests.quantized_checkpoints import CHECKPOINTS, write_checkpoint, write_mixture

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 100}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 50}
ROPES: dict[str, dict[str, object]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn, not truncated": YARN | {"truncate": False, "beta_fast": 8.0},
    "yarn, with scales": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
}
VARIANTS = [pytest.param(name, marks=() if name == "exact16" else EXHAUSTIVE) for name in exact.VARIANTS]


@functools.cache
def tiny(variant: str, device: str = "cpu") -> CompiledModel:
    return detcompile.compile("tiny", device=device, numerics=Numerics(arithmetic=variant))


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_fingerprint_are_golden(variant: str, device: str) -> None:
    model = tiny(variant, device)
    for length in golden.LENGTHS:
        logits = model(torch.tensor([exact.fixed_tokens(length)], device=device)).logits[0]
        assert exact.digest(logits.cpu().numpy()) == golden.kept()["logits"][variant][str(length)]
    assert model.fingerprint == golden.kept()["fingerprints"][variant], model.fingerprint_parts


@EXHAUSTIVE  # 20 CPU seconds
@pytest.mark.parametrize("variant", exact.VARIANTS)
def test_chat_model_has_recorded_logits(variant: str) -> None:
    if local_file(SMOLLM2) is None:
        pytest.skip("its weights are not here: run `detcompile fetch smollm2`")
    model = in_exact_arithmetic(variant)(detcompile.load_model("smollm2", device="cpu"))
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([fixed_text(model.config.vocab_size)]), use_cache=False).logits[0]
    assert digest(logits.numpy()) == EXPECTED["smollm2", variant][1]


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_axis_keeps_golden_digest(variant: str, axis: str, device: str) -> None:
    if axis == "cuda_graphs" and device == "cpu":
        pytest.skip("CUDA graphs need a GPU")
    model = tiny(variant, device)
    target = tuple(exact.fixed_tokens(127))
    prompts = [target, *(tokens(length, length) for length in (1, 33, 150))]
    for seed in range(2):
        configuration = AXES[axis](target, prompts, random.Random(seed))
        if configuration.rows[configuration.target] != target:  # the axis changes the target
            expected = score(model, Configuration((configuration.rows[configuration.target],)))
            assert exact.digest(score(model, configuration).cpu().numpy()) == exact.digest(expected.cpu().numpy())
        else:
            digest = exact.digest(score(model, configuration).cpu().numpy())
            assert digest == golden.kept()["logits"][variant]["127"], configuration.describe()


@EXHAUSTIVE
@pytest.mark.parametrize("variant", exact.VARIANTS)
def test_llama_equals_the_reference(variant: str, tmp_path: Path) -> None:
    source = random_model("llama", torch.bfloat16)
    source.save_pretrained(tmp_path)
    model = detcompile.compile(tmp_path, numerics=Numerics(arithmetic=variant))
    text = exact.fixed_tokens(150, source.config.vocab_size)
    expected = exact.Decoder(tmp_path, exact.VARIANTS[variant]).forward(text)[0]
    assert exact.digest(model(torch.tensor([text])).logits[0].numpy()) == exact.digest(expected)


# Norms, windows, scales, functions, joined linears; caps; experts; latent attention; ALiBi; sinks.
OTHERS = (
    "gpt2",
    "mistral",
    "granite",
    "opt",
    "olmo2",
    "phi3",
    "gemma2",
    "mixtral",
    "deepseek_v3",
    "bloom",
    "granite_swa",
)


@pytest.mark.parametrize("name", exhaustive_unless(lambda name: name == "gpt2", OTHERS))
def test_logits_are_near_eager(name: str) -> None:
    ids = torch.tensor([exact.fixed_tokens(150, VOCAB_SIZE)])
    changes = {"num_key_value_heads": 4} if name == "deepseek_v3" else {}  # latent attention has keys for every head
    with torch.no_grad():
        expected = random_model(name, torch.float32, **changes)(ids, use_cache=False).logits
    model = random_model(name, torch.float32, **changes)
    model = certified(model, numerics=Numerics(arithmetic="exact16"), max_context=256)
    error = (model(ids).logits - expected).norm() / expected.norm()
    assert error < 1e-3


REJECTED = {"lfm2": "does not define it, so its bits could differ"}


@pytest.mark.parametrize("name", REJECTED)
def test_undefined_model_is_rejected_by_name(name: str) -> None:
    with pytest.raises((UnsupportedModel, UncertifiedOp), match=REJECTED[name]):
        certified(random_model(name, torch.float32), numerics=Numerics(arithmetic="exact16"), max_context=64)


@pytest.mark.parametrize("parameters", ROPES.values(), ids=ROPES)
def test_rotary_tables_are_near_transformers(parameters: dict[str, object]) -> None:
    model = random_model("llama", torch.float32, rope_parameters={"rope_theta": 500000.0, **parameters})
    positions = torch.arange(200)[None]
    expected = model.model.rotary_emb(torch.zeros(1), positions)
    use_exact_arithmetic(model, "exact16", 200)
    for actual, table in zip(model.model.rotary_emb(torch.zeros(1), positions), expected, strict=True):
        assert torch.allclose(actual, table, rtol=0, atol=1e-4)


def test_tables_hold_probe_if_context_is_one_token() -> None:
    model = certified(random_model("llama", torch.float32), numerics=Numerics(arithmetic="exact16"), max_context=1)
    assert model(torch.tensor([[5]])).logits.isfinite().all()


def test_frequencies_rounded_by_a_cast_are_rejected() -> None:
    with pytest.raises(UnsupportedModel, match="cast to 16 bits, load it with dtype= instead"):
        use_exact_arithmetic(random_model("llama", torch.bfloat16), "exact16", 64)


def test_a_model_without_weights_is_rejected() -> None:
    for arithmetic in ("float", "exact16"):
        with pytest.raises(InvalidInput, match="LlamaForCausalLM is on the meta device, without weights"):
            detcompile.compile(
                random_model("llama", torch.float32).to("meta"), numerics=Numerics(arithmetic=arithmetic)
            )


@pytest.mark.parametrize("head_dim", [6, 516])
def test_heads_of_other_sizes_are_rejected(head_dim: int) -> None:
    model = random_model("llama", torch.float32, head_dim=head_dim)
    with pytest.raises(UnsupportedModel, match=f"no heads of {head_dim} features; it takes multiples of 4 up to 512"):
        certified(model, numerics=Numerics(arithmetic="exact16"), max_context=64)


QUANTIZED = exhaustive_unless(lambda name: name == "compressed int8", CHECKPOINTS)  # the others take 20 CPU seconds


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_checkpoint_becomes_digits(name: str, tmp_path: Path) -> None:
    ids = torch.tensor([exact.fixed_tokens(40, VOCAB_SIZE)])
    write_checkpoint(tmp_path, name)
    expected = certified(detcompile.load_model(tmp_path, device="cpu"), max_context=64)(ids).logits.float()
    model = certified(detcompile.load_model(tmp_path, device="cpu"), numerics=Numerics(arithmetic="exact8"))
    assert (model(ids).logits - expected).norm() < 0.02 * expected.norm()


@EXHAUSTIVE  # 10 CPU seconds
@pytest.mark.parametrize("name", ["compressed int4", "compressed int8"])
def test_quantized_experts_are_dequantized_then_quantized(name: str, tmp_path: Path) -> None:
    write_mixture(tmp_path, name, torch.bfloat16)
    loaded = [detcompile.load_model(tmp_path, device="cpu", dequantize=given) for given in (None, False)]
    kept, dequantized = [certified(model, numerics=Numerics(arithmetic="exact16")).fingerprint for model in loaded]
    assert kept == dequantized


def test_loss_equals_definition() -> None:
    ids = torch.tensor([exact.fixed_tokens(300)])
    output = tiny("exact16")(ids, labels=ids)
    chosen = exact.log_softmax(output.logits[0, :-1].numpy())[range(299), ids[0, 1:]]
    total = np.add.accumulate(chosen)[-1]  # in order
    assert_bitwise_equal(output.loss, torch.tensor(-(total / np.float32(299))))


def test_embedding_equals_definition() -> None:
    config = AutoConfig.for_model("bert", **LLAMA)
    torch.manual_seed(0)
    embedder = certified(AutoModel.from_config(config).eval(), numerics=Numerics(arithmetic="exact16"))
    text = exact.fixed_tokens(100, VOCAB_SIZE)
    states = embedder(torch.tensor([text])).last_hidden_state[0].numpy()
    mean = np.add.accumulate(states)[-1] / np.float32(len(text))
    assert_bitwise_equal(embedder.embed([text], normalize=False)[0], torch.from_numpy(mean))
    norm = np.sqrt(np.add.accumulate(mean * mean)[-1])
    assert_bitwise_equal(embedder.embed([text])[0], torch.from_numpy(mean / norm))


def test_undefined_rotary_embedding_is_rejected_by_name() -> None:
    model = random_model("llama", torch.float32)
    model.config.rope_parameters["rope_type"] = "dynamic"
    with pytest.raises(UnsupportedModel, match="with the rope_type 'dynamic'"):
        use_exact_arithmetic(model, "exact16", 64)


UNDEFINED = {
    "function": lambda x: torch.sin(x),
    "gate": lambda x: torch.nn.functional.glu(x),
    "sum over rows": lambda x: x.sum(0),
    "two steps that may be one": lambda x: torch.add(x, x, alpha=0.3),
    "NaN as an integer": lambda x: x.to(torch.int32),
    "NaN as an integer in a sum": lambda x: x.cumsum(-1, dtype=torch.int64),
    "a cast that a compiler may drop": lambda x: x.to(torch.bfloat16).float(),
    "int64 rounded twice": lambda x: (x > 0).long().to(torch.bfloat16),
    "float64 rounded twice": lambda x: (x.double() * 3).half(),
    "the largest zero": lambda x: x.amax(-1),
    "the larger zero of a clamp": lambda x: torch.clamp(x, min=-x),
    "the least zero": lambda x: x.min(-1).values,
}


@pytest.mark.parametrize("function", UNDEFINED.values(), ids=UNDEFINED)
def test_undefined_operation_is_rejected(function) -> None:  # type: ignore[no-untyped-def]
    torch._dynamo.reset()
    backend = Backend(Numerics(arithmetic="exact8"), certify_only=True)
    run = torch.compile(lambda x: function(x), backend=backend)
    with pytest.raises(BackendCompilerFailed, match="or on the machine"), torch.no_grad():
        run(torch.ones(3, 8))


PLANTED: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "exp": ("exp of", lambda ops, x: ops.exp(x)),
    "contraction": ("fma of", lambda ops, x: ops.fma(x, x, x)),
    "quotient": ("truediv of", lambda ops, x: ops.truediv(x, x)),
    "quotient of integers": ("truediv of", lambda ops, x: ops.truediv(ops.index_expr(3, torch.int64), 7)),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_inductor_code_is_checked(planted: str) -> None:
    """Inductor's lowering replaces an operation by an undefined one."""
    torch._dynamo.reset()
    message, function = PLANTED[planted]
    lowering = {torch.ops.aten.neg.default: make_pointwise(lambda x: function(virtualized.ops, x))}
    run = torch.compile(lambda x: -x, backend=Backend(Numerics(arithmetic="exact8")))
    with (
        mock.patch.dict(lowerings, lowering),
        inductor_config.patch(fx_graph_cache=False),
        pytest.raises(BackendCompilerFailed, match=f"Inductor generated {message}"),
        torch.no_grad(),
    ):
        run(torch.ones(3, 8))


def test_defined_operations_are_certified() -> None:
    torch._dynamo.reset()

    def defined(x: torch.Tensor) -> torch.Tensor:
        y = torch.where(x > 0, x - 2, -x) + torch.relu(x) / 8 + x**2 + torch.exp(x) * torch.sigmoid(x)
        y = y / 3 + 1 / x + x.clamp(-1, 2) + torch.minimum(x, y) + x**3 + torch.sqrt(x) + torch.nn.functional.gelu(x)
        y = y + torch.nn.functional.softplus(torch.tanh(x / y)) + torch.nn.functional.gelu(x, approximate="tanh")
        y = torch.nn.functional.layer_norm(y, (8,)) + x.mean(-1, keepdim=True) * torch.softmax(x, -1)
        index = x.argmax(-1, keepdim=True)
        return y * torch.maximum(index, torch.ones_like(index)).clamp(max=5) + (x == y)

    backend = Backend(Numerics(arithmetic="exact8"), certify_only=True)
    with torch.no_grad():
        torch.compile(defined, backend=backend)(torch.ones(3, 8))


@pytest.mark.parametrize("value", ["exact4", ["exact16"], None])
def test_unknown_arithmetic_is_rejected(value: Any) -> None:
    message = f"Numerics.arithmetic={value!r}: give one of 'float', 'exact8'"
    with pytest.raises(NumericsError, match=re.escape(message)):
        Numerics(arithmetic=value)


def test_trainer_rejects_exact_arithmetic() -> None:
    with pytest.raises(InvalidInput, match=r"Numerics.arithmetic='exact16': a trainer computes in"):
        detcompile.trainer(random_model("llama", torch.float32), numerics=Numerics(arithmetic="exact16"))


def test_fingerprinted_numerics_include_arithmetic() -> None:
    assert repr(Numerics()) == "Numerics(tp_sizes=(1, 2, 4, 8), kv_chunk=512)"
    assert len({Numerics(arithmetic=name).digest() for name in ("float", *exact.VARIANTS)}) == 4


def test_rotary_tables_equal_the_reference() -> None:
    actual = rope_tables(200, frequencies_of(10000.0, 32))
    for table, expected in zip(actual, exact.rope_tables(range(200), 32, 10000)):
        assert exact.digest(table.numpy()) == exact.digest(expected)


PROMPTS = [exact.fixed_tokens(length) for length in (5, 40, 150, 40)] + [exact.fixed_tokens(150)[:140]]
PARAMS = [SamplingParams(max_tokens=24, ignore_eos=True, temperature=t, seed=5, logprobs=1) for t in (0.0, 0.9)]
ENGINES = {
    "one at a time": (EngineConfig(max_num_seqs=1, num_blocks=40), None),
    "small steps": (EngineConfig(max_num_seqs=8, max_num_batched_tokens=17, num_blocks=80), None),
    "small blocks, which preempt": (EngineConfig(max_num_seqs=8, block_size=16, num_blocks=24), None),
    "drafts": (EngineConfig(max_num_seqs=8, num_blocks=80), SpeculationConfig(switch="always")),
}


def answers(model: CompiledModel, config: EngineConfig, speculation: SpeculationConfig | None) -> list[object]:
    """Return tokens and log-probabilities of two generations; the second finds the prompts cached."""
    engine = model.engine(config, speculation=speculation)
    rows = [(prompt, params) for prompt in PROMPTS for params in PARAMS]
    runs = [engine.generate([row[0] for row in rows], [row[1] for row in rows], progress=False) for _ in range(2)]
    drawn = [[(out.outputs[0].token_ids, str(out.outputs[0].logprobs)) for out in run] for run in runs]
    assert drawn[0] == drawn[1]
    return drawn[0]


@EXHAUSTIVE
@pytest.mark.parametrize("variant", exact.VARIANTS)
def test_every_engine_draws_the_same_answers(variant: str, device: str) -> None:
    model = tiny(variant, device)
    drawn = {name: answers(model, *given) for name, given in ENGINES.items()}
    assert all(run == drawn["one at a time"] for run in drawn.values())


@EXHAUSTIVE
@pytest.mark.parametrize("isa", ["portable", "avx2"])
def test_receipts_of_another_instruction_set_replay(isa: str, tmp_path: Path) -> None:
    if isa not in supported_isas():
        pytest.skip(f"this machine has no {isa}")
    environment = os.environ | {"DETCOMPILE_CPU_ISA": isa}
    sign = [sys.executable, "-m", "benchmarks.exact_receipts", "sign", str(tmp_path), "--device", "cpu"]
    subprocess.run(sign, check=True, env=environment)
    assert check(tmp_path, tiny("exact8x16")) == 0


@EXHAUSTIVE  # 40 CPU seconds
def test_journal_continues_answers_of_another_instruction_set(tmp_path: Path) -> None:
    if "avx2" not in supported_isas():
        pytest.skip("this machine has no avx2")
    begin = [sys.executable, "-m", "benchmarks.exact_journal", "begin", str(tmp_path), "--device", "cpu"]
    subprocess.run(begin, check=True, env=os.environ | {"DETCOMPILE_CPU_ISA": "avx2"})
    assert resume(tmp_path, "cpu") == 0


def test_new_weights_become_digits_in_place() -> None:
    model, golden_print = tiny("exact16"), golden.kept()["fingerprints"]["exact16"]
    addresses, changed, text = weight_addresses(model.model), detcompile.load_model("tiny"), exact.fixed_tokens(40)
    with torch.no_grad():
        for parameter in changed.parameters():  # norms, embedding and linears
            parameter.mul_(1 + torch.arange(parameter.shape[-1]) % 3 * 0.25)
    fresh = detcompile.compile(copy.deepcopy(changed), numerics=Numerics(arithmetic="exact16"))
    engine, params = model.engine(EngineConfig(num_blocks=20)), SamplingParams(max_tokens=4, logprobs=0, seed=3)

    def answer() -> object:
        (output,) = engine.generate([text], params, progress=False)
        return output.outputs[0].logprobs

    first = answer()
    try:
        for source in (changed, fresh):
            model.update_weights(source)
            assert model.fingerprint == fresh.fingerprint != golden_print
            assert torch.equal(model(torch.tensor([text])).logits, fresh(torch.tensor([text])).logits)
            assert answer() != first
            model.update_weights(detcompile.load_model("tiny"))
            assert model.fingerprint == golden_print and answer() == first
        assert weight_addresses(model.model) == addresses
        with pytest.raises(InvalidInput, match="is missing: in exact arithmetic"):
            model.update_weights({"model.norm.weight": changed.model.norm.weight})
        with pytest.raises(InvalidInput, match=r"embed_tokens\.weight has dtype torch\.float32"):
            model.update_weights(changed.float())
        assert model.fingerprint == golden_print
    finally:
        model.update_weights(detcompile.load_model("tiny"))


def test_archive_samples_in_its_arithmetic() -> None:
    model = tiny("exact16")
    known = model.executor.description
    facts = facts_of(known.module, known.facts, known.numerics, known.parameters, {}, {})
    share = {"kv_shapes": known.facts.kv_shapes}
    sizes = read_sizes(facts | {"machine": {"device": "cpu"}}, share)
    assert sizes.is_exact and sizes == replace(known.facts, hidden_size=0)


@EXHAUSTIVE  # 30 CPU seconds
def test_archive_has_the_golden_logits_and_draws_the_same_answers(tmp_path: Path) -> None:
    model = tiny("exact8x16")
    archive = detcompile.load(detcompile.export(model, tmp_path / "tiny.pt2"))
    logits = archive(torch.tensor([exact.fixed_tokens(127)])).logits[0]
    assert exact.digest(logits.numpy()) == golden.kept()["logits"]["exact8x16"]["127"]
    assert archive.fingerprint == golden.kept()["fingerprints"]["exact8x16"]
    assert answers(archive, *ENGINES["small steps"]) == answers(model, *ENGINES["small steps"])


@EXHAUSTIVE  # 150 CPU seconds
def test_archive_of_ranks_with_unequal_heads_has_the_golden_logits(tmp_path: Path) -> None:
    numerics = Numerics(arithmetic="exact8x16")
    with detcompile.compile("tiny", device="cpu", tp=3, numerics=numerics) as model:
        path = detcompile.export(model, tmp_path / "tiny.pt2")
    with detcompile.load(path) as archive:
        logits = archive(torch.tensor([exact.fixed_tokens(127)])).logits[0]
        assert exact.digest(logits.numpy()) == golden.kept()["logits"]["exact8x16"]["127"]
        assert archive.fingerprint == golden.kept()["fingerprints"]["exact8x16"]
