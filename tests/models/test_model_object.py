"""A compiled model has the attributes of a Hugging Face model; unsupported ones raise an error with advice."""

import copy
import inspect
import io
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import transformers.pipelines.base
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LlamaForCausalLM,
    Pipeline,
    PreTrainedModel,
    Qwen3ForCausalLM,
    pipeline,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

import detcompile
from detcompile import CompiledClassifier, CompiledModel, InvalidInput, UnservedAttribute
from detcompile.executors.description import ParameterCount
from detcompile.models.model_object import INSTEAD, READS_WEIGHTS
from detcompile.models.padded_calls import REFUSED, SERVED, require_served
from detcompile.orders.numerics import Numerics
from detcompile.transformers_internals.generation import cache_keyword
from tests.bits import assert_bitwise_equal
from tests.model_cases import VOCAB_SIZE, compiled, random_model

IDS = torch.tensor([[5, 17, 3, 99, 42, 7], [7, 31, 64, 2, 8, 1]])


def model() -> CompiledModel:
    """Random weights, in float32, on the CPU."""
    return compiled("qwen3", torch.float32)


def test_it_says_what_a_hugging_face_model_says() -> None:
    plain, ours = random_model("qwen3", torch.float32), model()
    for name in ("dtype", "device", "main_input_name", "input_modalities", "output_modalities", "training"):
        assert getattr(ours, name) == getattr(plain, name), name
    assert ours.config.to_dict() == plain.config.to_dict()
    assert ours.generation_config.to_dict() == plain.generation_config.to_dict()
    assert ours.name_or_path == plain.name_or_path == ""
    assert ours.can_generate() and ours.eval() is ours and ours.train(False) is ours


@pytest.mark.parametrize("name", [*INSTEAD, "nonsense"])
def test_missing_attribute_error_says_what_to_do(name: str) -> None:
    assert not hasattr(model(), name) and getattr(model(), name, 7) == 7
    message = f"'CompiledModel' object has no attribute '{name}'" + (f": {INSTEAD[name]}" if name in INSTEAD else "")
    with pytest.raises(AttributeError, match=f"^{re.escape(message)}$") as raised:
        getattr(model(), name)
    assert isinstance(raised.value, UnservedAttribute) is (name in INSTEAD)


SURFACE = sorted({name for kind in (LlamaForCausalLM, PreTrainedModel, GenerationMixin) for name in dir(kind)
                  if not name.startswith("_")})  # fmt: skip


def test_every_attribute_of_hugging_face_works_or_is_refused() -> None:
    for name in SURFACE:
        try:
            assert getattr(model(), name) is not None
        except UnservedAttribute as error:
            assert f"has no attribute {name!r}: " in str(error)
            assert not hasattr(model(), name)


def test_its_weights_are_read_as_hugging_face_has_them(tmp_path: Path) -> None:
    plain, ours = random_model("qwen3", torch.float32), model()
    for actual, expected in (
        (ours.state_dict(), plain.state_dict()),
        (dict(ours.named_parameters()), dict(plain.named_parameters())),
        (dict(ours.named_buffers()), dict(plain.named_buffers())),
    ):
        assert list(actual) == list(expected)
        for name, tensor in expected.items():
            assert_bitwise_equal(actual[name], tensor)
    assert next(ours.parameters()) is ours.get_parameter("model.embed_tokens.weight")
    assert ours.get_memory_footprint() == plain.get_memory_footprint()
    ours.save_pretrained(tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    for name, tensor in plain.state_dict().items():
        assert_bitwise_equal(saved[name], tensor)
    ids = ours(IDS).logits
    version, weight = ours.weights_version, ours.state_dict()["model.norm.weight"]
    weight.mul_(2.0)
    assert ours.weights_version > version and not torch.equal(ours(IDS).logits, ids)
    weight.mul_(0.5)
    assert_bitwise_equal(ours(IDS).logits, ids)


def test_weights_that_are_elsewhere_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = model()
    exact = replace(ours.executor.description, numerics=Numerics(arithmetic="exact8"))
    for owner, name, value, reason in (
        (ours, "model", SimpleNamespace(config=ours.config), "in an archive or in worker processes"),
        (ours.executor, "ranks", object(), "only a share of the weights"),
        (ours.config, "quantization_config", {"bits": 4}, "the quantized weights are laid out"),
        (ours.executor, "description", exact, "the quantized weights are laid out"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, value, raising=False)
            for read in READS_WEIGHTS:
                with pytest.raises(UnservedAttribute, match=f"{read}.*{reason}.*read those of the Hugging Face model"):
                    getattr(ours, read)


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
def test_outputs_that_the_config_asks_for_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model().config, f"_{name}" if hasattr(model().config, f"_{name}") else name, True)
    with pytest.raises(InvalidInput, match=f"{name} is not supported: the program only returns logits"):
        model()(IDS)
    assert model()(IDS, **{name: False}).logits is not None


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("transform", [torch.func.vmap, make_fx, lambda call: torch.jit.trace(call, (IDS,))])
def test_traces_of_a_call_are_refused(transform: Callable[..., Any]) -> None:
    ours = model()
    with pytest.raises(InvalidInput, match="make_fx cannot trace a compiled model"):
        transform(lambda ids: ours(ids).logits)(IDS)


def test_it_is_not_copied() -> None:
    """The copy's code would run the first model's weights, and its own could not be changed."""
    for act in (copy.copy, copy.deepcopy, pickle.dumps, lambda model: torch.save(model, io.BytesIO())):
        with pytest.raises(InvalidInput, match="cannot be copied or pickled"):
            act(model())


def test_parameters_are_counted_as_transformers_counts_them() -> None:
    kinds: list[tuple[str, dict[str, Any]]] = [("qwen3", {"tie_word_embeddings": True}), ("gpt2", {}), ("mamba2", {})]
    for name, changes in kinds:
        plain = random_model(name, torch.float32, **changes)
        counts = plain.num_parameters(), plain.num_parameters() - plain.num_parameters(exclude_embeddings=True)
        assert ParameterCount.of(plain) == counts
    plain, ours = random_model("qwen3", torch.float32), model()
    for excluded in (False, True):
        assert ours.num_parameters(exclude_embeddings=excluded) == plain.num_parameters(exclude_embeddings=excluded)
    assert ours.num_parameters(only_trainable=True) == 0


def test_its_repr_is_a_line_that_reads_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = model()
    monkeypatch.setattr(type(ours.executor), "fingerprint_parts", lambda _: pytest.fail("read every weight"))
    sizes = f"{ours.num_parameters():,} parameters, {len(ours.certificate.orders)} sum orders"
    assert repr(ours) == f"CompiledModel(Qwen3ForCausalLM, float32, cpu, {sizes}, program {ours.program[:12]})"
    monkeypatch.setattr(ours.model, "name_or_path", "/models/some-folder")
    assert repr(ours).startswith("CompiledModel(some-folder, float32")


STAYS: dict[str, Callable[[CompiledModel], CompiledModel]] = {
    "to(device)": lambda m: m.to("cpu"),
    "to(dtype)": lambda m: m.to(torch.float32),
    "to(both)": lambda m: m.to(device=torch.device("cpu"), dtype=torch.float32),
    "to(tensor)": lambda m: m.to(IDS.float()),
    "to(nothing)": lambda m: m.to(),
    "float": lambda m: m.float(),
    "cpu": lambda m: m.cpu(),
}
MOVES: dict[str, Callable[[CompiledModel], CompiledModel]] = {
    r"to\(\): .*float32 on cpu, not for meta: compile the model again": lambda m: m.to("meta"),
    r"to\(\): .*not for cuda:1": lambda m: m.to("cuda:1"),
    r"to\(\): .*not for torch.float64": lambda m: m.to("cpu", torch.float64),
    r"half\(\): .*not for torch.float16": lambda m: m.half(),
    r"bfloat16\(\): .*not for torch.bfloat16": lambda m: m.bfloat16(),
    r"cuda\(\): .*not for cuda:0": lambda m: m.cuda(0),
    r"cuda\(\): .*not for cuda": lambda m: m.cuda(),
    r"to\(\): ": lambda m: m.to("nowhere"),
    r"train\(\): a compiled model has no gradients": lambda m: m.train(),
}


@pytest.mark.parametrize("stays", STAYS)
def test_what_changes_nothing_returns_the_model(stays: str) -> None:
    assert STAYS[stays](model()) is model()


@pytest.mark.parametrize("expected_text", MOVES)
def test_what_would_change_it_is_refused(expected_text: str) -> None:
    with pytest.raises(InvalidInput, match=expected_text):
        MOVES[expected_text](model())


IDLE: list[dict[str, Any]] = [
    {"use_cache": True},
    {"use_cache": False},
    {"return_dict": True},
    {"cache_position": None, "past_key_values": None, "cache": None, "inputs_embeds": None},
    {"output_hidden_states": False, "output_attentions": False},
]


@pytest.mark.parametrize("keywords", IDLE, ids=str)
def test_keywords_that_change_nothing_change_nothing(keywords: dict[str, Any]) -> None:
    assert_bitwise_equal(model()(input_ids=IDS, **keywords).logits, model()(IDS).logits)


def test_return_dict_false_gives_a_tuple(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = model()(IDS, labels=IDS)
    (logits,) = model()(IDS, return_dict=False)
    loss, again = model()(IDS, labels=IDS, return_dict=False)
    monkeypatch.setattr(model().config, "return_dict", False)
    (said_by_config,) = model()(IDS)
    for actual in (logits, again, said_by_config):
        assert_bitwise_equal(actual, whole.logits)
    assert_bitwise_equal(loss, whole.loss)


BAD: dict[str, dict[str, Any]] = {
    r"input_ids must be a tensor \[batch, length\], not list": {"input_ids": IDS.tolist()},
    "input_ids is missing": {},
    r"input_ids must be integers .* got torch.float32": {"input_ids": IDS.float()},
    r"input_ids must be integers .* got torch.bool": {"input_ids": IDS > 9},
    r"input_ids must be integers .* got torch.int64 \[1, 2, 6\]": {"input_ids": IDS[None]},
    r"input_ids must be integers .* got torch.int64 \[6\]": {"input_ids": IDS[0]},
    "input_ids: row 0 holds token 160; ids are 0 to 159": {"input_ids": IDS + VOCAB_SIZE - IDS[0, 0]},
    "input_ids: row 0 holds token -100": {"input_ids": torch.full_like(IDS, -100)},
    "attention_mask must be a tensor": {"input_ids": IDS, "attention_mask": [[1] * 6] * 2},
    "position_ids must be a tensor": {"input_ids": IDS, "position_ids": list(range(6))},
    "labels must be a tensor": {"input_ids": IDS, "labels": IDS.tolist()},
    "inputs_embeds is not supported": {"inputs_embeds": torch.zeros(1, 4, 80)},
    "past_key_values is not supported": {"input_ids": IDS, "past_key_values": DynamicCache()},
    "cache is not supported: a call takes no cache": {"input_ids": IDS, "cache": DynamicCache()},
    "output_hidden_states is not supported": {"input_ids": IDS, "output_hidden_states": True},
    "output_attentions is not supported": {"input_ids": IDS, "output_attentions": True},
    "cache_position is not supported": {"input_ids": IDS, "cache_position": torch.arange(6)},
    "token_type_ids is not an argument of a call": {"input_ids": IDS, "token_type_ids": IDS},
    "atention_mask is not an argument of a call": {"input_ids": IDS, "atention_mask": None},
}


@pytest.mark.parametrize("expected_text", BAD)
def test_what_a_call_cannot_serve_is_refused_by_its_name(expected_text: str) -> None:
    with pytest.raises(InvalidInput, match=expected_text):
        model()(**BAD[expected_text])


@pytest.mark.parametrize("kind", [Qwen3ForCausalLM, LlamaForCausalLM])
def test_every_argument_of_hugging_face_is_known(kind: type[PreTrainedModel]) -> None:
    names = inspect.signature(kind.forward).parameters.keys() - {"self", "kwargs"}
    served = set(SERVED.replace(" and ", ", ").split(", "))
    require_served(dict.fromkeys(names - served))
    assert cache_keyword(random_model("qwen3", torch.float32)) in names & REFUSED.keys()


def test_a_generation_config_may_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, prompt = model(), IDS[:1]
    monkeypatch.setattr(ours.model, "generation_config", None)  # put back afterwards
    ours.generation_config = GenerationConfig(max_new_tokens=3)
    assert ours.generate(prompt).shape[1] == prompt.shape[1] + 3
    ours.generation_config.max_new_tokens = 5
    assert ours.generate(prompt).shape[1] == prompt.shape[1] + 5


def test_a_pipeline_finds_what_it_needs() -> None:
    ours = compiled("tiny", torch.float32)
    made = pipeline("text-generation", model=ours, tokenizer=ours.tokenizer)
    default = made._default_generation_config
    assert made.model is ours and made.device == ours.device
    stop = mock.patch.object(type(ours), "generate", side_effect=InterruptedError)
    with stop as generate, pytest.raises(InterruptedError):
        made("x")
    given = generate.call_args.kwargs  # transformers 5.17 gives a generation_config, 5.24 the arguments themselves
    settings = vars(given.get("generation_config", ours.generation_config)) | given
    for name in ("max_new_tokens", "do_sample", "temperature"):
        assert settings[name] == getattr(default, name), name
    assert settings["pad_token_id"] == ours.generation_config.pad_token_id
    assert "CompiledModel" in repr(made)
    with pytest.raises(InvalidInput, match=r"to\(\): .*not for meta"):
        pipeline("text-generation", model=ours, tokenizer=ours.tokenizer, device="meta")


def test_a_pipeline_logs_no_list_of_models(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[str] = []
    monkeypatch.setattr(transformers.pipelines.base.logger, "error", logged.append)
    ours = compiled("tiny", torch.float32)
    pipeline("text-generation", model=ours, tokenizer=ours.tokenizer)
    checked = SimpleNamespace(task="text-classification", model=object.__new__(CompiledClassifier))
    Pipeline.check_model_type(checked, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES)
    assert logged == []


def test_a_pipeline_generates_alone_as_in_a_batch() -> None:
    ours, texts = compiled("tiny", torch.float32), ["def mean(values):", "import json\n", "x"]
    pipe = pipeline("text-generation", model=ours, tokenizer=ours.tokenizer)
    how: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    alone = [pipe(text, **how)[0]["generated_text"] for text in texts]
    assert [output[0]["generated_text"] for output in pipe(texts, batch_size=3, **how)] == alone
    loaded = detcompile.load_model("tiny", dtype=torch.float32, device="cpu")
    plain = pipeline("text-generation", model=loaded, tokenizer=ours.tokenizer)
    assert plain(texts[0], **how)[0]["generated_text"] == alone[0]
