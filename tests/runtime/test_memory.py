"""An engine stays within its memory: it reads limits, shares graphs' memory and measures the worst step."""

import functools
import gc
from unittest import mock

import numpy as np
import pytest
import torch

from detcompile.runtime import device_memory, engine_setup, memory_probe
from detcompile.runtime.device_memory import (
    GPUMemory,
    StepMemory,
    available_memory,
    cgroup_room,
    gpu_memory,
    ran_out_of_memory,
)
from detcompile.runtime.engine_config import EngineConfig
from detcompile.runtime.engine_setup import EngineModel, Forwards, new_engine
from detcompile.runtime.kv.kv_cache import KVShape, new_cache
from detcompile.runtime.memory_probe import GraphNeeds, Room, StepNeeds, graph_needs, step_needs
from detcompile.runtime.sampling.penalties import TokenCounts
from detcompile.runtime.sampling.sampler import Sampler, SamplingParams
from detcompile.runtime.step.layout import StepLayout, first_layouts, graph_layouts, mixed_layouts, table_widths
from detcompile.runtime.step.runner import Runner, unowned
from detcompile.runtime.step.worker import Worker
from detcompile.step import KVGroup, ModelFacts
from detcompile.templates.device.cuda_graphs import is_warmup
from tests.bits import assert_bitwise_equal
from tests.conftest import NEEDS_CUDA
from tests.runtime.step.runner_cases import forward, make_cache

VERSION_1 = "9:name=systemd:/\n4:cpu,memory:/jobs/7\n0::/\n"


def on_a_gpu(test):
    return pytest.mark.gpu(NEEDS_CUDA(test))


ALONE = pytest.mark.skipif(
    "'PYTEST_XDIST_WORKER' in os.environ or config.getoption('forks', '0') != '0'",
    reason="counts what the whole card holds, of other workers too: run it without -n and --forks",
)


def write_tree(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")


@pytest.mark.parametrize(
    ("membership", "files", "room"),
    [
        ("0::/a/b\n", {"a/b/memory.max": 100, "a/b/memory.current": 40}, 60),
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/b/memory.current": 40}, None),
        ("0::/a/b\n", {"a/b/memory.high": 90, "a/b/memory.max": 100, "a/b/memory.current": 40}, 50),
        ("0::/a/b\n", {"a/b/memory.max": 30, "a/b/memory.current": 40}, 0),
        (  # a level above is tighter
            "0::/a/b\n",
            {"a/b/memory.max": 100, "a/b/memory.current": 10, "a/memory.max": 70, "a/memory.current": 50},
            20,
        ),
        (  # in a container the process's own cgroup is the root
            "0::/\n",
            {"memory.max": 100, "memory.current": 40, "memory.stat": "anon 3\ninactive_file 15\nfile 20"},
            75,
        ),
        ("0::/a/b\n", {"memory.max": 100, "memory.current": 1}, 99),  # whose path may name what is not there
        ("0::/../x\n", {"memory.max": 100, "memory.current": 1}, 99),
        (
            VERSION_1,
            {"memory/jobs/7/memory.limit_in_bytes": 2**63 - 4096, "memory/jobs/7/memory.usage_in_bytes": 5}
            | {"memory/jobs/memory.limit_in_bytes": 100, "memory/jobs/memory.usage_in_bytes": 30}
            | {"memory/jobs/memory.stat": "cache 9\ntotal_inactive_file 7"},
            77,
        ),
        (VERSION_1, {"memory/memory.limit_in_bytes": 100, "memory/memory.usage_in_bytes": 30}, 70),
        (VERSION_1, {"cpu/jobs/7/memory.limit_in_bytes": 100}, None),
        ("", {"memory.max": 100, "memory.current": 40}, None),
        ("nonsense\n", {}, None),
    ],
)
def test_free_memory_is_limited_by_tightest_cgroup(tmp_path, membership, files, room):
    write_tree(tmp_path / "mount", files)
    (tmp_path / "membership").write_text(membership)
    assert cgroup_room(tmp_path / "mount", tmp_path / "membership") == room
    assert cgroup_room(tmp_path / "mount", tmp_path / "missing") is None


def test_a_cpu_cache_is_sized_by_the_limit_of_a_cgroup(tmp_path):
    free = available_memory()
    write_tree(tmp_path, {"a/memory.max": 3 << 20, "a/memory.current": 1 << 20})
    (tmp_path / "membership").write_text("0::/a\n")
    limited = functools.partial(cgroup_room, tmp_path, tmp_path / "membership")
    with mock.patch.object(device_memory, "cgroup_room", limited):
        assert available_memory() == 2 << 20 < free
        config = EngineConfig(max_num_seqs=1000, memory_fraction=0.5)
        engine = new_engine(*small_model(torch.device("cpu")), config, None)
    assert engine.stats.num_blocks == (1 << 20) // (64 * 8 * 8 * 2 * 2) - 1  # one is nobody's


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_errors_that_say_that_memory_ran_out_are_known(error, is_one):
    assert ran_out_of_memory(error) is is_one


def test_unowned_tensors_share_memory_without_owning_it():
    whole = torch.randn(6, 8, dtype=torch.float32).to(torch.bfloat16)
    given = (whole[1:5, ::2], (whole.t(), None))
    actual = unowned(given)
    assert actual[1][1] is None
    for mine, theirs in ((actual[0], given[0]), (actual[1][0], given[1][0])):
        assert mine.data_ptr() == theirs.data_ptr() and mine.stride() == theirs.stride()
        assert_bitwise_equal(mine, theirs)
        assert mine.untyped_storage()._cdata != theirs.untyped_storage()._cdata
    whole.fill_(7)
    assert actual[0].eq(7).all()


def test_graphs_are_captured_from_the_largest_to_the_smallest_and_narrow_before_wide():
    actual = graph_layouts(100, 256, 641, 64)
    sizes = list(dict.fromkeys(layout[:2] for layout in actual))
    widths = table_widths(641, 64)
    assert sizes == sorted(sizes, reverse=True) and actual == [(*size, width) for size in sizes for width in widths]
    mixed = {layout for layout in mixed_layouts() if layout[0] <= 256 and layout[1] < 200}
    assert set(sizes) == {(size, size) for size in (1, 2, 4, 8, *range(16, 113, 16), 256)} | mixed


def test_a_warm_up_captures_for_every_size_a_graph_that_holds_any_table():
    layouts = graph_layouts(100, 256, 641, 64)
    first = first_layouts(layouts)
    assert {layout[:2] for layout in first if layout[2] >= 641} == {layout[:2] for layout in layouts}
    assert first[: len(table_widths(641, 64))] == [layout for layout in layouts if layout[0] == 256 == layout[1]]
    assert len(first) < len(layouts) / 2 and first == [layout for layout in layouts if layout in first]


@pytest.mark.parametrize(("most_sequences", "most_tokens"), [(64, 2048), (1000, 8192), (8, 300), (4, 8), (300, 40)])
def test_no_graph_that_a_step_may_get_later_has_more_tokens_or_logits_than_the_first(most_sequences, most_tokens):
    """Later captures, as of steps with prompt logprobs or draft trees, then need no more memory."""
    first = graph_layouts(most_sequences, most_tokens, 641, 64)[0]
    decodes = [StepLayout(n, n, n, 10, 1).padded(64).tokens for n in range(1, min(most_sequences, most_tokens) + 1)]
    assert max(decodes) <= first[0]
    for tokens in range(2, min(most_tokens, 512) + 1):
        for sequences in (1, tokens // 2, tokens):
            layout = StepLayout(tokens, min(sequences, most_sequences), tokens, 10, 1).padded(64)
            assert max(layout.tokens, layout.rows) <= first[0] == first[1] or layout.tokens > 512


class FakeGPU:
    """Stands for ``gpu_memory``: every look at it is the next of ``looks``."""

    def __init__(self, *looks):
        self.looks = list(looks)

    def __call__(self, device):
        return self.looks.pop(0)


def test_graph_memory_is_extrapolated_from_samples():
    worker = mock.Mock()
    worker.runner.kv_cache.device, worker.runner.kv_cache.groups = torch.device("cpu"), [KVGroup((0,), 0)]
    layouts = graph_layouts(1024, 8192, 641, 64)
    gpu = FakeGPU(GPUMemory(1000, 100, 60), GPUMemory(1000, 100 + 700 + 50, 60 + 700))
    with mock.patch.object(memory_probe, "gpu_memory", gpu):
        actual = graph_needs(worker, layouts)
    captured = [call.args for call in worker.capture.call_args_list]
    assert captured[: len(table_widths(641, 64))] == [layout for layout in layouts if layout[0] == 1024]
    assert len(captured) < len(layouts) / 8 and set(captured) <= set(layouts)
    assert {layout[0] == layout[1] for layout in captured} == {True, False}
    nodes, inputs = 50 * len(layouts) // len(captured), sum(4 * seqs * width for _, seqs, width in layouts)
    assert 700 + nodes + inputs < sum(actual) < 700 + nodes + 1.2 * inputs
    later = [layout for layout in layouts if layout not in first_layouts(layouts)]
    nodes, inputs = 50 * len(later) // len(captured), sum(4 * seqs * width for _, seqs, width in later)
    assert nodes + inputs < actual.later < nodes + 1.3 * inputs


def test_the_worst_step_asks_for_all_that_a_sampler_can_be_asked_for():
    """On a CPU, where the allocator cannot be asked: what it runs, and that it runs."""
    runner = Runner(lambda *step: forward(*step).float(), make_cache(0.0), False)
    steps, kept, warmups = [], [], []
    launch = Worker.launch

    def recorded(worker, work):
        steps.append(work)
        warmups.append(is_warmup())
        return launch(worker, work)

    def kept_block(device, block, most):
        return mock.Mock(refill=lambda: kept.append(block))

    reserved = [40, 40, 47, 47, 47]  # the fourth look is before the largest step, the fifth before all
    gpu = FakeGPU(*[GPUMemory(1000, 100, bytes) for bytes in reserved])
    peaks = [300, 147, 160]
    with (
        mock.patch.object(memory_probe, "gpu_memory", gpu),
        mock.patch.object(memory_probe, "StepMemory", kept_block),
        mock.patch.object(torch.cuda, "reset_peak_memory_stats"),
        mock.patch.object(torch.cuda, "max_memory_reserved", lambda device: peaks.pop(0)),
        mock.patch.object(Worker, "launch", recorded),
    ):
        sizes = {"num_tokens": 24, "num_sequences": 8, "num_drafts": 3, "num_prompt_tokens": 5, "width": 2}
        actual = step_needs(runner, lambda: Sampler(7, "cpu"), **sizes)
    assert actual == StepNeeds(counts=7, block=100, most=113) and actual.total == 7 + 113 + 14 and kept == [100]
    assert warmups == [True, False, False, False, False], "only the first may leave out layers"
    assert [len(work.arrays.input_ids) for work in steps] == [24] * 5 and not peaks and not gpu.looks
    for work, item, drafts, prompt in zip(steps, [8, 8, 8, 5, 3], [3, 3, 3, 2, 2], [5, 5, 5, 4, 2], strict=True):
        params = [row.params for row in work.rows]
        assert len(params) == item + drafts and sum(item.penalized for item in params) == item
        assert all(item.filtered and item.logprobs and item.logit_bias for item in params)
        assert [len(prompt.targets) for prompt in work.prompts] == [prompt]
        np.testing.assert_array_equal(work.arrays.logits_to_keep, np.arange(item + drafts + prompt))


class FakeAllocator:
    """Keeps what is freed, as torch's does, beside tensors and a pool of graphs."""

    def __init__(self, pool, tensors):
        self.pool, self.allocated, self.cached, self.log = pool, tensors, 0, []

    def statistics(self, device):
        sizes = {"reserved_bytes": self.pool + self.allocated + self.cached, "allocated_bytes": self.allocated}
        return {name: {"all": {"current": size}} for name, size in sizes.items()}

    def empty_cache(self):
        self.cached = 0
        self.log.append("emptied")

    def empty(self, size, dtype, device):
        self.cached += size
        self.log.append(size)


def test_step_memory_is_compacted_above_limit():
    fake = FakeAllocator(pool=500, tensors=1000)
    with (
        mock.patch.multiple(torch.cuda, empty_cache=fake.empty_cache, memory_stats_as_nested_dict=fake.statistics),
        mock.patch.object(torch, "empty", fake.empty),
    ):
        memory = StepMemory(torch.device("cpu"), block=100, most=120)
        memory.refill()
        assert fake.cached == 100
        for kept in (100, 120):
            fake.cached, fake.log = kept, []
            memory.tidy()
            assert not fake.log
        fake.cached = 121
        memory.tidy()
        assert fake.log == ["emptied", 100]
        fake.pool, fake.cached = 530, 121  # part of the block was given to a tensor that stays
        memory.tidy()
        assert fake.log[2:] == ["emptied", 70] and fake.cached == 70


def small_model(device, vocab_size=11, layers=1, kv_heads=8, head_dim=8):
    """A model without attention, whose logits are rows of a table; made of gathers alone."""
    table = torch.randn(64, vocab_size, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)

    def forward(input_ids, position_ids, step, logits_to_keep):
        return table[((input_ids[0] * 5 + position_ids[0] * 3) % 64)[logits_to_keep]]

    facts = ModelFacts(
        kv_shapes=(KVShape(kv_heads, head_dim, head_dim),) * layers,
        kv_groups=(KVGroup(tuple(range(layers)), 0),),
        dtype=torch.bfloat16,
        device=device,
        max_context=4096,
        num_token_ids=vocab_size,
        num_logits=vocab_size,
    )
    return EngineModel(facts), Forwards(forward)


@pytest.mark.parametrize(("excess", "fewer"), [(-5000, 0), (0, 0), (1, 1), (3 * 64 * 256 + 1, 4)])
def test_an_engine_whose_graphs_take_more_than_was_measured_gives_up_blocks(excess, fewer):
    step = StepNeeds(counts=30, block=70, most=80)
    room, config = Room(50 * 64 * 256, step, GraphNeeds(700, 20)), EngineConfig(memory_fraction=0.5)
    gpu = FakeGPU(GPUMemory(4000, 2000 - 90 - 20 + excess, 1000))
    with (
        mock.patch.object(engine_setup, "room_for_cache", lambda *_, **__: room),
        mock.patch.object(engine_setup, "gpu_memory", gpu),
        mock.patch.object(engine_setup, "StepMemory"),
    ):
        engine = new_engine(*small_model(torch.device("cpu")), config, None)
    assert engine.stats.num_blocks == 50 - fewer - 1 and not gpu.looks


def test_counts_of_penalties_have_their_memory_from_the_start():
    counts = TokenCounts(20, torch.device("cpu"), num_slots=5)
    memory = counts.words.data_ptr()
    for key in range(5):
        counts.place(key, [1, 2], 2, 0)
        counts.admit(counts.num_slots, counts.fresh())
    assert len(counts.words) == 5 and counts.words.data_ptr() == memory


@on_a_gpu
def test_graphs_of_all_sizes_share_the_memory_of_their_outputs():
    model, forwards = small_model(torch.device("cuda", 0), vocab_size=1 << 20)
    device = model.facts.device
    size = 64 * (1 << 20) * 2  # of the largest output
    runner = Runner(forwards.plain, new_cache(model.facts, 8, 64), True)
    worker = Worker(runner, Sampler(model.facts.num_logits, device))
    before = gpu_memory(device).reserved
    worker.warm_up(64, 64, 4)
    assert gpu_memory(device).reserved - before < 1.5 * size
    assert len(runner._graphs) > 9
    outputs = {graph.output[0].data_ptr() for graph in runner._graphs.values()}
    assert len(outputs) < len(runner._graphs) / 2


@ALONE
@on_a_gpu
@pytest.mark.parametrize("max_num_seqs", [256, 64])
def test_an_engine_takes_no_more_than_its_fraction_of_a_small_gpu(max_num_seqs):
    """After the warm-up, and after a load that asks for everything; with the answers that it gives without graphs."""
    device = torch.device("cuda", 0)
    gc.collect()
    total = torch.cuda.mem_get_info(device)[1]
    before = torch.cuda.get_per_process_memory_fraction(0)
    torch.cuda.set_per_process_memory_fraction(min(1.0, (gpu_memory(device).used + (6 << 30)) / total), 0)
    try:
        model = small_model(device, vocab_size=151936, layers=8, head_dim=128)
        config = EngineConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=2048)
        torch.cuda.reset_peak_memory_stats(device)
        engine = new_engine(*model, config, None)
        answers, taken = [], [most_taken(device)]
        for _ in range(2):
            params = [params_of(index) for index in range(300)]
            answers.append(engine.generate([[index, 3] * (1 + index % 90) for index in range(300)], params))
            taken.append(most_taken(device))
        allowed = gpu_memory(device).total * config.memory_fraction
        assert 0.8 * allowed < max(taken) <= allowed, (taken, engine._pipeline._worker.memory.num_refills)
        engine.check()
        del engine
        gc.collect()
        plain = new_engine(*model, EngineConfig(num_blocks=500, cuda_graphs=False), None)
        answers.append(plain.generate([[index, 3] * (1 + index % 90) for index in range(300)], params))
    finally:
        torch.cuda.set_per_process_memory_fraction(before, 0)
    tokens = [[(item.outputs[0].token_ids, item.outputs[0].logprobs) for item in given] for given in answers]
    assert tokens[0] == tokens[1] == tokens[2]


def most_taken(device):
    free, total = torch.cuda.mem_get_info(device)
    return torch.cuda.max_memory_reserved(device) + total - free - torch.cuda.memory_reserved(device)


def params_of(index):
    everything = {"temperature": 1.0, "top_p": 0.9, "top_k": 50, "presence_penalty": 0.5, "logprobs": 20}
    kinds = [{"temperature": 0.0}, everything, everything | {"prompt_logprobs": 20}]
    return SamplingParams(max_tokens=12, ignore_eos=True, seed=index, **kinds[index % 3])
