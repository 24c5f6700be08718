"""A trainer that one rank holds keeps torch's rules for ``.grad``, or refuses what would move bits."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import detcompile
from detcompile import InvalidInput, Trainer, UnsupportedModel
from detcompile.training.sharding import mesh_of, whole
from tests.model_cases import MAX_CONTEXT, random_model
from tests.training.cases import add_gradients, sequences

ROWS = sequences([9, 5])
QUERY = "model.layers.0.self_attn.q_proj.weight"
Change = Callable[[Sequence[nn.Parameter]], object]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    store = tmp_path_factory.mktemp("rank") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    trainer = detcompile.trainer(random_model("qwen3", torch.bfloat16), max_context=MAX_CONTEXT)
    trainer.shard()
    yield trainer
    dist.destroy_process_group()


def gradients(trainer: Trainer) -> Mapping[str, Tensor]:
    """The gradients of all trained parameters; each must have one."""
    return {name: whole(held.grad).clone() for name, held in trainer.named_parameters() if held.requires_grad}


def after(trainer: Trainer, *steps: int | Change) -> Mapping[str, Tensor]:
    """Return the gradients after backwards of these sequences, with changes in between."""
    trainer.zero_grad()
    for step in steps:
        if isinstance(step, int):
            add_gradients(trainer, ROWS, [[step]])
        else:
            step(list(trainer.parameters()))
    return gradients(trainer)


def assert_same(actual: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    assert actual.keys() == wanted.keys()
    for name, values in wanted.items():
        assert torch.equal(actual[name], values), name


def zero(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad.zero_()


def multiply(factor: float) -> Change:
    def replace(parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            parameter.grad = parameter.grad * factor

    return replace


def test_torch_data_parallel_is_refused(shared: Trainer):
    with pytest.raises(UnsupportedModel, match=r"trainer\.shard\(\)"):
        DistributedDataParallel(shared)
    with pytest.raises(UnsupportedModel, match=r"trainer\.shard\(\)"):
        shared._replicate_for_data_parallel()  # as DataParallel does for each of several GPUs


def test_shard_rejects_bad_meshes_before_sharding(shared: Trainer, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(InvalidInput, match=r"already sharded over .*: create another"):
        shared.shard()
    for given in (init_device_mesh("cpu", (1, 1, 1)), "cpu", (1,), SimpleNamespace(ndim=1, device_type="cpu")):
        with pytest.raises(InvalidInput, match="pass a DeviceMesh of 'cpu'"):
            mesh_of(given, "cpu")
    with pytest.raises(InvalidInput, match="pass a DeviceMesh of 'cuda'"):
        mesh_of(init_device_mesh("cpu", (1,)), "cuda")
    assert mesh_of(None, "cpu").size() == 1
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    with pytest.raises(InvalidInput, match=r"call dist\.init_process_group\(\) first"):
        mesh_of(None, "cpu")


@pytest.mark.parametrize("change", [zero, multiply(0.0), multiply(-0.0)])
def test_zeros_start_a_new_sum(shared: Trainer, change: Change):
    assert_same(after(shared, 0, change, 1), after(shared, 1))


@pytest.mark.parametrize(
    "change",
    [
        multiply(0.5),
        lambda parameters: torch._foreach_mul_([held.grad for held in parameters], 0.5),
        lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 1e-3),
        lambda parameters: detcompile.clip_grad_norm_(parameters, 1e-3),
        lambda parameters: parameters[-1].grad[:1].add_(1.0),
    ],
    ids=["replaced", "foreach", "torch's clip", "clip", "one row"],
)
def test_changed_grad_is_refused_at_next_backward(shared: Trainer, change: Change):
    with pytest.raises(InvalidInput, match="changed in place"):
        after(shared, 0, change, 1)


def test_cleared_grad_restarts_only_its_own_sum(shared: Trainer):
    def forget(parameters: Sequence[nn.Parameter]) -> None:
        parameters[0].grad = None

    actual, second, both = after(shared, 0, forget, 1), after(shared, 1), after(shared, 0, 1)
    first = next(iter(actual))
    assert_same(actual, {**both, first: second[first]})
    assert not torch.equal(second[first], both[first])


def test_freezing_between_micro_batches_keeps_gradient(shared: Trainer):
    query = shared.get_parameter(QUERY)
    first, both = after(shared, 0), after(shared, 0, 1)
    try:
        after(shared, 0, lambda parameters: query.requires_grad_(False), 1)
        assert torch.equal(whole(query.grad), first[QUERY])
    finally:
        query.requires_grad_(True)
    assert_same(gradients(shared), {**both, QUERY: first[QUERY]})


def test_entropy_backwards_may_run_after_all_forwards(shared: Trainer):
    shared.zero_grad()
    sums = [shared.logprobs(row[None]).entropy.sum() for row in ROWS]
    for value in sums:
        value.backward()
    actual = gradients(shared)
    shared.zero_grad()
    for row in ROWS:
        shared.logprobs(row[None]).entropy.sum().backward()
    assert_same(actual, gradients(shared))


def test_one_token_sequences_give_zero_gradients(shared: Trainer):
    """Every rank then runs collectives of the same sizes, even if only some have such micro-batches."""
    shared.zero_grad()
    shared.logprobs(torch.tensor([[5], [6]])).sum().backward()
    assert all(not values.any() for values in gradients(shared).values())
    shared.zero_grad()
    shared.logprobs(torch.tensor([[5], [6]])).entropy.sum().backward()
    assert all(not values.any() for values in gradients(shared).values())
