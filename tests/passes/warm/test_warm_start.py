"""Programs kept by an earlier compile(): their key, their bits, and damaged or foreign ones."""

import gc
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import detcompile
from detcompile import CompiledModel, Numerics, SamplingParams, StorageError
from detcompile.api import compile_here
from detcompile.config import cache_directory
from detcompile.models.remote import RemoteModel
from detcompile.parallel import PipelineStage
from detcompile.passes import program_source
from detcompile.passes.layers.program import LayeredProgram
from detcompile.passes.tracing import find_repeats
from detcompile.passes.warm import programs
from detcompile.passes.warm.descriptions import Descriptions, Undescribed
from detcompile.progress import listening
from detcompile.templates.cpu import library
from tests.bits import assert_bitwise_equal
from tests.exhaustive import EXHAUSTIVE
from tests.model_cases import MAX_CONTEXT, VOCAB_SIZE, random_model
from tests.passes.layers.test_stages import chained

IDS = torch.arange(1, 41)[None] % VOCAB_SIZE
LAYERS = {"num_hidden_layers": 3}


class Compiled(Exception):
    """A program was not found."""


pytestmark = pytest.mark.usefixtures("keep_patched_programs")


def copy_kernels(cache: Path) -> None:
    """Copy the CPU kernels to another cache, without the folders in which other processes are building."""
    library.library()
    shutil.copytree(cache_directory() / "cpu", cache / "cpu", ignore=shutil.ignore_patterns("build-*"))


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CompiledModel]:
    """A compiled qwen3, and a cache in which its program alone is kept."""
    folder = tmp_path_factory.mktemp("cache")
    copy_kernels(folder)
    with mock.patch.dict("os.environ", {"DETCOMPILE_CACHE": str(folder), "DETCOMPILE_KEEP_PROGRAMS": "1"}):
        model = compiled(source())
        assert len(programs.entries()) == 1
        yield model


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache without programs."""
    copy_kernels(tmp_path)
    monkeypatch.setenv("DETCOMPILE_CACHE", str(tmp_path))


def source(seed: int = 0, **changes: Any) -> PreTrainedModel:
    model = random_model("qwen3", torch.float32, **(LAYERS | changes))
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01 * torch.randn_like(parameter) * seed
    return model


def compiled(model: PreTrainedModel, **options: Any) -> CompiledModel:
    return detcompile.compile(model, **({"max_context": MAX_CONTEXT} | options))


def from_the_cache(model: PreTrainedModel, **options: Any) -> CompiledModel:
    with mock.patch.object(program_source, "certify_batches", side_effect=Compiled):
        return compiled(model, **options)


def answers(model: CompiledModel) -> list[Any]:
    prompts = [[7 * n % VOCAB_SIZE for n in range(1, size)] for size in (3, 40, 90)]
    outputs = model.engine().generate(prompts, SamplingParams(max_tokens=5, logprobs=3, seed=1))
    return [[output.token_ids, output.logprobs] for request in outputs for output in request.outputs]


def test_a_second_compile_takes_the_program_and_has_its_bits(fresh: CompiledModel) -> None:
    again = from_the_cache(source())
    assert again.fingerprint == fresh.fingerprint and again.certificate == fresh.certificate
    assert_bitwise_equal(again(IDS).logits, fresh(IDS).logits)
    assert answers(again) == answers(fresh)
    assert sum(map(nbytes, storages(again.model))) == sum(map(nbytes, storages(fresh.model)))


def nbytes(storage: torch.UntypedStorage) -> int:
    return storage.nbytes()


def storages(model: nn.Module) -> list[torch.UntypedStorage]:
    """Each once: a product that reads several weights holds them in one."""
    actual = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()}
    return list(actual.values())


def test_other_weights_of_the_same_form_take_it_too(fresh: CompiledModel) -> None:
    model = from_the_cache(source(seed=3))
    with mock.patch.dict("os.environ", {"DETCOMPILE_KEEP_PROGRAMS": "0"}):
        anew = compiled(source(seed=3))
    assert_bitwise_equal(model(IDS).logits, anew(IDS).logits)
    assert model.fingerprint == anew.fingerprint != fresh.fingerprint
    name = "model.layers.2.mlp.down_proj.weight"
    for one in (model, anew):
        one.update_weights({name: source(seed=4).get_parameter(name)})
    assert_bitwise_equal(model(IDS).logits, anew(IDS).logits)


@EXHAUSTIVE
@pytest.mark.parametrize("name", ["mamba2", "lfm2", "qwen3_next"])
def test_a_program_of_one_graph_is_taken(empty: None, name: str) -> None:
    """Layers that carry a state are not cut."""
    anew, again = compiled(random_model(name, torch.float32)), from_the_cache(random_model(name, torch.float32))
    assert again.fingerprint == anew.fingerprint and again.certificate == anew.certificate
    assert_bitwise_equal(again(IDS).logits, anew(IDS).logits)
    assert answers(again) == answers(anew)


def test_a_program_that_torch_adds_something_to_is_not_kept(empty: None) -> None:
    """Of a graph's code alone, where what torch does around it is missed."""
    model = random_model("mamba2", torch.float32, num_hidden_layers=1)
    of_one_graph = mock.patch.object(LayeredProgram, "__call__", lambda self, *given: [self.runs[0]([*given])[0] + 1])
    with of_one_graph:
        compiled(model)
    assert not programs.entries()


@EXHAUSTIVE
def test_stages_take_their_programs(fresh: CompiledModel, empty: None) -> None:
    def stages() -> list[Any]:
        item = [PipelineStage(size=2, index=index) for index in range(2)]
        return [compile_here(source(), 1, Numerics(), MAX_CONTEXT, stage=stage) for stage in item]

    def joined(models: list[Any]) -> CompiledModel:
        return chained([model.executor for model in models])

    anew = stages()
    with mock.patch.object(program_source, "certify_batches", side_effect=Compiled):
        again = stages()
    for one, other in zip(again, anew, strict=True):
        assert one.executor.fingerprint_parts() == other.executor.fingerprint_parts() == fresh.fingerprint_parts
        assert one.executor.description.facts == other.executor.description.facts
        assert dict(one.model.named_parameters()).keys() == dict(other.model.named_parameters()).keys()
    assert joined(again).certificate == joined(anew).certificate
    assert_bitwise_equal(joined(again)(IDS).logits, fresh(IDS).logits)
    assert answers(joined(again)) == answers(fresh)


FACTOR = 1.0


def _with(change: Callable[[Any], Any]) -> PreTrainedModel:
    model = source()
    change(model)
    return model


def _scaled(model: Any, factor: float | None) -> None:
    """Scale what every MLP gives by a number that its code reads from a cell, or from a global."""
    plain = type(model.model.layers[0].mlp).forward
    given = factor

    class Scaled(type(model.model.layers[0].mlp)):  # type: ignore[misc]
        if factor is None:

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return plain(self, x) * FACTOR
        else:

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return plain(self, x) * given

    for layer in model.model.layers:
        layer.mlp.__class__ = Scaled


def _each(change: Callable[[Any], Any]) -> Callable[[Any], None]:
    def changed(model: Any) -> None:
        for layer in model.model.layers:
            change(layer)

    return changed


def _of_another_class(layer: Any) -> None:
    class Other(type(layer.mlp)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 0.0

    layer.mlp.__class__ = Other


CHANGES: dict[str, Callable[[], CompiledModel]] = {
    "a weight's shape": lambda: from_the_cache(source(intermediate_size=160)),
    "the number of layers": lambda: from_the_cache(source(num_hidden_layers=4)),
    "the dtype": lambda: from_the_cache(source().to(torch.bfloat16)),
    "max_context": lambda: from_the_cache(source(), max_context=MAX_CONTEXT - 1),
    "the numerics": lambda: from_the_cache(source(), numerics=Numerics(kv_chunk=256)),
    "an epsilon": lambda: from_the_cache(_with(lambda m: setattr(m.model.norm, "variance_epsilon", 1e-3))),
    "an epsilon of a layer": lambda: from_the_cache(
        _with(lambda m: setattr(m.model.layers[1].input_layernorm, "variance_epsilon", 1e-3))
    ),
    "a scale": lambda: from_the_cache(_with(_each(lambda layer: setattr(layer.self_attn, "scaling", 0.5)))),
    "an activation": lambda: from_the_cache(_with(_each(lambda layer: setattr(layer.mlp, "act_fn", nn.ReLU())))),
    "a class": lambda: from_the_cache(_with(_each(_of_another_class))),
    "a forward": lambda: from_the_cache(_with(lambda m: _scaled(m, None))),
    "a hook": lambda: from_the_cache(
        _with(lambda m: m.model.norm.register_forward_hook(lambda module, args, output: output * 1.0))
    ),
    "a rotary base": lambda: from_the_cache(source(rope_parameters={"rope_type": "default", "rope_theta": 5e5})),
    "tied weights": lambda: from_the_cache(_with(lambda m: setattr(m.lm_head, "weight", m.model.embed_tokens.weight))),
    "no gradient wanted": lambda: from_the_cache(source().requires_grad_(False)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_decides_a_program_is_part_of_its_key(fresh: CompiledModel, change: str) -> None:
    with pytest.raises(Compiled):
        CHANGES[change]()


def key_of(model: PreTrainedModel) -> Any:
    actual: list[Any] = []

    def stop(key: str, *_: Any) -> None:
        actual.append(key)
        raise Compiled

    with mock.patch.object(program_source, "take_program", stop), pytest.raises(Compiled):
        from_the_cache(model)
    return actual[0]


@pytest.mark.parametrize("name", ["bloom", "llama4_text", "opt", "qwen2_moe"])
def test_the_key_is_the_same_at_the_first_run_and_later(name: str) -> None:
    first, between, second = (key_of(random_model(one, torch.float32)) for one in (name, "qwen3", name))
    assert first == second != between and len(first) == 64


def test_path_and_name_of_a_model_are_not_in_the_key() -> None:
    plain, named = source(), source()
    named.name_or_path = named.config.name_or_path = "org/name"
    named.config._commit_hash = "a" * 40
    assert key_of(named) == key_of(plain)


def test_finalizers_are_not_in_the_key() -> None:
    def collected(phase: str, info: Any) -> None:
        times.append(time.perf_counter())

    keys, times, before = [], [0.0], gc.get_threshold()
    for threshold in (before[0], 50, 51):
        gc.set_threshold(threshold, 2, 2)
        gc.callbacks.append(collected)
        try:
            keys.append(key_of(source()))
        finally:
            gc.callbacks.remove(collected)
            gc.set_threshold(*before)
    assert len(times) > 1 and len(set(keys)) == 1 and gc.isenabled()


def test_values_that_called_code_reads_are_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_cell(factor: float) -> Any:
        return key_of(_with(lambda model: _scaled(model, factor)))

    def by_global() -> Any:
        return key_of(_with(lambda model: _scaled(model, None)))

    before = by_global()
    assert by_global() == before and by_cell(1.0) == by_cell(1.0) != by_cell(2.0)
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 2.0)
    assert by_global() != before


def test_threads_and_modes_are_part_of_the_key() -> None:
    keys, threads = [key_of(source())], torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        keys.append(key_of(source()))
    finally:
        torch.set_num_threads(threads)
    with torch._inductor.config.patch("cpp.simdlen", 1):
        keys.append(key_of(source()))
    assert len(set(keys)) == 3


def test_a_state_that_cannot_be_seen_is_not_kept() -> None:
    with pytest.raises(Undescribed, match="Generator"):
        Descriptions(nn.Linear(2, 2)).of({"a": [torch.Generator()]})
    model = source()
    model.model.layers[0].mlp.drawn = torch.Generator()
    with mock.patch.object(programs, "read", side_effect=AssertionError), pytest.raises(Compiled):
        from_the_cache(model)


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "half": lambda content: content[: len(content) // 2],
    "one bit": lambda content: content[:-100] + bytes([content[-100] ^ 1]) + content[-99:],
    "another format": lambda content: content.replace(b"program 1", b"program 2", 1),
    "text": lambda content: b"\xff no program\n\n\n",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_program_is_compiled_anew(fresh: CompiledModel, damage: str) -> None:
    (entry,) = programs.entries()
    content = entry.path.read_bytes()
    entry.path.write_bytes(DAMAGES[damage](content))
    try:
        with pytest.warns(UserWarning, match="is damaged"), pytest.raises(Compiled):
            from_the_cache(source())
        assert not entry.path.exists()
    finally:
        programs.storage.put(entry.path, content)


def test_a_program_that_torch_cannot_load_is_compiled_anew(fresh: CompiledModel) -> None:
    (entry,) = programs.entries()
    content = entry.path.read_bytes()
    programs.write(entry.path.stem, b"no pickle", entry.label)
    try:
        with pytest.warns(UserWarning, match="is recompiled: UnpicklingError"), pytest.raises(Compiled):
            from_the_cache(source())
    finally:
        programs.storage.put(entry.path, content)


def test_a_program_that_others_could_have_written_is_not_taken(fresh: CompiledModel) -> None:
    (entry,) = programs.entries()
    entry.path.chmod(0o777)
    try:
        with pytest.warns(UserWarning, match="is not used: .*can be written by others"), pytest.raises(Compiled):
            from_the_cache(source())
        entry.path.parent.chmod(0o777)
        with pytest.raises(StorageError, match="can be written by others"):
            from_the_cache(source())
    finally:
        entry.path.parent.chmod(0o755)
        entry.path.chmod(0o755)


def test_a_disk_that_takes_no_program_is_warned_of(fresh: CompiledModel) -> None:
    full = mock.patch("os.replace", side_effect=OSError(28, "No space left on device"))
    with full, pytest.warns(UserWarning, match=r"is not kept: No space left on device.*DETCOMPILE_CACHE"):
        programs.write("of a test", b"", {})
    assert len(programs.entries()) == 1


def test_the_environment_can_say_no(fresh: CompiledModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DETCOMPILE_KEEP_PROGRAMS", "0")
    with mock.patch.object(programs, "read", side_effect=AssertionError), pytest.raises(Compiled):
        from_the_cache(source())


PROCESS = """
import sys
from tests.passes.warm.test_warm_start import IDS, compiled, from_the_cache, source
make = {"keep": compiled, "take": from_the_cache}[sys.argv[1]]
print(bytes(make(source())(IDS).logits.numpy()).hex()[:4000])
"""


@EXHAUSTIVE
def test_processes_take_it_at_once(fresh: CompiledModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy_kernels(tmp_path)
    monkeypatch.setenv("DETCOMPILE_CACHE", str(tmp_path))  # a process that ran other tests may have other settings

    def started(what: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PROCESS, what]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    calls = [started("keep").communicate(timeout=300)]
    calls += [process.communicate(timeout=300) for process in [started("take") for _ in range(2)]]
    expected = bytes(fresh(IDS).logits.numpy()).hex()[:4000]
    assert [printed.strip() for printed, _ in calls] == [expected] * 3, calls


def test_the_command_lists_and_clears(fresh: CompiledModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.commands.test_cli import run_here

    (entry,) = programs.entries()
    content = entry.path.read_bytes()
    monkeypatch.setenv("DETCOMPILE_CACHE", str(tmp_path))
    assert "0 bytes" in run_here("cache").stdout
    programs.storage.put(programs.storage.cache_folder("programs") / entry.path.name, content)
    assert "Qwen3ForCausalLM" in run_here("cache").stdout
    label = dict(entry.label) | {"key: threads": "7", "key: Inductor's settings": "other"}
    programs.write("newer", b"whole", label)
    os.utime(programs.storage.cache_folder("programs") / entry.path.name, (0, 0))
    shown = " ".join(run_here("cache").stdout.replace("│", "").split())
    threads = f"threads ({torch.get_num_threads()}, not 7)"
    assert threads in shown and "Inductor's settings" in shown
    [older, newer] = json.loads(run_here("cache", "--json").stdout)["programs"]
    assert sorted(older["differs_in"]) == ["Inductor's settings", threads] and newer["differs_in"] == []
    listed = run_here("cache", "--json").stdout
    assert '"layers": "3"' in listed and '"cleared": false' in listed
    assert "Removed" in run_here("cache", "--clear").stdout
    assert programs.entries() == []


class Heard:
    """A listener that remembers what stages became."""

    def __init__(self) -> None:
        self.ended_stages: list[str] = []

    def begins(self, text: str) -> None:
        pass

    def ended(self, text: str, seconds: float) -> None:
        self.ended_stages.append(text)


def on_two_ranks(model: PreTrainedModel) -> tuple[set[str], str, torch.Tensor]:
    """Stages of rank 0, the fingerprint and logits of two processes that share a model."""
    heard = Heard()
    with listening(heard), compiled(model, tp=2) as shared:
        assert isinstance(shared, RemoteModel)
        stages = {text.removeprefix("rank 0 of 2: ") for text in heard.ended_stages}
        return stages, shared.fingerprint, shared(IDS).logits


def of_one_graph() -> PreTrainedModel:
    """A model whose layers are in no list of modules that is traced layer by layer."""
    model = random_model("openai-gpt", torch.float32)
    assert find_repeats(model) is None
    return model


@EXHAUSTIVE
@pytest.mark.parametrize(
    ("one_is_lost", "make", "layers"),
    [(False, source, "3 layers"), (True, source, "3 layers"), (False, of_one_graph, "2 layers")],
)
def test_ranks_take_their_programs_or_all_compile(
    one_is_lost: bool,
    make: Callable[[], PreTrainedModel],
    layers: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copy_kernels(tmp_path)
    monkeypatch.setenv("DETCOMPILE_CACHE", str(tmp_path))
    forwards, whole_digest = f"take a kept program of {layers}", "take the whole program's digest"
    taken = {forwards, whole_digest}
    stages, fingerprint, logits = on_two_ranks(make())
    assert {"no program is kept", "capture the whole program"} <= stages and not taken & stages
    kept = programs.entries()
    assert len(kept) == 3  # a rank's own, and the digest of the whole
    if one_is_lost:  # both compile then
        max(kept, key=lambda entry: entry.size).path.unlink()
    stages, again, theirs = on_two_ranks(make())
    assert again == fingerprint
    assert_bitwise_equal(theirs, logits)
    assert taken & stages == ({whole_digest} if one_is_lost else taken)
    assert {entry.path for entry in programs.entries()} == {entry.path for entry in kept}
