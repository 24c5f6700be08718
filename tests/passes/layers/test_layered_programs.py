"""A program that runs one region for all layers of a structure has the bytes of the program of one graph."""

from typing import Any
from unittest import mock

import pytest
import torch

import detcompile
from detcompile import CompiledModel, SamplingParams
from detcompile.passes import program_source, tracing
from detcompile.passes.layers.program import LayeredProgram, Unrolled
from detcompile.templates.device.cuda_graphs import warmup
from tests.bits import assert_bitwise_equal
from tests.exhaustive import EXHAUSTIVE, exhaustive_unless
from tests.model_cases import MAX_CONTEXT, VOCAB_SIZE, certified, random_model, without_inductor

FIVE = {"num_hidden_layers": 5}
CASES = {
    "llama": FIVE,
    "gemma2": FIVE,
    "smollm3": FIVE,
    "granite_swa": {"num_hidden_layers": 6},
    "gpt2": {"n_layer": 4},
    "bloom": {"n_layer": 4},
    "gpt_oss": FIVE,
    "qwen2_moe": FIVE | {"mlp_only_layers": [0, 1, 2]},
}


DTYPES = [torch.float32, torch.bfloat16]


def build(name: str, whole: bool, dtype: torch.dtype = torch.float32) -> CompiledModel:
    nothing: Any = lambda *_: None  # noqa: E731
    find = nothing if whole else tracing.find_repeats
    with mock.patch.object(program_source, "find_repeats", find):
        return detcompile.compile(random_model(name, dtype, **CASES[name]), max_context=MAX_CONTEXT)


def answers(model: CompiledModel) -> list[Any]:
    prompts = [[7 * n % VOCAB_SIZE for n in range(1, size)] for size in (3, 40, 90)]
    outputs = model.engine().generate(prompts, SamplingParams(max_tokens=5, logprobs=3, seed=1))
    return [[output.token_ids, output.logprobs] for request in outputs for output in request.outputs]


@pytest.mark.parametrize("name", exhaustive_unless(lambda name: name == "gpt2", CASES))
def test_it_has_the_bytes_of_one_graph(name: str):
    with without_inductor():
        layered, whole = build(name, whole=False), build(name, whole=True)
    assert any(entry.holds_for for entry in layered.certificate.entries)
    assert not any(entry.holds_for for entry in whole.certificate.entries)
    ids = torch.arange(1, 41)[None] % VOCAB_SIZE
    assert_bitwise_equal(layered(ids).logits, whole(ids).logits)
    assert answers(layered) == answers(whole)
    counts = [model.certificate.counts for model in (layered, whole)]
    for kind in ("template", "attention", "order-free"):
        assert counts[0].get(kind, 0) == counts[1].get(kind, 0), kind
    assert layered.certificate.orders == whole.certificate.orders


@pytest.mark.parametrize("dtype", exhaustive_unless(lambda dtype: dtype is torch.bfloat16, DTYPES))
def test_compiled_code_has_the_bytes_of_one_graph(dtype: torch.dtype):
    layered, whole = build("gemma2", whole=False, dtype=dtype), build("gemma2", whole=True, dtype=dtype)
    ids = torch.arange(1, 41)[None] % VOCAB_SIZE
    assert_bitwise_equal(layered(ids).logits, whole(ids).logits)
    assert answers(layered) == answers(whole)


def test_a_rehearsal_runs_each_region_once():
    """In the order of the layers: before them, dense ones, others, after them."""
    seen: list[str] = []

    def run(name: str) -> Any:
        return lambda given: seen.append(name) or [torch.zeros(1), "shared"]

    runs = {index: run(name) for index, name in enumerate(("before", "dense", "experts", "after"))}
    unrolled = Unrolled((0,), (None,), ((0,),) * 6, (0, 1, 1, 2, 1, 3))
    program = LayeredProgram(runs, {1: (0,), 2: (0,), 3: ()}, unrolled)
    program("given")
    assert seen == ["before", "dense", "dense", "experts", "dense", "after"]
    seen.clear()
    with warmup():
        program("given")
    assert seen == ["before", "dense", "experts", "after"]


def test_every_layer_is_covered_by_a_proof():
    with without_inductor():
        model = build("qwen2_moe", whole=False)
    attention = [entry.holds_for for entry in model.certificate.entries if entry.kind == "attention"]
    assert attention == [(0, 1, 2), (3, 4)]
    assert "0-2" in str(model.certificate) and "3-4" in str(model.certificate)


def test_weights_of_every_layer_are_its_own():
    """A layer that ran over another one's weights would not follow a change of its own."""
    source = random_model("llama", torch.float32, **FIVE)
    model = certified(source, max_context=MAX_CONTEXT)
    ids = torch.arange(1, 9)[None]
    before = model(ids).logits
    for layer, name in [(layer, f"model.layers.{layer}.mlp.down_proj.weight") for layer in range(5)]:
        model.update_weights({name: source.get_parameter(name) + 0.5})
        after = model(ids).logits
        assert not torch.equal(before, after), layer
        before = after


def _reads(model: Any, theirs: Any) -> None:
    """Every layer adds a product with a weight that is not its own."""

    class Reading(type(model.model.layers[0].mlp)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.theirs[0](x)

    for layer in model.model.layers:
        layer.mlp.__class__ = Reading
        layer.mlp.theirs = [theirs]  # in a list: the layer does not own it


OWNERS = ["the first layer", "the model"]


@EXHAUSTIVE
@pytest.mark.parametrize("owner", OWNERS)
def test_weight_read_by_all_layers_is_shared(owner: str):
    def source() -> Any:
        model: Any = random_model("llama", torch.float32, **FIVE)
        torch.manual_seed(1)
        linear = torch.nn.Linear(80, 80, bias=False)
        if owner == "the model":
            model.common = linear
        else:
            model.model.layers[0].common = linear
        _reads(model, linear)
        return model

    with without_inductor():
        layered = detcompile.compile(source(), max_context=MAX_CONTEXT)
        with mock.patch.object(program_source, "find_repeats", lambda *_: None):
            whole = detcompile.compile(source(), max_context=MAX_CONTEXT)
    ids = torch.arange(1, 41)[None] % VOCAB_SIZE
    assert_bitwise_equal(layered(ids).logits, whole(ids).logits)
    name = next(name for name, _ in source().named_parameters() if "common" in name)
    for model in (layered, whole):
        model.update_weights({name: torch.eye(80)})
    assert_bitwise_equal(layered(ids).logits, whole(ids).logits)
