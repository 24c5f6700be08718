"""A model in worker processes has the bits of one in this process in every use, or fails in time."""

import errno
import functools
import gc
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

import detcompile
from detcompile import InvalidInput, Numerics, SamplingParams
from detcompile.commands.axes import AXES, score
from detcompile.commands.verification import TP, verify
from detcompile.errors import EngineError, StorageError, UnsupportedModel, WorkerError
from detcompile.executors.ranks import RankPlan
from detcompile.models.compiled import CompiledModel
from detcompile.models.remote import RemoteModel, compile_in_workers
from detcompile.models.spec import ModelSpec
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.processes.start_progress import StartProgress, reading
from detcompile.runtime.requests.outputs import RequestOutput
from detcompile.runtime.sampling import plan as sampling_plan
from detcompile.runtime.sampling.plan import RowNeeds
from detcompile.runtime.sampling.sampling_tensors import SampleRow
from detcompile.runtime.speculation.drafter import Drafter
from detcompile.runtime.speculation.medusa_heads import MedusaHeads
from detcompile.runtime.speculation.speculator import SpeculationConfig
from detcompile.weights import named_weights, weight_digests
from detcompile.workers import load_for_rank
from tests.bits import assert_bitwise_equal
from tests.exhaustive import EXHAUSTIVE
from tests.invariance.axis import configuration_for
from tests.model_cases import MAX_CONTEXT, VOCAB_SIZE, random_model
from tests.models.hub_cases import COMMIT, put_snapshot, with_cache
from tests.parallel.ranks import run_ranks
from tests.runtime.engine_cases import engine_configs, sampling_params
from tests.runtime.speculation.test_speculator import Oracle, Workload, workload_of
from tests.runtime.test_isolation import VICTIM
from tests.runtime.test_threads import together

IDS = torch.arange(74).view(2, 37) * 7 % 150
NOTES: list[tuple[int, str]] = []  # that the ranks of ``two`` sent while they started
PLANTED: list[Any] = []  # in a rank: faults that its sampler has now
CONFIGS = engine_configs(60, 400)


def module() -> PreTrainedModel:
    """Two KV groups, one with a window."""
    return random_model("granite_swa", torch.float32, num_hidden_layers=2)


@functools.cache
def alone() -> CompiledModel:
    """In this process."""
    return detcompile.compile(module(), max_context=MAX_CONTEXT)


@functools.cache
def plain_answers() -> Workload:
    return workload_of(alone())


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RemoteModel]:
    """A module of this process in one worker, whose engines overlap their steps or not."""
    folder = tmp_path_factory.mktemp("temporary")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(folder))
        with compile_in_workers(module(), tp=1, numerics=Numerics(), max_context=MAX_CONTEXT) as model:
            assert not list(folder.iterdir())
            yield model
        assert not list(folder.iterdir())


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RemoteModel]:
    """A name on two ranks, as a user gets it; the ranks' processes know nothing of the cache."""
    folder = tmp_path_factory.mktemp("model")
    module().save_pretrained(folder)
    cache = tmp_path_factory.mktemp("cache")
    put_snapshot(cache, "org/name", {file.name: file.read_bytes() for file in folder.iterdir()})
    with (
        mock.patch.object(StartProgress, "on_note", lambda _, rank, text: NOTES.append((rank, text))),
        with_cache(cache, offline=True),
    ):
        model = detcompile.compile("org/name", tp=2, max_context=MAX_CONTEXT)
    assert isinstance(model, RemoteModel)
    with model:
        yield model


def comparable(output: RequestOutput) -> tuple[RequestOutput, str]:
    """Return all that must be equal: everything except times."""
    return replace(output, metrics=None, request_id="", error=None), repr(output.error)


def assert_drafts_unmoved(
    model: CompiledModel, drafter: Drafter, config: EngineConfig, workload: Workload, **options: int
) -> tuple[int, int]:
    """Fail unless the workload's answers are those without drafts; how many tokens were accepted and drafted."""
    prompts, params, expected = workload
    speculation = SpeculationConfig(drafter=drafter, switch="always", **options)  # type: ignore[arg-type]
    engine = model.engine(config, speculation=speculation)
    actual = engine.generate(prompts, params, progress=False)
    engine.check()
    assert engine.speculator is not None and engine.speculator.error is None and engine.speculator.num_drafted > 0
    assert [output.outputs for output in actual] == [output.outputs for output in expected]
    return engine.speculator.num_accepted, engine.speculator.num_drafted


def test_model_is_identified_by_name_and_commit(two: RemoteModel) -> None:
    here = alone()
    assert (two.name_or_path, two.config._commit_hash) == ("org/name", COMMIT)
    assert two.num_parameters() == here.num_parameters()
    assert two.num_parameters(exclude_embeddings=True) == here.num_parameters(exclude_embeddings=True)
    assert two.generation_config.to_dict() == here.generation_config.to_dict()
    assert repr(two).startswith("RemoteModel(org/name, float32, cpu, ")
    assert two.to("cpu") is two.eval() is two
    with pytest.raises(InvalidInput, match=r"half\(\)"):
        two.half()


def test_logits_and_fingerprint_equal_one_process(one: RemoteModel, monkeypatch: pytest.MonkeyPatch) -> None:
    here = alone()
    assert_bitwise_equal(one(IDS).logits, here(IDS).logits)
    labeled = one(IDS, labels=IDS)
    assert_bitwise_equal(labeled.loss, here(IDS, labels=IDS).loss)
    assert one.fingerprint == (known := here.fingerprint)
    for model in (one, here):
        monkeypatch.setattr(model.generation_config, "eos_token_id", [7, 5])  # of the caller, whose engines read it
    assert one.fingerprint == here.fingerprint != known
    assert (one.certificate.orders, one.certificate.counts) == (here.certificate.orders, here.certificate.counts)
    assert (one.device, one.dtype, one.vocab_size) == (here.device, here.dtype, here.vocab_size)


def test_ranks_report_weight_loading_progress(two: RemoteModel) -> None:
    whole = module()
    total = sum(t.nbytes for t in (*whole.parameters(), *whole.buffers()))
    for rank in range(2):
        notes = [text for teller, text in NOTES if teller == rank]
        read = [text for text in notes if text.startswith("reading")]
        assert len(read) > 10 and read[-1] == reading(total, total)
        assert (notes == read) == (rank > 0)  # rank 0 tells the stages as well


@pytest.mark.parametrize("axis", sorted(set(AXES) - {"cuda_graphs"}))
def test_workers_pass_every_axis(one: RemoteModel, axis: str) -> None:
    configuration = configuration_for(axis, 17, seed=3)
    assert_bitwise_equal(score(one, configuration), score(alone(), configuration))


@settings(max_examples=10)
@given(
    params=st.lists(sampling_params(most_tokens=8), min_size=1, max_size=6),
    lengths=st.lists(st.integers(1, 90), min_size=6, max_size=6),
    overlap=st.booleans(),
    num_blocks=st.sampled_from([24, 200]),
)
def test_engine_answers_equal_one_process(
    one: RemoteModel, params: list[SamplingParams], lengths: list[int], overlap: bool, num_blocks: int
) -> None:
    """Parameters and tokens are sent once, also for preempted, ended and repeated sequences."""
    params = [replace(item, stop=()) for item in params]
    prompts = [[(7 * i + j) % VOCAB_SIZE for j in range(lengths[i])] for i in range(len(params))]
    config = EngineConfig(num_blocks=num_blocks, block_size=16, overlap=overlap, max_num_seqs=4)
    outputs = []
    for model in (one, alone()):
        engine = model.engine(config)
        outputs.append([comparable(o) for _ in range(2) for o in engine.generate(prompts, params, progress=False)])
        engine.check()
    assert outputs[0] == outputs[1]


def test_unreferenced_objects_are_freed_in_workers(one: RemoteModel) -> None:
    engine = one.engine(EngineConfig(num_blocks=8))
    runner, _ = one.new_runner(64)
    names = {engine._pipeline._worker.name, runner.name}
    del engine, runner
    gc.collect()
    one(IDS)  # the next command tells
    assert not names & set(one.group.call("kept")[0])


def test_worker_error_is_raised_and_workers_continue(one: RemoteModel) -> None:
    with pytest.raises(InvalidInput, match="memory_fraction"):
        one.engine(EngineConfig(memory_fraction=1e-12))
    with pytest.raises(InvalidInput, match="drafter"):
        one.drafter()
    with pytest.raises(InvalidInput, match="holds token"):
        one(torch.full((1, 3), VOCAB_SIZE))
    assert one(IDS).logits.shape == (2, 37, VOCAB_SIZE)


class Unsendable(torch.nn.Module):
    """Holds what no pickle can."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        super().__init__()
        self.hook = lambda x: x


def rank_and_logits(model: CompiledModel, ids: torch.Tensor) -> tuple[int, torch.Tensor]:
    return model.ranks.rank if model.ranks else 0, model(ids).logits


def refuse(model: CompiledModel) -> None:
    raise InvalidInput(f"{type(model).__name__} is no good")


def test_apply_runs_on_the_model_of_every_rank(two: RemoteModel) -> None:
    whole = alone()(IDS).logits
    for rank, (item, logits) in enumerate(two.apply(rank_and_logits, IDS)):
        assert item == rank
        assert_bitwise_equal(logits, whole)
    with pytest.raises(InvalidInput, match="CompiledModel is no good"):
        two.apply(refuse)
    with mock.patch.object(refuse, "__module__", "__main__"), pytest.raises(InvalidInput, match="in the main script"):
        two.apply(refuse)
    assert_bitwise_equal(two(IDS).logits, whole)


class Foreign:
    """Of a module that this process alone knows."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Foreign.make, ()

    @staticmethod
    def make() -> "Foreign":
        return Foreign()


UNSENDABLE: dict[str, Callable[[RemoteModel], object]] = {
    "a function without a name": lambda model: model.apply(lambda model: 1),
    "an argument that cannot be pickled": lambda model: model.apply(rank_and_logits, threading.Lock()),
    "an argument of a class without a name": lambda model: model.apply(rank_and_logits, type("Own", (), {})()),
    "a function of a module that the workers do not find": lambda model: model.apply(Foreign.make),
    "an argument of such a module": lambda model: model.apply(rank_and_logits, Foreign()),
    "no function": lambda model: model.apply("rank_and_logits"),  # type: ignore[arg-type]
    "no time": lambda model: model.apply(rank_and_logits, IDS, seconds="2"),  # type: ignore[arg-type]
    "no time at all": lambda model: model.apply(rank_and_logits, IDS, seconds=0),
}


def test_unsendable_argument_is_rejected_and_workers_continue(
    one: RemoteModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tests.foreign", sys.modules[__name__])
    monkeypatch.setattr(Foreign, "__module__", "tests.foreign")
    monkeypatch.setattr(Foreign.make, "__module__", "tests.foreign")
    for what, act in UNSENDABLE.items():
        with pytest.raises(InvalidInput, match=r"give a|cannot be sent|cannot import"):
            pytest.fail(f"{what}: {act(one)}")
        assert one.group.failure is None, what


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_new_weights_without_room_for_their_file_change_nothing(
    one: RemoteModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, files = one.weight_digests(), len(os.listdir("/dev/fd"))
    for change in (("tempfile.tempdir", "/nonexistent"), ("torch.save", full_disk)):
        with monkeypatch.context() as patch:
            patch.setattr(*change)
            with pytest.raises(StorageError, match="set TMPDIR"):
                one.update_weights(module().state_dict())
            with pytest.raises(StorageError, match="set TMPDIR"):
                compile_in_workers(module(), tp=1, numerics=Numerics())
    with pytest.raises(InvalidInput, match="has dtype"):
        one.update_weights({"model.norm.weight": torch.ones(80, dtype=torch.float64)})
    assert one.weight_digests() == before and len(os.listdir("/dev/fd")) == files


def scale_norm(model: CompiledModel, factor: float) -> None:
    model.model.model.norm.weight.data.mul_(factor)  # moves no version counter


def test_changes_by_a_function_invalidate_caches_and_fingerprint(two: RemoteModel) -> None:
    """The ranks' shares do not determine the whole weight; the fingerprint returns with the original weights."""
    engine, greedy = two.engine(EngineConfig(num_blocks=60)), SamplingParams(temperature=0, max_tokens=4, logprobs=0)
    before, version = two.fingerprint, two.weights_version
    with pytest.raises(InvalidInput, match="is missing: in exact arithmetic, and where processes share a model"):
        two.update_weights({})

    def answer() -> Any:
        return engine.generate([IDS.flatten().tolist()], greedy, progress=False)[0].outputs[0].logprobs

    old = answer()
    two.apply(scale_norm, 2.0)
    new = answer()
    assert two.weights_version > version and new != old
    with pytest.raises(InvalidInput, match="so the whole weight is unknown"):
        _ = two.fingerprint
    two.apply(scale_norm, 0.5)
    assert two.fingerprint == before and answer() == old


def test_ranks_take_their_shares_of_new_weights(two: RemoteModel) -> None:
    """Fingerprint, keys of prefixes and answers are those of the same weights on one rank; and back again."""
    engine, greedy = two.engine(EngineConfig(num_blocks=60)), SamplingParams(temperature=0, max_tokens=4, logprobs=0)
    first, other = module().state_dict(), module()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.25)
    new = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    one = detcompile.compile(other, max_context=MAX_CONTEXT)

    def answer(engine: Any) -> Any:
        return engine.generate([IDS.flatten().tolist()], greedy, progress=False)[0].outputs[0].logprobs

    before, old, version = two.fingerprint, answer(engine), two.weights_version
    with pytest.raises(InvalidInput, match="has dtype torch"):
        two.update_weights(new | {"model.norm.weight": new["model.norm.weight"].double()})
    assert two.fingerprint == before and answer(engine) == old
    assert two.update_weights(new) == two.weights_version == version + 1
    assert_bitwise_equal(two(IDS).logits, one(IDS).logits)
    assert answer(engine) == answer(one.engine(EngineConfig(num_blocks=60))) != old
    assert two.weight_digests() == one.weight_digests()
    two.update_weights(first)
    assert two.fingerprint == before and answer(engine) == old


def test_each_rank_builds_the_module_by_the_function() -> None:
    plan = RankPlan(1, Numerics(), "cpu", 1, {}, build=module)
    made = load_for_rank(pickle.loads(pickle.dumps(plan)), torch.device("cpu"))
    assert weight_digests(named_weights(made)) == weight_digests(named_weights(module()))


def test_unsendable_module_is_rejected() -> None:
    with pytest.raises(InvalidInput, match="Unsendable cannot be sent to the workers"):
        compile_in_workers(Unsendable(), tp=1, numerics=Numerics())  # type: ignore[arg-type]


@EXHAUSTIVE
def test_an_archive_of_two_ranks_gives_the_bits_of_one(two: RemoteModel, tmp_path: Path) -> None:
    """Loaded by worker processes, and by processes that are ranks already."""
    path = detcompile.export(two, tmp_path / "m.pt2", weights="beside")
    weights = ["m.rank0.safetensors", "m.rank1.safetensors"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["m.pt2", *weights]
    logits = alone()(IDS).logits
    loaded = detcompile.load(path)
    assert isinstance(loaded, RemoteModel)
    with loaded:
        assert_bitwise_equal(loaded(IDS).logits, logits)
        assert torch.equal(loaded.generate(IDS, max_new_tokens=9), alone().generate(IDS, max_new_tokens=9))
        assert loaded.fingerprint == alone().fingerprint and loaded.certificate == two.certificate
        with pytest.raises(UnsupportedModel, match="was loaded from an archive"):
            detcompile.export(loaded, tmp_path / "again.pt2")
        with pytest.raises(InvalidInput, match="which of its weights is the head"):
            loaded.head_weight()
        assert_bitwise_equal(loaded(IDS).logits, logits)
    with mock.patch("tempfile.tempdir", None):  # the fork server keeps a folder for itself
        for actual in run_ranks(2, _loaded_logits, path):
            assert_bitwise_equal(actual, logits)


def _loaded_logits(rank: int, path: Path) -> torch.Tensor:
    """Return logits of the loaded archive; the process group is named differently than at export."""
    return detcompile.load(path, tp_group=dist.new_group([0, 1]))(IDS).logits


def test_two_ranks_give_the_bits_of_one(two: RemoteModel) -> None:
    here = alone()
    assert_bitwise_equal(two(IDS).logits, here(IDS).logits)
    assert torch.equal(two.generate(IDS, max_new_tokens=9), here.generate(IDS, max_new_tokens=9))
    seen = {"max_new_tokens": 6, "return_dict_in_generate": True, "output_scores": True, "repetition_penalty": 1.5}
    actual, expected = (m.generate(IDS, do_sample=True, seed=3, **seen) for m in (two, here))
    assert torch.equal(actual.sequences, expected.sequences) and actual.seeds == expected.seeds
    assert_bitwise_equal(torch.stack(actual.scores), torch.stack(expected.scores))
    assert two.fingerprint == here.fingerprint
    prompts = [[1, 2, 3], list(range(100)), [7]]
    params = [SamplingParams(max_tokens=12, temperature=t, seed=5, logprobs=2) for t in (0.0, 0.8, 1.2)]
    params[1] = replace(params[1], allowed_token_ids=range(1, 9), bad_words_ids=[[3], *([t, t] for t in range(1, 9))])
    actual = [m.engine(EngineConfig(num_blocks=40)).generate(prompts, params, progress=False) for m in (two, here)]
    assert list(map(comparable, actual[0])) == list(map(comparable, actual[1]))


def test_unplannable_row_ends_only_its_request(two: RemoteModel) -> None:
    prompts = [[1, 2, 3], list(range(50)), [7]]
    params = [SamplingParams(max_tokens=9, seed=seed, logprobs=1, repetition_penalty=1.2) for seed in (1, VICTIM, 2)]
    expected = two.engine(EngineConfig(num_blocks=40)).generate(prompts, params, progress=False)
    engine = two.engine(EngineConfig(num_blocks=40, overlap=True))
    two.apply(_plant)
    try:
        actual = engine.generate(prompts, params, progress=False)
    finally:
        two.apply(_dig_up)
    assert [actual[i].outputs for i in (0, 2)] == [expected[i].outputs for i in (0, 2)]
    assert isinstance(actual[1].error, EngineError) and "planted" in str(actual[1].error)
    again = engine.generate(prompts, params, progress=False)
    assert [output.outputs for output in again] == [output.outputs for output in expected]


def _plant(_model: CompiledModel) -> None:
    needs = sampling_plan._needs

    def broken(row: SampleRow, biased: bool) -> RowNeeds:
        if row.params.seed == VICTIM and row.num_generated >= 3:
            raise LookupError("planted")
        return needs(row, biased)

    PLANTED.append(mock.patch.object(sampling_plan, "_needs", broken))
    PLANTED[-1].start()


def _dig_up(_model: CompiledModel) -> None:
    PLANTED.pop().stop()


def test_two_ranks_serve_many_threads(two: RemoteModel) -> None:
    expected = two.generate(IDS, max_new_tokens=9), two(IDS).logits
    calls = [lambda: (two.generate(IDS, max_new_tokens=9), two(IDS).logits)] * 4
    for tokens, logits in together(*calls):
        assert torch.equal(tokens, expected[0])
        assert_bitwise_equal(logits, expected[1])


@settings(max_examples=3)
@given(accuracy=st.sampled_from([0.0, 0.7, 1.0]), seed=st.integers(0, 99), max_nodes=st.integers(1, 12), config=CONFIGS)
def test_drafts_on_two_ranks_change_no_bit(
    two: RemoteModel, accuracy: float, seed: int, max_nodes: int, config: EngineConfig
) -> None:
    workload = plain_answers()
    assert_drafts_unmoved(two, Oracle(workload[2], accuracy, seed), config, workload, max_nodes=max_nodes)


def test_medusa_heads_draft_equally_on_one_and_two_ranks(two: RemoteModel) -> None:
    torch.manual_seed(3)
    here, heads = alone(), MedusaHeads(80, 3)
    assert_bitwise_equal(two.head_weight(), here.head_weight())
    accepted = []
    for model in (two, here):
        config = EngineConfig(num_blocks=60, block_size=16, overlap=False)
        accepted.append(assert_drafts_unmoved(model, model.medusa_drafter(heads, num_nodes=6), config, plain_answers()))
    assert accepted[0] == accepted[1]


def same_bytes(ours: Any, theirs: Any) -> None:
    """Fail unless two prefixes have the same bytes of every layer."""
    for layers in zip(ours.layers, theirs.layers, strict=True):
        for one, other in zip(*layers, strict=True):
            assert_bitwise_equal(one, other)


def test_kv_blocks_move_between_one_and_two_ranks(two: RemoteModel, one: RemoteModel) -> None:
    """From one to two, from two to one, and within one process: the bytes, and the answers over them."""
    config = EngineConfig(block_size=16, num_blocks=60)
    prompt = [(7 * index) % 150 for index in range(75)]  # over the window of a group
    requested = SamplingParams(max_tokens=12, seed=3, logprobs=1)
    plain = {model: model.engine(config) for model in (alone(), one, two)}
    expected = [comparable(engine.generate([prompt], requested, progress=False)[0]) for engine in plain.values()]
    assert all(answer == expected[0] for answer in expected)
    actual = {model: engine.prefixes.export(prompt) for model, engine in plain.items()}
    for prefix in actual.values():
        assert len(prefix.token_ids) == 64 and prefix.key == actual[two].key
        same_bytes(prefix, actual[two])
    for source, target in ((alone(), two), (two, one), (two, alone())):
        engine = target.engine(config)
        assert engine.prefixes.export(prompt) is None
        assert engine.prefixes.take(actual[source]) == engine.prefixes.take(actual[source]) == 64
        same_bytes(engine.prefixes.export(prompt), actual[source])
        [answer] = engine.generate([prompt], requested, progress=False)
        assert comparable(answer) == expected[0] and answer.num_cached_tokens == 64
        engine.check()
        assert engine.generate([[5, *prompt]], requested, progress=False)[0].num_cached_tokens == 0


def test_mismatched_kv_blocks_are_refused_without_a_write(two: RemoteModel) -> None:
    config = EngineConfig(block_size=16, num_blocks=60)
    engine, prompt = alone().engine(config), [(7 * index) % 150 for index in range(75)]
    engine.generate([prompt], SamplingParams(max_tokens=1), progress=False)
    prefix, target = engine.prefixes.export(prompt), two.engine(config)
    heads = tuple((keys[:, :, :1], values[:, :, :1]) for keys, values in prefix.layers)
    for wrong, message in (
        (replace(prefix, fingerprint="f" * 64), "of the model ffff"),
        (replace(prefix, block_size=32), "make both with one block_size"),
        (replace(prefix, token_ids=prefix.token_ids[:-1]), "63 tokens"),
        (replace(prefix, layers=prefix.layers[:1]), "other layers"),
        (replace(prefix, layers=tuple((k.half(), v.half()) for k, v in prefix.layers)), "dtypes"),
        (replace(prefix, layers=heads), "other layers, heads"),
    ):
        with pytest.raises(InvalidInput, match=message):
            target.prefixes.take(wrong)
        assert target.prefixes.export(prompt) is None
    small = alone().engine(EngineConfig(block_size=16, num_blocks=5, max_num_batched_tokens=16))
    assert small.prefixes.take(prefix) == 0 and small.prefixes.export(prompt) is None
    small.check()
    with pytest.raises(InvalidInput, match="has no prefix cache"):
        alone().engine(replace(config, prefix_caching=False)).prefixes.export(prompt)


def test_lost_rank_ends_requests_and_model_without_restarts(two: RemoteModel) -> None:
    """If the engine may not restart ranks. tests/parallel/test_lost_ranks.py covers restarts."""
    config = EngineConfig(num_blocks=40, restarts=0)
    engine = two.engine(config)
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=500, ignore_eos=True))
    engine.step()
    pids = two.group.process_ids
    os.kill(pids[1], signal.SIGKILL)
    since = time.monotonic()
    with pytest.raises(EngineError, match="rank 1 of 2 failed: its process was ended by SIGKILL") as caught:
        while engine.has_unfinished_requests:
            engine.step()
    assert time.monotonic() - since < 2
    assert isinstance(caught.value.__cause__, WorkerError) and caught.value.__cause__.rank == 1
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    for use in (lambda: two(IDS), lambda: two.engine(config)):
        with pytest.raises(WorkerError, match="rank 1 of 2"):
            use()
    with pytest.raises(EngineError, match="rank 1 of 2"):
        engine.generate([1, 2, 3], progress=False)
    two.close()
    with pytest.raises(WorkerError, match="rank 1 of 2"):
        two.engine(EngineConfig(num_blocks=40))  # nor does one that may, once the model is closed


@EXHAUSTIVE
def test_the_tp_axis_is_measured_on_every_declared_size(tmp_path: Path) -> None:
    random_model("gpt2", torch.float32, n_layer=1, n_positions=700).save_pretrained(tmp_path)
    spec = ModelSpec(str(tmp_path), dtype="float32", device="cpu", tp_sizes=(1, 2))
    model = spec.compile()
    results = verify(model, spec, [TP], count=2)
    assert results[TP].holds and results[TP].configurations == 2 + 2 * 2
    model.numerics = Numerics(tp_sizes=(1,))
    with pytest.raises(InvalidInput, match="declare the sizes to compare"):
        verify(model, spec, [TP], count=2)
