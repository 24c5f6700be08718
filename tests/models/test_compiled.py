"""CompiledModel: generate(), the loss, bad input, the fingerprint."""

import contextlib
import copy
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import detcompile
from detcompile import CompiledModel, InvalidInput, Numerics, api
from detcompile.models import checkpoints
from detcompile.models.checkpoints import load_checkpoint
from detcompile.models.hub import TINY_FOLDER
from detcompile.weights import in_mapped_file, named_weights
from tests.bits import assert_bitwise_equal
from tests.model_cases import MAX_CONTEXT, VOCAB_SIZE, certified, compiled, random_model

PROMPT = torch.tensor([[5, 17, 3, 99, 42, 7, 7, 31, 64, 2]])


def test_greedy_generation_is_the_likeliest_token_of_the_plain_forward(device: str) -> None:
    model = compiled("qwen3", torch.float32, device)
    ids = PROMPT.to(device)
    out = model.generate(ids, max_new_tokens=70, eos_token_id=())
    logits = model(out).logits[0, ids.shape[1] - 1 : -1]
    assert torch.equal(logits.argmax(-1), out[0, ids.shape[1] :])


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "seed": 7}])
def test_a_request_gets_the_same_tokens_alone_and_in_a_batch(sampling: dict, device: str) -> None:
    model = compiled("qwen3", torch.bfloat16, device)
    alone = model.generate(PROMPT.to(device), max_new_tokens=20, eos_token_id=(), **sampling)[0, PROMPT.shape[1] :]
    batch = torch.randint(0, VOCAB_SIZE, (5, 33), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(batch)
    batch[3, -PROMPT.shape[1] :], mask[3, : -PROMPT.shape[1]] = PROMPT[0], 0
    seeds = {"seed": [1, 2, 3, 7, 5]} if "seed" in sampling else {}
    together = model.generate(
        batch.to(device), mask.to(device), max_new_tokens=20, eos_token_id=(), **(sampling | seeds)
    )
    assert torch.equal(together[3, batch.shape[1] :], alone)


def test_sampling_without_a_seed_differs_and_with_one_repeats() -> None:
    model = compiled("qwen3", torch.float32)
    draw = lambda **kwargs: model.generate(PROMPT, max_new_tokens=30, do_sample=True, eos_token_id=(), **kwargs)  # noqa: E731
    assert not torch.equal(draw(), draw())
    assert torch.equal(draw(seed=3), draw(seed=3))


def test_a_row_that_ends_early_is_padded() -> None:
    model = compiled("qwen3", torch.float32)
    plain = model.generate(PROMPT, max_new_tokens=6, eos_token_id=())
    end = int(plain[0, PROMPT.shape[1]])
    both = torch.cat([PROMPT, PROMPT.flip(1)])
    out = model.generate(both, max_new_tokens=6, eos_token_id=end, pad_token_id=VOCAB_SIZE - 1)
    assert out[0, PROMPT.shape[1]] == end
    assert (out[0, PROMPT.shape[1] + 1 :] == VOCAB_SIZE - 1).all()


BAD_CALLS = {
    "ids must be integers": lambda m: m(torch.zeros(1, 4)),
    "ids are 0 to": lambda m: m(torch.full((1, 4), VOCAB_SIZE)),
    "all padding": lambda m: m(PROMPT, torch.zeros_like(PROMPT)),
    "padding between two tokens": lambda m: m(PROMPT, (PROMPT != 99).long()),
    "compiled for": lambda m: m(torch.zeros(1, 2049, dtype=torch.long)),
    "give each row its own": lambda m: m.generate(PROMPT.repeat(2, 1), do_sample=True, seed=[1]),
    "labels need": lambda m: m(PROMPT, labels=PROMPT[:, 1:]),
    "no token has a label": lambda m: m(PROMPT, labels=torch.full_like(PROMPT, -100)),
    "position 2048": lambda m: m(PROMPT, position_ids=torch.arange(2039, 2049)[None]),
    "label 1000000": lambda m: m(PROMPT, labels=torch.full_like(PROMPT, 10**6)),
    "1 different seeds": lambda m: m.generate(PROMPT.repeat(2, 1), do_sample=True, seed=[5, 5]),
    "mask: it is on the meta device": lambda m: m(PROMPT, torch.ones_like(PROMPT, device="meta")),
    "labels: it holds torch.float32": lambda m: m(PROMPT, labels=PROMPT.float()),
    "input_ids: it is a negated view": lambda m: m(torch._neg_view(-PROMPT)),
    "labels: it is of layout": lambda m: m(PROMPT, labels=PROMPT.to_sparse()),
    "position_ids must be integers": lambda m: m(PROMPT, position_ids=PROMPT > 1),
    "several packed texts": lambda m: m(PROMPT, position_ids=(torch.arange(PROMPT.shape[1]) % 6)[None]),
    "position_ids: it is of layout": lambda m: m(PROMPT, position_ids=PROMPT.to_sparse()),
    "names a column outside the batch": lambda m: m(PROMPT, logits_to_keep=torch.tensor([0, 99])),
    "logits_to_keep is torch.bool": lambda m: m(PROMPT, logits_to_keep=torch.tensor([True])),
    "logits_to_keep is torch.int64": lambda m: m(PROMPT, logits_to_keep=torch.tensor(1)),
    "logits_to_keep '1' is a str": lambda m: m(PROMPT, logits_to_keep="1"),
    "logits_to_keep True is a bool": lambda m: m(PROMPT, logits_to_keep=True),
    "logits_to_keep=-1": lambda m: m(PROMPT, logits_to_keep=-1),
    "config {'num_blocks': 5} is a dict: pass EngineConfig": lambda m: m.engine({"num_blocks": 5}),
    "speculation 'ngram' is a str: pass SpeculationConfig": lambda m: m.engine(speculation="ngram"),
    "return_dict 'no' is a str": lambda m: m(PROMPT, return_dict="no"),
    "needs 2058 tokens": lambda m: m.generate(PROMPT, max_new_tokens=2048),
}


@pytest.mark.parametrize(("message", "call"), BAD_CALLS.items(), ids=BAD_CALLS.keys())
def test_bad_input_is_refused_with_what_to_do(message: str, call) -> None:
    with pytest.raises(InvalidInput, match=message):
        call(compiled("qwen3", torch.float32))


@pytest.mark.parametrize("left", [False, True], ids=["padded right", "padded left"])
def test_padding_moves_no_loss_whatever_its_labels(left: bool) -> None:
    """Labels at padding and of a row's first token do not count; the rest gives Hugging Face's loss."""
    model = compiled("qwen3", torch.float32)
    rows = [PROMPT[0].tolist(), PROMPT[0, :4].tolist(), PROMPT[0, 2:5].tolist()]
    width = max(map(len, rows))
    pads = [[0] * (width - len(row)) for row in rows]
    ids, mask = (
        torch.tensor([pad + item if left else item + pad for item, pad in zip(values, pads)])
        for values in (rows, [[1] * len(row) for row in rows])
    )
    ignored = torch.where(mask == 1, ids, -100)
    actual = [model(ids, mask, labels=labels).loss for labels in (ignored, ids, torch.where(mask == 1, ids, 7))]
    for loss in actual:
        assert_bitwise_equal(loss, actual[0])
    alone = [model(torch.tensor([row]), labels=torch.tensor([row])).loss.double() * (len(row) - 1) for row in rows]
    torch.testing.assert_close(actual[0].double(), sum(alone) / sum(len(row) - 1 for row in rows))
    if not left:
        plain = random_model("qwen3", torch.float32)
        with torch.no_grad():
            torch.testing.assert_close(actual[0], plain(ids, mask, labels=ignored).loss, rtol=1e-5, atol=1e-5)


def test_torch_compile_around_calls_leaves_their_bits() -> None:
    model, mask = compiled("qwen3", torch.float32), torch.ones_like(PROMPT)

    def calls(ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return model(ids, mask).logits * 2, model(ids, mask, labels=ids).loss, model.generate(ids, max_new_tokens=3)

    for actual, expected in zip(torch.compile(calls, backend="eager")(PROMPT, mask), calls(PROMPT, mask), strict=True):
        assert_bitwise_equal(actual, expected)


def test_compiling_under_autocast_keeps_dtypes() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = certified(random_model("llama", torch.float32), max_context=MAX_CONTEXT)
    assert actual.fingerprint == compiled("llama", torch.float32).fingerprint


def test_compile_rejects_unsupported_arguments() -> None:
    with pytest.raises(detcompile.NumericsError, match=r"tp=3 is not one of.*tp_sizes=\(1, 3\)\).*--tp-sizes 1,3"):
        detcompile.compile("tiny", tp=3)
    with pytest.raises(InvalidInput, match="no such folder"):
        detcompile.compile("somewhere/else/again")
    with pytest.raises(InvalidInput, match="pass cpu or cuda"):
        detcompile.load_model("tiny", device="somewhere")
    with pytest.raises(InvalidInput, match="cannot be loaded as a causal LM"):
        detcompile.load_model(__import__("pathlib").Path(__file__).parent)
    with mock.patch.object(checkpoints, "WITHOUT_DOCSTRINGS", True), pytest.raises(InvalidInput, match="without -OO"):
        detcompile.load_model(__import__("pathlib").Path(__file__).parent)
    with pytest.raises(InvalidInput, match="at least one token"):
        detcompile.compile(random_model("llama", torch.float32), max_context=0)
    for name in ("num_hidden_layers", "max_position_embeddings"):
        with pytest.raises(InvalidInput, match=f"{name}=0"):
            detcompile.compile(random_model("llama", torch.float32, **{name: 0}))
    with pytest.raises(InvalidInput, match="wpe has 2048 rows"):
        detcompile.compile(random_model("gpt2", torch.float32), max_context=4096)
    with pytest.raises(InvalidInput, match="embed_positions has 2048 rows"):
        detcompile.compile(random_model("gptj", torch.float32), max_context=4096)
    model = random_model("gpt2", torch.float32, n_layer=1)
    certified(model)
    with pytest.raises(InvalidInput, match="load it again"):
        detcompile.compile(model, numerics=Numerics(tp_sizes=(1,)))
    with pytest.raises(detcompile.NumericsError, match=r"o_proj: K=80 does not split into 3"):
        detcompile.compile(random_model("llama", torch.float32), numerics=Numerics(tp_sizes=(1, 3)))


BAD_ARGUMENTS = [
    ({"tp": "2"}, "tp '2' is a str: give an integer"),
    ({"tp": True}, "tp True is a bool"),
    ({"pp": 1.5}, "pp 1.5 is a float"),
    ({"pp": 0}, "pp=0: a pipeline"),
    ({"max_context": 5.5}, "max_context 5.5 is a float"),
    ({"max_context": "5"}, "max_context '5' is a str"),
    ({"max_context": True}, "max_context True is a bool"),
    ({"max_context": 0}, "max_context=0: a sequence"),
    ({"numerics": {}}, "numerics {} is a dict: give Numerics"),
    ({"replicate_attention": "no"}, "replicate_attention 'no' is a str"),
    ({"progress": "no"}, "progress 'no' is a str"),
    ({"device": [1]}, "device .1. is a list: pass cpu or cuda"),
    ({"device": ""}, "device='': pass cpu or cuda"),
    ({"task": ["x"]}, r"task=\['x'\]: use"),
    ({"revision": 5}, "revision 5 is an int"),
    ({"token": 5}, "token is an int"),
    ({"trust_remote_code": "no"}, "trust_remote_code 'no' is a str"),
    ({"model": ""}, "'': there is no such folder or file; pass a local"),
    ({"model": "a" * 5000}, "File name too long.*; pass a local"),
    ({"model": "a\0b"}, "pass a local"),
    ({"model": None}, "not a NoneType"),
]


@pytest.mark.parametrize(("given", "message"), BAD_ARGUMENTS, ids=[next(iter(given)) for given, _ in BAD_ARGUMENTS])
def test_compile_arguments_are_checked_before_loading(
    given: dict, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is loaded before they are known to be. A folder of a model is not found by an empty name."""
    monkeypatch.setattr(api, "compile_here", lambda *_: pytest.fail("took it"))
    monkeypatch.setattr(api, "compile_in_workers", lambda *_, **__: pytest.fail("took it"))
    monkeypatch.chdir(TINY_FOLDER)
    with pytest.raises(InvalidInput, match=message):
        detcompile.compile(**({"model": "tiny-draft"} | given))


def test_weights_made_in_inference_mode_are_refused_and_those_of_a_name_are_not_made_in_it(monkeypatch) -> None:
    with torch.inference_mode():
        model = random_model("llama", torch.float32, num_hidden_layers=1)
    with pytest.raises(InvalidInput, match=r"embed_tokens.weight was created in torch.inference_mode"):
        detcompile.compile(model)
    monkeypatch.setattr(api, "compile_here", lambda module, *_: SimpleNamespace(model=module, tokenizer=None))
    with torch.inference_mode():
        loaded = detcompile.compile("tiny", device="cpu").model
    assert not any(parameter.is_inference() for parameter in loaded.parameters())


def test_the_fingerprint_of_weights_that_do_not_run_is_refused() -> None:
    model = certified(random_model("qwen3", torch.float32, num_hidden_layers=1))
    up = model.model.model.layers[0].mlp.up_proj.weight
    with torch.no_grad():
        up.mul_(2)  # in place, before the fingerprint is read: seen
    up.data = up.data.clone()
    with pytest.raises(InvalidInput, match=r"layers\.0\.mlp\.up_proj\.weight was given another storage"):
        _ = model.fingerprint


def test_files_overwritten_or_cut_change_no_compiled_model(tmp_path: Path) -> None:
    random_model("qwen3", torch.float32, num_hidden_layers=1, tie_word_embeddings=True).save_pretrained(tmp_path)
    loaded = load_checkpoint(tmp_path, None)
    assert in_mapped_file(loaded.parameters()), "the loader maps no file: nothing is tested"
    model = certified(loaded)
    assert in_mapped_file(named_weights(loaded, every_name=True).values()) == []
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    before, file = model.fingerprint, tmp_path / "model.safetensors"
    with file.open("r+b") as stream:
        stream.seek(-(file.stat().st_size // 2), 2)
        stream.write(bytes(1000))
    assert model.fingerprint == before
    os.truncate(file, 10)
    assert model.fingerprint == before


def test_fingerprint_has_the_parts_of_the_contract() -> None:
    base, again, changed, same = (random_model("gpt2", torch.float32, n_layer=1) for _ in range(4))
    base = certified(base)
    assert certified(again).fingerprint == base.fingerprint
    with torch.no_grad():
        changed.transformer.h[0].mlp.c_fc.weight[3, 5] += 1e-3
    others = {
        "one weight": certified(changed),
        "numerics": certified(same, numerics=Numerics(tp_sizes=(1, 2))),
        "dtype": certified(random_model("gpt2", torch.bfloat16, n_layer=1)),
        "context": certified(random_model("gpt2", torch.float32, n_layer=1), max_context=512),
    }
    prints = {base.fingerprint, *(model.fingerprint for model in others.values())}
    assert len(prints) == 1 + len(others)


def test_one_graph_serves_every_token_count_and_many_models() -> None:
    """Dynamo keeps few graphs for a code object: more models in one process than it would keep each have their own."""
    with torch._dynamo.config.patch(recompile_limit=2):
        models = [certified(random_model("gpt2", torch.bfloat16, n_layer=1)) for _ in range(3)]
    for model in (models[0], models[-1]):
        for length in (1, 2, 70):
            assert model(torch.zeros(1, length, dtype=torch.long)).logits.shape == (1, length, VOCAB_SIZE)


@contextlib.contextmanager
def generation_config(model: CompiledModel, **settings: object) -> Iterator[None]:
    before = copy.deepcopy(model.model.generation_config)
    model.model.generation_config.update(**settings)
    try:
        yield
    finally:
        model.model.generation_config = before


@pytest.mark.parametrize("config", [{}, {"repetition_penalty": 1.7}, {"max_new_tokens": 9}, {"max_length": 23}])
def test_generate_defaults_come_from_generation_config(config: dict) -> None:
    """The penalty counts the prompt too; with one of 1.7 plain transformers' greedy tokens are others than without."""
    model = compiled("qwen3", torch.float32)
    plain = random_model("qwen3", torch.float32)
    plain.generation_config.update(**config)
    with generation_config(model, **config):
        actual = model.generate(PROMPT, eos_token_id=())
    assert torch.equal(actual, plain.generate(PROMPT, do_sample=False))
    assert torch.equal(actual, model.generate(PROMPT, eos_token_id=())) == (not config)


def test_sampling_that_the_generation_config_asks_for_is_done_and_can_be_overruled() -> None:
    model = compiled("qwen3", torch.float32)
    greedy = model.generate(PROMPT, eos_token_id=())
    drawn = model.generate(PROMPT, do_sample=True, temperature=0.9, top_p=0.8, seed=3, eos_token_id=())
    with generation_config(model, do_sample=True, temperature=0.9, top_p=0.8):
        assert torch.equal(model.generate(PROMPT, seed=3, eos_token_id=()), drawn)
        assert torch.equal(model.generate(PROMPT, do_sample=False, eos_token_id=()), greedy)
    assert not torch.equal(drawn, greedy)


@pytest.mark.parametrize("config", [{"num_beams": 4}, {"no_repeat_ngram_size": 3}, {"max_length": 10}])
def test_a_generation_config_that_cannot_be_served_is_refused_by_name(config: dict) -> None:
    model = compiled("qwen3", torch.float32)
    (name,) = config
    with generation_config(model, **config), pytest.raises(InvalidInput, match=f"generation_config.{name}"):
        model.generate(PROMPT)
