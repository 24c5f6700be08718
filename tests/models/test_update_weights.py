"""After an update in place, no answer uses keys and values of the old weights."""

from typing import Any

import pytest
import torch
from torch import Tensor

import detcompile
from detcompile import CompiledModel, EngineConfig, EngineError, InvalidInput, SamplingParams
from detcompile.runtime.engine import Engine
from tests.exhaustive import EXHAUSTIVE
from tests.model_cases import certified, random_model

PROMPT = [(7 * i) % 150 for i in range(70)]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
CONFIG = EngineConfig(num_blocks=40)
UP, DOWN = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def model() -> CompiledModel:
    return certified(random_model("llama", torch.float32, num_hidden_layers=1, tie_word_embeddings=True))


def noise(model: CompiledModel, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights = dict(model.model.named_parameters())
    return {name: weights[name] + torch.randn(weights[name].shape, generator=generator) for name in (UP, DOWN)}


def answer(engine: Engine) -> Any:
    (output,) = engine.generate([PROMPT], GREEDY, progress=False)
    assert output.error is None
    return output.outputs[0].logprobs


def continued(model: CompiledModel) -> list[int]:
    return model.generate(torch.tensor([PROMPT]), max_new_tokens=6, eos_token_id=())[0, -6:].tolist()


def by_call(model: CompiledModel) -> None:
    model.update_weights(noise(model, 1))


def by_the_optimizer(model: CompiledModel) -> None:
    with torch.no_grad():
        model.model.get_parameter(DOWN).add_(0.01)


def by_data(model: CompiledModel) -> None:
    given = model.model.get_parameter(DOWN)
    given.data.copy_(noise(model, 2)[DOWN])  # moves no version counter


def by_numpy(model: CompiledModel) -> None:
    model.model.get_parameter(UP).detach().numpy()[:] *= 1.5


def in_inference_mode(model: CompiledModel) -> None:
    with torch.inference_mode():
        model.model.get_parameter(UP).mul_(1.25)


def of_one_element_before_a_fingerprint(model: CompiledModel) -> None:
    _ = model.fingerprint
    model.model.get_parameter(UP).data[3, 5] += 1.0
    _ = model.fingerprint


WAYS = (by_call, by_the_optimizer, by_data, by_numpy, in_inference_mode, of_one_element_before_a_fingerprint)


@pytest.mark.parametrize("change", WAYS, ids=lambda way: way.__name__)
def test_engines_and_generate_answer_as_fresh_ones_after_a_change(model, change):
    engine, before, version = model.engine(CONFIG), model.fingerprint, model.weights_version
    old, _ = answer(engine), continued(model)
    (again,) = engine.generate([PROMPT], GREEDY, progress=False)
    assert again.outputs[0].logprobs == old and again.metrics.num_cached_tokens == 64  # while nothing changed
    change(model)
    new = answer(engine)
    fresh = model.engine(CONFIG)
    assert new == answer(fresh) and new != old
    assert continued(model) == [entry.token_id for entry in new]
    assert model.fingerprint != before and model.weights_version > version


@pytest.mark.parametrize("change", WAYS, ids=lambda way: way.__name__)
def test_no_prefix_of_weights_of_before_is_exported_or_taken(model, change):
    engine = model.engine(CONFIG)
    answer(engine)
    before = engine.prefixes.export(PROMPT)
    assert before.fingerprint == model.fingerprint
    change(model)
    assert engine.prefixes.export(PROMPT) is None
    with pytest.raises(InvalidInput, match="are of the model"):
        engine.prefixes.take(before)
    answer(engine)
    after = engine.prefixes.export(PROMPT)
    assert after.fingerprint == model.fingerprint != before.fingerprint


def test_an_update_takes_modules_models_mappings_and_pairs(model):
    other = random_model("llama", torch.float32, num_hidden_layers=1, tie_word_embeddings=True)
    with torch.no_grad():
        other.model.norm.weight.mul_(1.5)
    before = {name: tensor.clone() for name, tensor in model.model.state_dict().items()}
    addresses = {name: tensor.data_ptr() for name, tensor in model.model.state_dict().items()}
    version = model.update_weights(other)
    wanted = certified(other)
    ids = torch.tensor([PROMPT])
    assert torch.equal(model(ids).logits, wanted(ids).logits) and model.fingerprint == wanted.fingerprint
    prints = [model.fingerprint]
    for source in (before, iter(before.items()), wanted):
        assert model.update_weights(source) == (version := version + 1) == model.weights_version
        prints.append(model.fingerprint)
    assert prints[0] == prints[3] and prints[1] == prints[2] != prints[0]
    assert {name: tensor.data_ptr() for name, tensor in model.model.state_dict().items()} == addresses


def test_weights_of_the_model_itself_may_change_places(model):
    gate = "model.layers.0.mlp.gate_proj.weight"
    weights = {name: model.model.get_parameter(name).detach() for name in (gate, UP)}
    before = {name: tensor.clone() for name, tensor in weights.items()}
    model.update_weights({gate: weights[UP], UP: weights[gate]})
    assert torch.equal(weights[gate], before[UP]) and torch.equal(weights[UP], before[gate])


REFUSED = {
    "the model has no model.nothing": {"model.nothing": torch.zeros(1)},
    r"norm\.weight has shape \[3\], the model's has \[80\]": {"model.norm.weight": torch.zeros(3)},
    r"norm\.weight has dtype torch\.bfloat16": {"model.norm.weight": torch.zeros(80, dtype=torch.bfloat16)},
    "are one weight": {EMBEDDING: torch.zeros(160, 80), HEAD: torch.ones(160, 80)},
    r"norm\.weight is of layout torch\.sparse_coo": {"model.norm.weight": torch.zeros(80).to_sparse()},
    "has a list": {"model.norm.weight": [0.0] * 80},
    "a name was given twice": [("model.norm.weight", torch.zeros(80))] * 2,
    "neither a module": 7,
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_fit_writes_nothing(model, message):
    source, before, version = REFUSED[message], model.fingerprint, model.weights_version
    if isinstance(source, dict):
        source = noise(model, 3) | source  # those before it would fit
    with pytest.raises(InvalidInput, match=message):
        model.update_weights(source)
    assert model.fingerprint == before and model.weights_version == version


def test_buffer_that_a_generator_uses_again_is_refused(model):
    first, *_ = names = ["model.layers.0.input_layernorm.weight", "model.norm.weight"]
    before, buffer = model.fingerprint, torch.empty(100)
    pairs = ((name, buffer.fill_(place)[:80]) for place, name in enumerate(names))
    with pytest.raises(InvalidInput, match=f"tensor of {first} was overwritten"):
        model.update_weights(pairs)
    assert model.fingerprint == before


def test_requests_that_run_refuse_an_update_and_end_by_a_change(model):
    engine = model.engine(CONFIG)
    engine.add_request(PROMPT, GREEDY)
    engine.step()
    with pytest.raises(InvalidInput, match="an engine has requests"):
        model.update_weights(noise(model, 4))
    engine.step()
    with torch.no_grad():
        model.model.get_parameter(UP).add_(0.01)
    engine.add_request(PROMPT, GREEDY)  # waits, and has no keys yet
    outputs = {output.request_id: output for _ in range(12) for output in engine.step()}
    first, second = outputs.values()
    assert isinstance(first.error, EngineError) and "changed in place" in str(first.error)
    assert first.outputs[0].token_ids and second.outputs[0].logprobs == answer(model.engine(CONFIG))
    engine.check()
    model.update_weights(noise(model, 4))


def test_a_request_that_waits_with_tokens_of_other_weights_ends(model):
    engine = model.engine(EngineConfig(num_blocks=40, max_num_seqs=1))
    names = [engine.add_request(PROMPT, GREEDY)]
    engine.step()
    names.append(engine.add_request(PROMPT, GREEDY, resume={0: [5, 6]}))
    engine.step()
    with torch.no_grad():
        model.model.get_parameter(UP).add_(0.01)
    outputs = {output.request_id: output for _ in range(12) for output in engine.step()}
    assert all("changed in place" in str(outputs[name].error) for name in names)


@EXHAUSTIVE
def test_an_archive_takes_new_weights_too(tmp_path):
    model = detcompile.compile(random_model("llama", torch.float32, num_hidden_layers=1), max_context=256)
    loaded = detcompile.load(detcompile.export(model, tmp_path / "model.pt2"))
    assert loaded.fingerprint_parts == model.fingerprint_parts
    engine = loaded.engine(CONFIG)
    old = answer(engine)
    given = noise(model, 5)
    model.update_weights(given)
    assert loaded.fingerprint != model.fingerprint
    loaded.update_weights(given)
    assert loaded.fingerprint_parts == model.fingerprint_parts
    assert answer(engine) == answer(model.engine(CONFIG)) != old
    again = detcompile.load(detcompile.export(model, tmp_path / "again.pt2"))
    assert again.fingerprint == model.fingerprint


def test_what_was_cancelled_holds_no_weights_back(model):
    engine = model.engine(CONFIG)
    engine.cancel("nobody's")
    queued, running = (engine.add_request(PROMPT, GREEDY) for _ in range(2))
    engine.cancel(queued)
    engine.step()
    with pytest.raises(InvalidInput, match="serve or cancel them"):
        model.update_weights(noise(model, 3))
    engine.cancel(running)
    model.update_weights(noise(model, 3))
    ended = [output for output in engine.step() if output.finished]
    assert [output.outputs[0].finish_reason for output in ended] == ["abort"] and not engine.has_unfinished_requests


def test_who_runs_under_other_weights_is_told_also_where_blocks_are_exported(model):
    engine = model.engine(CONFIG)
    name = engine.add_request(PROMPT, GREEDY)
    engine.step()
    by_the_optimizer(model)
    engine.prefixes.export(PROMPT)
    assert engine.has_unfinished_requests
    [output] = engine.step()
    assert output.request_id == name and isinstance(output.error, EngineError)
    assert not engine.has_unfinished_requests


@pytest.mark.parametrize("change", [by_call, by_the_optimizer], ids=lambda way: way.__name__)
def test_streamed_answer_uses_one_weight_version(model, change):
    class Changing:
        """A streamer that has new weights in the middle; or another thread has them."""

        num_columns = 0

        def put(self, _tokens: Tensor) -> None:
            self.num_columns += 1
            if self.num_columns == 4:
                change(model)

        def end(self) -> None:
            raise AssertionError("an answer of two versions of the weights")

    model.update_weights(noise(model, 4))
    with pytest.raises(EngineError, match=r"generate\(\): the weights were changed"):
        model.generate(torch.tensor([PROMPT]), max_new_tokens=8, eos_token_id=(), streamer=Changing())
    plain = continued(model)
    watched = model.generate(torch.tensor([PROMPT]), max_new_tokens=6, eos_token_id=(), stopping_criteria=[_never])
    assert watched[0, -6:].tolist() == plain


def _never(ids: Tensor, _scores: Any) -> Tensor:
    return torch.zeros(len(ids), dtype=torch.bool)
