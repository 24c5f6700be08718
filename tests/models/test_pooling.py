"""Classifiers, reward models and embeddings agree with Hugging Face's and depend on their own sequence only."""

import copy
import functools
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BatchEncoding,
    PreTrainedModel,
    TextClassificationPipeline,
)

import detcompile
from detcompile import CompiledClassifier, CompiledEmbedder, InvalidInput, UnsupportedModel
from detcompile.models import pooling
from detcompile.orders.numerics import row_order
from detcompile.passes.modules.pooling_heads import as_pooling_model, attends_both_ways
from tests.bits import assert_bitwise_equal
from tests.exhaustive import exhaustive_unless
from tests.model_cases import without_inductor

VOCAB_SIZE, PAD, MAX_CONTEXT, LABELS = 120, 0, 200, 3
SIZES = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"vocab_size": VOCAB_SIZE, "pad_token_id": PAD, "num_labels": LABELS, "max_position_embeddings": MAX_CONTEXT}
GROUPED = {"num_key_value_heads": 2}
GPT2 = {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": MAX_CONTEXT}
DISTILBERT = {"dim": 48, "hidden_dim": 80, "n_layers": 2, "n_heads": 4}
CLASSIFIER, BASE = AutoModelForSequenceClassification, AutoModel
CASES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "qwen2 classifier": (CLASSIFIER, "qwen2", GROUPED),
    "llama reward model": (CLASSIFIER, "llama", GROUPED | {"num_labels": 1}),
    "gpt2 classifier": (CLASSIFIER, "gpt2", GPT2),
    "gemma2 classifier": (CLASSIFIER, "gemma2", GROUPED | {"head_dim": 16, "sliding_window": 20}),
    "bert classifier": (CLASSIFIER, "bert", {}),
    "roberta classifier": (CLASSIFIER, "roberta", {"pad_token_id": 1}),
    "distilbert classifier": (CLASSIFIER, "distilbert", DISTILBERT),
    "electra classifier": (CLASSIFIER, "electra", {"embedding_size": 48}),
    "qwen3 base": (BASE, "qwen3", GROUPED),
    "bert base": (BASE, "bert", {}),
    "xlm-roberta base": (BASE, "xlm-roberta", {"pad_token_id": 1}),
}
USUAL = ("qwen2 classifier", "bert classifier", "xlm-roberta base")
BOTH_WAYS = ("bert", "roberta", "distilbert", "electra", "xlm-roberta")


def random_model(name: str) -> PreTrainedModel:
    """In eval mode; the same weights at every call, larger than the usual initialization."""
    auto, kind, changes = CASES[name]
    torch.manual_seed(0)
    model: PreTrainedModel = auto.from_config(AutoConfig.for_model(kind, **(SIZES | changes)), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0) if parameter.dim() > 1 else parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


@functools.cache
def compiled(name: str) -> Any:
    with without_inductor():
        return detcompile.compile(random_model(name))


def draw_rows(lengths: list[int], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(5, VOCAB_SIZE, (length,), generator=generator) for length in lengths]


def padded(rows: list[Tensor], pad: int, left: bool = False) -> tuple[Tensor, Tensor]:
    longest = max(map(len, rows))
    ids, mask = torch.full((len(rows), longest), pad), torch.zeros(len(rows), longest, dtype=torch.int64)
    for index, row in enumerate(rows):
        place = slice(longest - len(row), longest) if left else slice(0, len(row))
        ids[index, place], mask[index, place] = row, 1
    return ids, mask


def pad_of(name: str) -> int:
    return CASES[name][2].get("pad_token_id", PAD)


@pytest.mark.parametrize("name", exhaustive_unless(lambda name: name in USUAL, CASES))
def test_it_says_what_hugging_face_says(name: str) -> None:
    model, plain = compiled(name), random_model(name)
    rows = draw_rows([40, 7, 23, 1])
    ids, mask = padded(rows, pad_of(name))
    actual = model(ids, attention_mask=mask)[0]
    with torch.no_grad():
        alone = [plain(input_ids=row[None])[0][0] for row in rows]
    assert isinstance(model, CompiledEmbedder if CASES[name][0] is BASE else CompiledClassifier)
    for ours, theirs, length in zip(actual, alone, map(len, rows)):
        item = ours[:length] if isinstance(model, CompiledEmbedder) else ours
        torch.testing.assert_close(item, theirs, atol=2e-5, rtol=2e-5)
    assert attends_both_ways(model.model) == (CASES[name][1] in BOTH_WAYS)


@pytest.mark.parametrize("name", exhaustive_unless(lambda name: name in USUAL, CASES))
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=5),
    left=st.booleans(),
    seed=st.integers(0, 9),
)
def test_a_row_ignores_its_neighbors(name: str, lengths: list[int], left: bool, seed: int) -> None:
    model, rows = compiled(name), draw_rows(lengths, seed)
    ids, mask = padded(rows, pad_of(name), left)
    actual = model(ids, attention_mask=mask)[0]
    for ours, row, kept in zip(actual, rows, mask.bool()):
        alone = model(row[None])[0][0]
        assert_bitwise_equal(ours[kept] if isinstance(model, CompiledEmbedder) else ours, alone)


@pytest.mark.parametrize("name", ["qwen2 classifier", "bert classifier"])
def test_prompts_are_scored_alike_however_they_are_packed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = compiled(name), [row.tolist() for row in draw_rows([30, 12, 50, 3, 80, 41])]
    together = model.score(rows)
    monkeypatch.setattr(pooling, "STEP_TOKENS", 60)
    assert len(model._packs(rows)) == 4
    assert_bitwise_equal(model.score(rows), together)
    assert_bitwise_equal(torch.cat([model.score([row]) for row in rows]), together)
    ids, mask = padded([torch.tensor(row) for row in rows], PAD)
    assert_bitwise_equal(model(ids, mask).logits, together)


def test_what_a_tokenizer_gives_is_read_as_its_ids_without_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = compiled("bert classifier"), [[5, 6, 7], [9, 8]]
    monkeypatch.setitem(vars(model), "tokenizer", lambda text: {"input_ids": [ord(letter) for letter in text]})
    alone = model.score(rows)
    for left in (False, True):
        ids, mask = padded([torch.tensor(row) for row in rows], PAD, left)
        given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}
        for batch in (given, BatchEncoding(given), BatchEncoding({key: item.tolist() for key, item in given.items()})):
            assert_bitwise_equal(model.score(batch), alone)
    assert_bitwise_equal(model.score([{"input_ids": rows[0]}, {"prompt_token_ids": rows[1]}]), alone)
    assert_bitwise_equal(torch.cat([model.score(rows[0]), model.score(torch.tensor(rows[1]))]), alone)
    assert_bitwise_equal(model.score(iter(rows)), alone)
    assert_bitwise_equal(model.score({"prompt": "MN"}), model.score("MN"))
    assert_bitwise_equal(model.score(["MN", [5, 6, 7]]), torch.cat([model.score("MN"), alone[:1]]))
    monkeypatch.setitem(vars(model), "tokenizer", lambda text: {"input_ids": list(text.encode())})
    with pytest.raises(InvalidInput, match="character 1 is half of a surrogate pair"):
        model.score(["a", "b\ud800"])


@pytest.mark.parametrize("how", ["last", "first", "mean"])
def test_embeddings_are_pooled_of_a_rows_own_tokens(how: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = compiled("xlm-roberta base"), draw_rows([30, 1, 57])
    lists = [row.tolist() for row in rows]
    actual = model.embed(lists, pooling=how, normalize=False)
    for embedding, row in zip(actual, rows):
        states = model(row[None]).last_hidden_state[0]
        mean = torch.from_numpy(row_order(len(row), "cpu").evaluate(states.t().numpy())) / len(row)
        assert_bitwise_equal(embedding, {"last": states[-1], "first": states[0], "mean": mean}[how])
    monkeypatch.setattr(pooling, "STEP_TOKENS", 32)
    assert_bitwise_equal(model.embed(lists, pooling=how, normalize=False), actual)
    assert_bitwise_equal(torch.cat([model.embed([row], pooling=how, normalize=False) for row in lists]), actual)
    torch.testing.assert_close(model.embed(lists, pooling=how), nn.functional.normalize(actual))
    if how == "mean":
        assert_bitwise_equal(model.embed(lists, normalize=False), actual)


def test_tokens_of_an_encoder_see_those_behind_them_and_a_decoders_do_not() -> None:
    row = draw_rows([20])[0]
    changed = torch.cat([row[:-1], row[-1:] ^ 1])
    for name, moves in (("xlm-roberta base", True), ("qwen3 base", False)):
        first = [compiled(name)(ids[None]).last_hidden_state[0, 0] for ids in (row, changed)]
        assert torch.equal(*first) is not moves


def test_padding_behind_a_row_is_known_without_a_mask() -> None:
    model = compiled("qwen2 classifier")
    ids, mask = padded(draw_rows([9, 30]), PAD)
    assert_bitwise_equal(model(ids).logits, model(ids, attention_mask=mask).logits)
    assert_bitwise_equal(model(ids, return_dict=False)[0], model(ids).logits)


def test_an_encoders_padding_tokens_are_tokens_without_a_mask() -> None:
    """As transformers has it: its own encoders attend to them."""
    ids, _ = padded(draw_rows([9, 30]), PAD)
    with torch.no_grad():
        expected = random_model("bert classifier")(input_ids=ids).logits
    torch.testing.assert_close(compiled("bert classifier")(ids).logits, expected, atol=2e-5, rtol=2e-5)


def test_transformers_pipeline_runs_on_it() -> None:
    class Tokenizer:
        """As many tokens as a text has characters."""

        model_max_length = MAX_CONTEXT
        init_kwargs: ClassVar[dict[str, Any]] = {}

        def __call__(self, text: Any, **_: Any) -> dict[str, Any]:
            texts = [text] if isinstance(text, str) else text
            rows = [torch.tensor([5 + ord(character) % 100 for character in item]) for item in texts]
            ids, mask = padded(rows, PAD)
            return {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}

    model = compiled("bert classifier")
    tokenizer: Any = Tokenizer()
    classify = TextClassificationPipeline(model=model, tokenizer=tokenizer)
    answers = classify(["good", "not bad at all"], top_k=None)
    for text, answer in zip(["good", "not bad at all"], answers):
        scores = model(tokenizer(text)["input_ids"]).logits.softmax(-1)[0]
        assert {entry["label"]: entry["score"] for entry in answer} == pytest.approx(
            {f"LABEL_{index}": float(score) for index, score in enumerate(scores)}
        )


def test_new_weights_move_scores_and_the_fingerprint() -> None:
    with without_inductor():
        model = detcompile.compile(random_model("bert classifier"))
    prompts, before, fingerprint = [[5, 6, 7]], compiled("bert classifier").score([[5, 6, 7]]), model.fingerprint
    assert_bitwise_equal(model.score(prompts), before)
    other = random_model("bert classifier")
    with torch.no_grad():
        other.classifier.bias.add_(1)
    model.update_weights(other)
    assert model.fingerprint != fingerprint and not torch.equal(model.score(prompts), before)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: m(torch.tensor([[5, 6]]), token_type_ids=torch.tensor([[0, 1]])), "token_type_ids"),
        (lambda m: m([[5, 6]]), "input_ids must be a tensor"),
        (lambda m: m(torch.tensor([[5, VOCAB_SIZE]])), f"token {VOCAB_SIZE}"),
        (lambda m: m(torch.tensor([[5, 6]]), output_hidden_states=True), "output_hidden_states"),
        (lambda m: m(torch.tensor([[5, 6]]), labels=torch.tensor([1])), "labels is .* position_ids and return_dict"),
        (lambda m: m(torch.tensor([[5, 6]]), position_ids=torch.tensor([[0, 0]])), "several packed texts"),
        (lambda m: m.score([]), "no prompts"),
        (lambda m: m.score([[5], []]), "prompt 1 has no tokens"),
        (lambda m: m.score("a text"), "no tokenizer"),
        (lambda m: m.score([[5, "a"]]), "lists of token ids"),
        (lambda m: m.score([[5], [1.5]]), "lists of token ids: 1: entry 0, 1.5 is a float"),
        (lambda m: m.score([[5], {6: 7}]), "prompt 1: the prompt is a dict with 6, which cannot be served"),
        (lambda m: m.score({"text": "a"}), "prompt 0: the prompt is a dict with 'text', which cannot be served"),
        (lambda m: m.score({"a", "b"}), "is a set: give a string"),
        (lambda m: m.score(b"text"), "is a bytes: give a string"),
        (lambda m: m.score(torch.tensor(5)), "is a Tensor: give a string"),
        (lambda m: m.score([[5], [1 << 70]]), f"prompt 1 holds token {1 << 70}; ids are 0 to"),
        (lambda m: m.score({"input_ids": [[5, 6]], "token_type_ids": [[0, 1]]}), "token_type_ids other than 0"),
        (lambda m: m(torch.tensor([[5, 6]]), token_type_ids="pair"), "token_type_ids 'pair' is a str"),
        (lambda m: compiled("xlm-roberta base").embed([[5]], normalize="no"), "normalize 'no' is a str"),
        (lambda m: compiled("xlm-roberta base").embed([[5]], pooling=["last"]), r"pooling=\['last'\]"),
        (lambda m: m.score(5), "prompts 5 is an int: give a string"),
        (lambda m: m(torch.tensor([[5, 6]]), return_dict="no"), "return_dict 'no' is a str"),
        (lambda m: m.score([[5] * (MAX_CONTEXT + 1)]), "max_context"),
        (lambda m: compiled("xlm-roberta base").embed([[5]], pooling="max"), "pooling='max'"),
        (lambda m: detcompile.export(m, "m.pt2"), "CompiledClassifier"),
        (detcompile.LLM, "LLM needs a causal LM, but .* is a CompiledClassifier"),
        (lambda m: detcompile.compile("tiny", task="rank"), "task='rank'"),
    ],
)
def test_what_cannot_be_served_is_refused(call: Any, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        call(compiled("bert classifier"))
    assert not compiled("bert classifier").can_generate() and not hasattr(compiled("bert classifier"), "generate")


def test_heads_and_masks_that_are_not_known_are_refused() -> None:
    torch.manual_seed(0)
    sizes = SIZES | {"classifier_pooling": "mean", "cls_token_id": 1, "sep_token_id": 2}
    model = CLASSIFIER.from_config(AutoConfig.for_model("modernbert", **sizes)).eval()
    with pytest.raises(UnsupportedModel, match="ModernBertForSequenceClassification does not return what"):
        detcompile.compile(model)
    decoder = BASE.from_config(AutoConfig.for_model("qwen3", **(SIZES | GROUPED))).eval()
    for module in decoder.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = False  # and its masks say otherwise
    with pytest.raises(UnsupportedModel, match="create_causal_mask"):
        detcompile.compile(decoder)
    encoder = random_model("bert classifier")
    encoder.bert.encoder.layer[1].attention.self.is_causal = True
    with pytest.raises(UnsupportedModel, match="create_bidirectional_mask"):
        detcompile.compile(encoder)
    other = random_model("qwen2 classifier")
    other.__class__ = type("Scaled", (type(other),), {"forward": lambda self, **given: _scaled(self, given)})
    with pytest.raises(UnsupportedModel, match="Scaled does not return what"):
        as_pooling_model(other)


def test_what_cannot_be_compiled_is_refused_by_an_error_of_ours() -> None:
    model = random_model("bert classifier")
    with pytest.raises(UnsupportedModel, match="training mode"):
        detcompile.compile(model.train())
    with without_inductor():
        detcompile.compile(model.eval())
    with pytest.raises(InvalidInput, match="given to compile\\(\\) before"):
        detcompile.compile(model)
    sizes = {"d_model": 48, "d_ff": 80, "num_layers": 1, "num_heads": 4, "d_kv": 12, "vocab_size": VOCAB_SIZE}
    with pytest.raises(UnsupportedModel, match="has an encoder"):
        detcompile.compile(BASE.from_config(AutoConfig.for_model("t5", **sizes)).eval())
    with pytest.raises(InvalidInput, match="not a Linear"):
        detcompile.compile(nn.Linear(3, 3))
    with pytest.raises(InvalidInput, match="not a CompiledClassifier"):
        detcompile.compile(compiled("bert classifier"))


def _scaled(model: Any, given: dict[str, Any]) -> tuple[Tensor]:
    return (2 * super(type(model), model).forward(**given).logits,)


def test_a_folder_is_loaded_as_what_it_was_saved_from(tmp_path: Path) -> None:
    classifier = random_model("bert classifier")
    classifier.save_pretrained(tmp_path / "classifier")
    loaded = detcompile.load_model(tmp_path / "classifier", device="cpu")
    assert type(loaded) is type(classifier)
    for ours, theirs in zip(loaded.parameters(), classifier.parameters(), strict=True):
        assert_bitwise_equal(ours, theirs)
    masked = AutoModelForMaskedLM.from_config(copy.deepcopy(classifier.config)).eval()
    masked.save_pretrained(tmp_path / "masked")
    for task in (None, "embed"):
        base = detcompile.load_model(tmp_path / "masked", device="cpu", task=task)
        assert type(base).__name__ == "BertModel" and base.pooler is None
    with pytest.raises(InvalidInput, match="lacks weights of BertForSequenceClassification"):
        detcompile.load_model(tmp_path / "masked", device="cpu", task="classify")
    assert type(detcompile.load_model("tiny", device="cpu", task="embed")).__name__ == "Qwen3Model"
