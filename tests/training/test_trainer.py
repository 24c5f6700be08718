"""A trainer's forward has serving's bytes; its gradients do not depend on micro-batches, packing or order."""

import copy
import pickle
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.hooks import RemovableHandle

import detcompile
from detcompile import EngineConfig, InvalidInput, Numerics, NumericsError, SamplingParams, UnsupportedModel
from detcompile.passes.training import tracing
from detcompile.training import packing
from tests.exhaustive import EXHAUSTIVE, EXHAUSTIVE_BY_CASE, exhaustive_unless
from tests.model_cases import MAX_CONTEXT, compiled, random_model
from tests.training.cases import ARCHITECTURES, add_gradients, gradient_errors, gradients, padded, sequences, trained

QUICK = {("qwen3", torch.bfloat16)}
CASES = [(name, dtype) for name in ARCHITECTURES for dtype in (torch.bfloat16, torch.float32)]
LENGTHS = [1, 2, 63, 64, 65, 130, 513, 700]  # over blocks of keys and chunks
SHORT = [40, 7, 130, 2, 64, 15]
quick_and_all = pytest.mark.parametrize(
    ("name", "dtype"), exhaustive_unless(QUICK.__contains__, CASES, EXHAUSTIVE_BY_CASE)
)


def by_engine(name: str, dtype: torch.dtype, rows: list[Tensor]) -> list[Tensor]:
    """Return an engine's log-probabilities of each prompt's tokens after the first, computed in several steps."""
    engine = compiled(name, dtype).engine(EngineConfig(num_blocks=200, max_num_batched_tokens=100))
    requests = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0, ignore_eos=True)
    outputs = engine.generate([row.tolist() for row in rows], requests, progress=False)
    return [torch.tensor([entry.logprob for entry in output.prompt_logprobs[1:]]) for output in outputs]


@quick_and_all
def test_logprobs_equal_engine_logprobs(name: str, dtype: torch.dtype):
    rows = sequences(LENGTHS)
    trainer = trained(name, dtype)
    ids, mask = padded(rows, left=[3, 0, 5, 0, 0, 70, 0, 1])
    with torch.no_grad():
        packed = trainer.logprobs(ids, mask)
        alone = [trainer.logprobs(row[None]) for row in rows]
    for place, served in enumerate(by_engine(name, dtype, rows)):
        actual = packed[place][(mask[place, 1:] & mask[place, :-1]).bool()]
        assert torch.equal(actual, served)
        assert torch.equal(actual, alone[place][0])


@quick_and_all
def test_logits_equal_served_logits(name: str, dtype: torch.dtype):
    ids, mask = padded(sequences(SHORT))
    assert torch.equal(trained(name, dtype)(ids, mask).logits.detach(), compiled(name, dtype)(ids, mask).logits)


@quick_and_all
def test_certificate_has_serving_orders(name: str, dtype: torch.dtype):
    certificate = trained(name, dtype).certificate
    assert set(certificate.forward.orders) == set(compiled(name, dtype).certificate.orders)
    assert any(order.startswith("Exact(") for order in certificate.backward.orders)
    assert "backward" in str(certificate) and certificate.to_json()


@quick_and_all
def test_gradients_are_as_accurate_as_torchs(name: str, dtype: torch.dtype):
    rows = sequences(SHORT)
    for group, ours, torchs in gradient_errors(trained(name, dtype), name, dtype, rows):
        assert ours <= (1.05 if dtype is torch.bfloat16 else 1.25) * torchs, group


@quick_and_all
@settings(max_examples=4)
@given(data=st.data())
def test_gradients_are_equal_for_any_micro_batches(name: str, dtype: torch.dtype, data: st.DataObject):
    rows = sequences(SHORT)
    trainer = trained(name, dtype)
    order = data.draw(st.permutations(range(len(rows))))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(rows) - 1))))
    groups = [order[start:end] for start, end in zip([0, *cuts], [*cuts, len(rows)], strict=True)]
    one, many = gradients(trainer, rows, [range(len(rows))]), gradients(trainer, rows, groups)
    assert one.keys() == many.keys() == dict(trainer.named_parameters()).keys()
    assert not [name for name in one if not torch.equal(one[name], many[name])]


def test_each_sequence_starts_a_new_leaf():
    """Leaves of 64 tokens, so that every sequence has several."""
    rows = sequences([200, 70, 129])
    trainer = trained("llama", torch.bfloat16, Numerics(token_leaf=64))
    one, other = gradients(trainer, rows, [[0, 1, 2]]), gradients(trainer, rows, [[2], [1, 0]])
    assert not [name for name in one if not torch.equal(one[name], other[name])]


def test_label_loss_has_gradients_of_logprobs():
    rows, trainer = sequences(SHORT), trained("qwen3")
    ids, mask = padded(rows)
    trainer.zero_grad()
    loss = trainer(ids, mask, labels=ids, num_items_in_batch=200).loss
    loss.backward()
    actual = {name: parameter.grad.clone() for name, parameter in trainer.named_parameters()}
    trainer.zero_grad()
    logprobs = trainer.logprobs(ids, mask)
    (-(logprobs / 200).sum()).backward()
    assert not [name for name, parameter in trainer.named_parameters() if not torch.equal(parameter.grad, actual[name])]
    assert float(loss) == pytest.approx(-float(logprobs.sum()) / 200, rel=1e-5)
    assert float(trainer(ids, mask, labels=ids).loss) == pytest.approx(-float(logprobs.sum()) / 252, rel=1e-5)


def test_temperature_divides_logits_and_entropy_has_a_gradient():
    rows, trainer = sequences([20, 9]), trained("qwen3")
    ids, mask = padded(rows)
    trainer.zero_grad()
    logprobs = trainer.logprobs(ids, mask, temperature=2.0)
    whole = (trainer(ids, mask).logits.detach().float() / 2.0).log_softmax(-1)[:, :-1]
    expected = whole.gather(2, ids[:, 1:, None]).squeeze(2) * (mask[:, 1:] & mask[:, :-1])
    torch.testing.assert_close(logprobs.detach(), expected, rtol=1e-5, atol=1e-5)
    entropy = -(whole.exp() * whole).sum(-1) * (mask[:, 1:] & mask[:, :-1])
    torch.testing.assert_close(logprobs.entropy.detach(), entropy, rtol=1e-5, atol=1e-5)
    logprobs.entropy.sum().backward()
    assert trainer.get_parameter("lm_head.weight").grad.abs().max() > 0


@pytest.mark.parametrize("filters", [{"temperature": 0.7}, {"top_k": 40, "top_p": 0.9, "min_p": 0.01}])
def test_logprobs_use_sampling_distribution(filters: dict[str, Any]):
    params = SamplingParams(max_tokens=9, logprobs=0, sampling_logprobs=0, seed=3, ignore_eos=True, **filters)
    engine = compiled("qwen3", torch.bfloat16).engine(EngineConfig(num_blocks=20))
    rows = [row.tolist() for row in sequences([20, 9])]
    for row, output in zip(rows, engine.generate(rows, params, progress=False)):
        [sample] = output.outputs
        actual = trained("qwen3").logprobs(torch.tensor([row + sample.token_ids]), **filters)[0, len(row) - 1 :]
        assert actual.tolist() == [entry.sampling.logprob for entry in sample.logprobs]


def test_sequences_of_one_token_have_no_logprobs():
    trainer = trained("qwen3")
    trainer.zero_grad()
    logprobs = trainer.logprobs(torch.tensor([[5, 0], [7, 0]]), torch.tensor([[1, 0], [1, 0]]))
    assert torch.equal(logprobs.detach(), torch.zeros(2, 1))


def test_parameters_have_hugging_face_names():
    trainer = trained("qwen3")
    model = random_model("qwen3", torch.bfloat16)
    assert {name for name, _ in trainer.named_parameters()} == {name for name, _ in model.named_parameters()}
    assert trainer.state_dict().keys() == model.state_dict().keys()
    for name, parameter in model.named_parameters():
        assert torch.equal(trainer.get_parameter(name).bfloat16(), parameter)


def test_trainer_made_in_inference_mode_trains():
    model, rows = random_model("qwen3", torch.bfloat16), sequences([20])
    expected = gradients(trained("qwen3"), rows, [[0]])
    with torch.inference_mode():
        trainer = detcompile.trainer(model, max_context=MAX_CONTEXT)
    actual = gradients(trainer, rows, [[0]])
    assert not [name for name in expected if not torch.equal(actual[name], expected[name])]


def test_added_head_trains_beside_the_model():
    trainer, rows = trained("qwen3"), sequences([20])
    names = set(trainer.serving_weights())
    expected = gradients(trainer, rows, [[0]])
    trainer.value_head = nn.Linear(4, 1)
    try:
        trainer.zero_grad()
        trainer.value_head(torch.ones(4)).backward()
        add_gradients(trainer, rows, [[0]])
        assert not [name for name in expected if not torch.equal(trainer.get_parameter(name).grad, expected[name])]
        assert set(trainer.serving_weights()) == names
    finally:
        del trainer.value_head


def test_gradients_are_float32_and_add_up_exactly():
    """Additions go to the exact sum, not to the rounded ``.grad``. Setting None, zeroing and scaling reset it."""
    rows, trainer = sequences(SHORT), trained("qwen3")
    once = gradients(trainer, rows, [range(6)])
    twice = gradients(trainer, rows, [range(6), range(6)])
    name = "model.layers.0.mlp.up_proj.weight"
    assert twice[name].dtype is torch.float32
    assert torch.equal(twice[name], 2 * once[name])
    trainer.get_parameter(name).grad.zero_()
    ids, mask = padded(rows)
    trainer.logprobs(ids, mask).sum().backward()
    first = trainer.get_parameter(name).grad.clone()
    trainer.zero_grad()
    trainer.logprobs(ids, mask).sum().backward()
    assert torch.equal(first, trainer.get_parameter(name).grad)


def test_unnormalized_loss_is_refused():
    rows, trainer = sequences(SHORT), trained("qwen3")
    ids, mask = padded(rows)
    trainer.zero_grad()
    with pytest.raises(NumericsError, match="Divide the loss"):
        (trainer.logprobs(ids, mask).sum() * 2.0**20).backward()
    trainer.zero_grad()


def test_zero_grad_after_forward_resets_bound():
    rows, trainer = sequences([20, 9]), trained("qwen3")
    ids, mask = padded(rows)
    bounds = []
    trainer.zero_grad()
    for _ in range(3):
        loss = trainer.logprobs(ids, mask).sum() / 100
        trainer.zero_grad()
        loss.backward()
        bounds.append(trainer._guard.bounds(trainer.device))
    assert torch.equal(bounds[2], bounds[0]) and bool((bounds[0] > 0).any())
    (requests,) = torch.autograd.grad(trainer.logprobs(ids, mask).sum(), [trainer.get_parameter("model.norm.weight")])
    assert requests.dtype is torch.float64
    assert {parameter.grad.dtype for parameter in trainer.parameters()} == {torch.float32}
    trainer.zero_grad()


def test_trainer_with_inexact_gradients_is_refused():
    trainer, name = trained("qwen3"), "model.norm.weight"
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(InvalidInput, match="a trainer cannot be copied or pickled"):
            copied(trainer)
    item = trainer.get_parameter(name)
    trainer.load_state_dict({name: item.detach().clone()}, strict=False, assign=True)
    with pytest.raises(InvalidInput, match=f"{name} is not the parameter"):
        trainer.logprobs(torch.tensor([[1, 2]]))
    trainer.get_submodule("model.norm").weight = item
    trainer.logprobs(torch.tensor([[1, 2]]))


SPLITS = [[0, 1, 2, 3, 4, 5]], [[5, 3], [1], [0, 2, 4]]


@pytest.mark.parametrize("before", [True, False])
def test_gradients_with_penalty_are_equal_for_any_split(before: bool):
    rows, trainer, actual = sequences([20, 9, 5, 7, 3, 12]), trained("qwen3"), []
    for split in SPLITS:
        trainer.zero_grad()
        for number, group in enumerate(split):
            if number == (0 if before else len(split) - 1):
                sum(parameter.pow(2).sum() for parameter in trainer.parameters()).mul(0.01).backward()
            add_gradients(trainer, rows, [group])
        actual.append([parameter.grad for parameter in trainer.parameters()])
    assert all(map(torch.equal, *actual))
    trainer.zero_grad()
    penalty = trainer.get_parameter("model.norm.weight").mul(1e-9).sum()
    with pytest.raises(InvalidInput, match=r"model\.norm\.weight received gradients from the trainer and"):
        (trainer.logprobs(*padded(rows)).sum() / 100 + penalty).backward()
    trainer.zero_grad()


def test_concurrent_backwards_give_same_gradients():
    rows, trainer = sequences([20, 9, 5, 7, 3, 12]), trained("qwen3")
    one = gradients(trainer, rows, [range(6)])
    trainer.zero_grad()
    threads = [
        threading.Thread(target=add_gradients, args=(trainer, rows, [group])) for group in ([0, 1], [2], [3, 4, 5])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not [name for name in one if not torch.equal(one[name], trainer.get_parameter(name).grad)]


@pytest.mark.parametrize("scale", [2.0**-34, 2.0**-60])
def test_loss_with_gradients_below_grid_warns(scale: float):
    rows, trainer = sequences([20, 9]), trained("qwen3")
    trainer.zero_grad()
    loss = trainer.logprobs(*padded(rows)).sum() * scale
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss.backward()
    assert ["is below 2^-32" in str(entry.message) for entry in caught] == [True]
    if scale == 2.0**-60:
        assert not any(bool(parameter.grad.any()) for parameter in trainer.parameters())
    trainer.zero_grad()


def ignored(*_: Any) -> None:
    """A hook."""


@pytest.mark.parametrize(
    "register",
    [
        lambda module: module.register_forward_hook(ignored),
        lambda module: module.register_forward_pre_hook(ignored),
        lambda module: module.register_full_backward_hook(ignored),
        lambda module: module.register_full_backward_pre_hook(ignored),
    ],
    ids=["forward", "forward pre", "backward", "backward pre"],
)
@pytest.mark.parametrize("name", ["model.layers.0", "model.layers.0.mlp", "lm_head"])
def test_hooks_on_modules_are_refused_by_name(name: str, register: Callable[[nn.Module], RemovableHandle]):
    trainer, ids = trained("qwen3"), torch.tensor([[1, 2]])
    handle = register(trainer.get_submodule(name))
    try:
        for call in (trainer, trainer.logprobs):
            with pytest.raises(InvalidInput, match=f"{name} has hooks, which would be ignored"):
                call(ids)
    finally:
        handle.remove()
    trainer(ids)


def test_hooks_on_all_modules_and_replaced_forwards_are_refused():
    trainer, ids = trained("qwen3"), torch.tensor([[1, 2]])
    handle = nn.modules.module.register_module_forward_hook(ignored)
    try:
        with pytest.raises(InvalidInput, match="hooks are registered for all modules"):
            trainer(ids)
    finally:
        handle.remove()
    module = trainer.get_submodule("model.norm")
    module.forward = ignored
    try:
        with pytest.raises(InvalidInput, match=r"model\.norm has a replaced forward"):
            trainer(ids)
    finally:
        del module.forward
    seen: list[Any] = []
    handle = trainer.register_forward_hook(lambda *given: seen.append(given))
    trainer(ids)
    handle.remove()
    assert len(seen) == 1


@pytest.mark.parametrize("option", ["retain_graph", "create_graph"])
def test_retain_graph_is_refused(option: str):
    trainer, ids = trained("qwen3"), torch.tensor([[1, 2, 3]])
    trainer.zero_grad()
    for loss in (trainer(ids, labels=ids).loss, trainer.logprobs(ids).sum()):
        with pytest.raises(InvalidInput, match="a trainer's backward runs once"):
            loss.backward(**{option: True})


def test_torch_compile_does_not_change_trainer():
    trainer, ids = trained("qwen3"), torch.tensor([[1, 2, 3]])
    one = gradients(trainer, sequences([20]), [[0]])
    compiled = torch.compile(trainer)
    assert torch.equal(compiled(ids).logits, trainer(ids).logits)
    assert torch.equal(torch.compile(lambda ids: trainer.logprobs(ids) * 2)(ids), trainer.logprobs(ids) * 2)
    other = gradients(compiled, sequences([20]), [[0]])
    assert not [name for name in one if not torch.equal(one[name], other[f"_orig_mod.{name}"])]


def test_functional_call_accepts_tensors_without_gradient():
    trainer, ids = trained("qwen3"), torch.tensor([[1, 2, 3]])
    for name in ("model.norm.weight", "model.layers.0.mlp.up_proj.weight"):
        given = {name: trainer.get_parameter(name).detach() * 0.5}
        logits = torch.func.functional_call(trainer, given, (ids,)).logits
        assert not torch.equal(logits, trainer(ids).logits)
        with pytest.raises(InvalidInput, match=f"{name} is not the parameter .*functional_call"):
            torch.func.functional_call(trainer, {name: given[name].requires_grad_()}, (ids,))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize(
    "transform", ["grad", "jvp", "vmap", "export", "make_fx", "jit.trace", "jit.trace of logprobs", "jit.script"]
)
def test_torch_func_transforms_are_refused(transform: str):
    trainer, ids = trained("qwen3"), torch.tensor([[1, 2, 3]])
    weights = {"model.norm.weight": trainer.get_parameter("model.norm.weight").detach()}
    loss = lambda given: torch.func.functional_call(trainer, given, (ids,), {"labels": ids}).loss  # noqa: E731
    calls = {
        "grad": lambda: torch.func.grad(loss)(weights),
        "jvp": lambda: torch.func.jvp(loss, (weights,), (weights,)),
        "vmap": lambda: torch.func.vmap(lambda ids: trainer.logprobs(ids[None]))(ids),
        "export": lambda: torch.export.export(trainer, (ids,), strict=False),
        "make_fx": lambda: make_fx(trainer)(ids),
        "jit.trace": lambda: torch.jit.trace(trainer, (ids,)),
        "jit.trace of logprobs": lambda: torch.jit.trace(lambda ids: trainer.logprobs(ids), (ids,)),
        "jit.script": lambda: torch.jit.script(trainer),
    }
    with pytest.raises(InvalidInput, match=r"make_fx cannot trace a compiled model or a trainer"):
        calls[transform]()


def test_recomputed_layers_have_the_same_gradients():
    rows, trainer = sequences(SHORT), trained("qwen3")
    kept = gradients(trainer, rows, [range(6)])
    for block in trainer.blocks:
        block.recompute = True
    try:
        again = gradients(trainer, rows, [range(6)])
    finally:
        for block in trainer.blocks:
            block.recompute = False
    assert not [name for name in kept if not torch.equal(kept[name], again[name])]


def test_recomputation_with_other_weights_is_refused():
    trainer = trained("qwen3")
    (first, *_) = trainer.blocks
    first.recompute = True
    try:
        logprobs = trainer.logprobs(torch.tensor([[5, 6, 7]]))
        with torch.no_grad():
            next(first.parameters()).mul_(1.0)
        with pytest.raises(InvalidInput, match=r"parameters of model\.layers\.0 were changed after the forward"):
            logprobs.sum().backward()
    finally:
        first.recompute = False


def test_chunked_logits_have_same_bits(monkeypatch: pytest.MonkeyPatch):
    rows, trainer = sequences(SHORT), trained("qwen3")
    whole = [gradients(trainer, rows, [range(6)]), trainer.logprobs(*padded(rows))]
    monkeypatch.setattr(packing, "ROWS_AT_ONCE", 16)
    cut = [gradients(trainer, rows, [range(6)]), trainer.logprobs(*padded(rows))]
    assert not [name for name in whole[0] if not torch.equal(whole[0][name], cut[0][name])]
    assert torch.equal(whole[1], cut[1])
    assert torch.equal(whole[1].entropy, cut[1].entropy)


def test_deterministic_algorithms_flag_keeps_gradients():
    rows, trainer = sequences([20, 9]), trained("qwen3")
    before = gradients(trainer, rows, [range(2)])
    torch.use_deterministic_algorithms(True)
    try:
        after = gradients(trainer, rows, [range(2)])
    finally:
        torch.use_deterministic_algorithms(False)
    assert not [name for name in before if not torch.equal(before[name], after[name])]


@EXHAUSTIVE  # tests/training/test_low_rank.py freezes all but adapters
def test_frozen_parameters_do_not_change_other_gradients():
    rows = sequences(SHORT)
    whole = gradients(trained("qwen3"), rows, [range(6)])
    model = random_model("qwen3", torch.bfloat16)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("self_attn" in name)
    trainer = detcompile.trainer(model, max_context=MAX_CONTEXT)
    frozen = trainer.get_parameter("model.layers.0.mlp.up_proj.weight")
    assert frozen.dtype is torch.bfloat16  # no copy in float32
    products = [entry for entry in trainer.certificate.backward.entries if "token_matmul" in entry.op]
    assert sum(entry.count for entry in products) == 8
    actual = gradients(trainer, rows, [[5, 1], [0, 2, 3, 4]])
    assert actual.keys() == {name for name in whole if "self_attn" in name}
    assert not [name for name in actual if not torch.equal(actual[name], whole[name])]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("qwen3_moe", "Qwen3MoeForCausalLM: mixtures of experts cannot be trained"),
        ("mixtral", "MixtralForCausalLM: mixtures of experts"),
        ("lfm2", "layers that carry a state from token to token cannot be trained"),
    ],
)
def test_untrainable_model_is_refused_before_tracing(name: str, message: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tracing, "find_repeats", None)  # nothing was traced before
    with pytest.raises(UnsupportedModel, match=message):
        detcompile.trainer(random_model(name, torch.bfloat16), max_context=MAX_CONTEXT)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"input_ids": torch.tensor([[1, 500]])}, "holds token 500"),
        ({"input_ids": torch.tensor([[1, 2]]), "labels": torch.tensor([[-100, -100]])}, "no token has a label"),
        ({"input_ids": torch.tensor([[1, 2]]), "labels": torch.tensor([[1]])}, "must have the shape of input_ids"),
        ({"input_ids": torch.tensor([[1, 2]]), "labels": torch.tensor([[1.0, 2.0]])}, "labels: it holds torch.float32"),
        ({"input_ids": torch.tensor([[1, 2]]), "labels": torch.ones(1, 2, device="meta")}, "labels: it is on the meta"),
        ({"input_ids": torch.tensor([[1, 2]]), "labels": torch.tensor([[1, 500]])}, "label 500: labels are 0 to 159"),
        ({"input_ids": torch.tensor([[1, 2]]), "labels": torch.tensor([[1, -1]])}, "label -1: labels are 0 to 159"),
        *(
            ({"input_ids": torch.tensor([[1, 2]]), "labels": torch.tensor([[1, 2]]), "num_items_in_batch": count}, text)
            for count, text in (
                (0, r"num_items_in_batch=0\.0 divides"),
                (-3, r"num_items_in_batch=-3\.0 divides"),
                (torch.inf, "num_items_in_batch=inf divides"),
                (torch.nan, "num_items_in_batch is NaN: give a number"),
                ("2", "num_items_in_batch '2' is a str"),
                (torch.tensor([2, 3]), r"num_items_in_batch .*: give a number"),
            )
        ),
        ({"input_ids": torch.tensor([[1, 2]]), "past_key_values": 1}, "not supported"),
        ({"input_ids": torch.tensor([[1, 2]]), "return_dict": True}, "use .*, labels and num_items_in_batch$"),
        ({"input_ids": torch.tensor([[1, 2]]), "position_ids": torch.tensor([[0, 0]])}, "several packed texts"),
    ],
)
def test_invalid_batches_are_refused(call: dict[str, Any], message: str):
    with pytest.raises(InvalidInput, match=message):
        trained("qwen3")(**call)


@pytest.mark.parametrize("temperature", [0, -1.0, 1e-50, torch.inf, torch.nan, "1", None, torch.tensor([1.0, 2.0])])
def test_invalid_temperature_is_refused(temperature: Any):
    with pytest.raises(InvalidInput, match=r"temperature.* (give a number|must be at least 1e-05, and finite)"):
        trained("qwen3").logprobs(torch.tensor([[1, 2]]), temperature=temperature)


def test_micro_batch_may_have_no_labels():
    ids = torch.tensor([[1, 2]])
    assert float(trained("qwen3")(ids, labels=torch.full_like(ids, -100), num_items_in_batch=5).loss) == 0.0
