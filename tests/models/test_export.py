"""Exported models give the JIT's bytes in a process that has no code of the model; what does not fit is refused."""

import copy
import functools
import json
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch._export.serde.serialize import _TORCH_TO_SERIALIZE_DTYPE
from typer.testing import CliRunner

import detcompile
from benchmarks.export import compare, loaded_elsewhere, measure, observe
from detcompile import ArchiveError, CompiledModel, ExportedModel, InvalidInput, UnsupportedModel, exporting
from detcompile.archives.archive import EXTRA, Archive, Share, library_folder, write_archive
from detcompile.archives.description import CERTIFICATE, KERNELS, read_config
from detcompile.archives.machine import obstacle, this_machine
from detcompile.archives.stored_weights import StoredWeights
from detcompile.commands import verification
from detcompile.commands.cli import app
from detcompile.errors import DetcompileError
from detcompile.executors import archived
from detcompile.models.spec import ModelSpec
from detcompile.parallel import TensorParallel
from detcompile.progress import listening
from detcompile.templates.cpp_dispatch import direct_ops
from tests.bits import assert_bitwise_equal
from tests.conftest import NEEDS_CUDA
from tests.exhaustive import EXHAUSTIVE, exhaustive_unless
from tests.model_cases import MAX_CONTEXT, random_model

COUNTS = (1, 7, 64)
# Layers, dtype and place of the weights: one export for all tests, as each compiles a library of C++.
EXPORTED = {"llama": (1, torch.float32, "inside")}


@pytest.fixture(scope="module")
def models() -> dict[str, CompiledModel]:
    return {
        name: detcompile.compile(random_model(name, dtype, num_hidden_layers=layers), max_context=MAX_CONTEXT)
        for name, (layers, dtype, _) in EXPORTED.items()
    }


@pytest.fixture(scope="module")
def archives(models: dict[str, CompiledModel], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("exported")
    return {
        name: detcompile.export(model, folder / f"{name}.pt2", weights=EXPORTED[name][2])
        for name, model in models.items()
    }


@pytest.fixture(scope="module")
def loaded(archives: dict[str, Path]) -> ExportedModel:
    model = detcompile.load(archives["llama"])
    assert isinstance(model, ExportedModel)
    return model


def rewritten(path: Path, target: Path, machine: dict[str, str] | None = None, **changes: Any) -> Path:
    """The archive with other facts or weights, whole as far as its digests go."""
    archive = Archive(path)
    names = [name for name in archive.names(EXTRA) if "/manifest." not in name and not name.endswith(".safetensors")]
    members = {name: archive.read(name) for name in names}
    weights = changes.pop("weights", None) or archive.weights(torch.device("cpu"))
    facts = archive.facts | changes | {"machine": archive.facts["machine"] | (machine or {})}
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, Path(name).name) for name in archive.names(library_folder(0))]
        for name, file in zip(archive.names(library_folder(0)), files, strict=True):
            file.write_bytes(archive.read(name))
        share = Share(archive.share, tuple(files), StoredWeights.of(weights))
        write_archive(target, facts, members, [share])
    return target


def test_a_fresh_process_without_the_models_code_gives_the_bytes_of_the_jit(
    models: dict[str, CompiledModel], archives: dict[str, Path]
) -> None:
    """Prompts, decodes and an engine; of a model whose layers see windows, too."""
    for (name, model), actual in zip(models.items(), loaded_elsewhere(list(archives.values()), COUNTS)):
        equal = compare(actual["seen"], observe(model, COUNTS))
        assert len(equal) == 2 * len(COUNTS) + 3
        assert all(equal.values()), (name, [what for what, same in equal.items() if not same])


def test_it_says_of_itself_what_the_exported_model_did(models: dict[str, CompiledModel], loaded: ExportedModel) -> None:
    before = models["llama"]
    assert type(loaded.config) is type(before.config) and loaded.config.to_dict() == before.config.to_dict()
    item, known = before.generation_config.to_dict(), loaded.generation_config.to_dict()
    assert {name: value for name, value in known.items() if item[name] != value} == {}
    assert loaded.num_parameters() == before.num_parameters()
    assert loaded.num_parameters(exclude_embeddings=True) == before.num_parameters(exclude_embeddings=True)
    assert loaded.name_or_path == before.name_or_path
    assert repr(loaded).startswith("ExportedModel(") and repr(loaded).endswith(f"program {before.program[:12]})")
    config = read_config({"model_type": "unheard-of", "max_position_embeddings": 77})
    assert (config.model_type, config.max_position_embeddings) == ("unheard-of", 77)


def test_generate_defaults_come_from_the_archive(models: dict[str, CompiledModel], tmp_path: Path) -> None:
    before, ids = models["llama"], torch.tensor([[1, 2, 3]])
    item = copy.deepcopy(before.generation_config)
    try:
        before.generation_config.update(max_new_tokens=5, repetition_penalty=1.5, eos_token_id=None)
        after = detcompile.load(detcompile.export(before, tmp_path / "m.pt2"))
        assert torch.equal(after.generate(ids), before.generate(ids)) and after.generate(ids).shape[1] == 8
    finally:
        before.generation_config = item


@EXHAUSTIVE
@pytest.mark.parametrize(
    ("name", "dtype", "weights"),
    [("llama", torch.bfloat16, "inside"), ("lfm2", torch.float32, "beside")],  # layers that carry a state
)
def test_other_layers_and_dtypes_give_the_bytes_of_the_jit(
    name: str, dtype: torch.dtype, weights: str, tmp_path: Path
) -> None:
    actual = measure(name, dtype, "cpu", tmp_path, weights)
    assert actual["equal"], actual


@pytest.mark.gpu
@NEEDS_CUDA
def test_on_a_gpu_it_gives_the_bytes_of_the_jit(tmp_path: Path) -> None:
    actual = measure("llama", torch.bfloat16, "cuda", tmp_path, "inside")
    assert actual["equal"], actual


def test_the_comparison_sees_one_bit_of_one_weight(
    models: dict[str, CompiledModel], archives: dict[str, Path], tmp_path: Path
) -> None:
    weights = Archive(archives["llama"]).weights(torch.device("cpu"))
    weights["model.norm.weight"].view(torch.int32)[0] ^= 1
    changed = detcompile.load(rewritten(archives["llama"], tmp_path / "changed.pt2", weights=weights))
    equal = compare(observe(changed, (7,)), observe(models["llama"], (7,)))
    assert not equal["prefill 7"] and not equal["decode 7"]


@pytest.mark.parametrize("damaged", exhaustive_unless(lambda damaged: damaged, [False, True]))
def test_the_axis_of_verify_loads_it_elsewhere(
    models: dict[str, CompiledModel],
    archives: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damaged: bool,
) -> None:
    """The archive is the one that was made before, or one with other weights, which its fingerprint tells."""
    weights = Archive(archives["llama"]).weights(torch.device("cpu"))
    weights["model.norm.weight"] += 0.25 * damaged
    made = rewritten(archives["llama"], tmp_path / "made.pt2", weights=weights)
    monkeypatch.setattr(verification, "export", lambda model, path: shutil.copy(made, path))
    verify = functools.partial(verification.verify, models["llama"], ModelSpec("llama"), ["export"])
    if damaged:
        with pytest.raises(DetcompileError, match="another fingerprint"):
            verify()
    else:
        result = verify()["export"]
        assert result.configurations == 4 and result.holds


def test_export_shows_what_it_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages: list[str] = []
    heard = SimpleNamespace(begins=stages.append, ended=lambda *_: None)
    for name in ("_share", "facts_of", "_common_members", "write_archive"):
        monkeypatch.setattr(exporting, name, lambda *_: {})
    device = torch.device("cpu")
    model = SimpleNamespace(executor=mock.MagicMock(), fingerprint_parts={}, weight_digests=dict, device=device)
    with listening(heard):
        exporting._write(model, tmp_path / "m.pt2", False)
    assert stages == ["compile the program of the file", "write m.pt2"]


def test_what_is_known_of_the_model_comes_along(models: dict[str, CompiledModel], loaded: ExportedModel) -> None:
    model = models["llama"]
    assert loaded.fingerprint == model.fingerprint and loaded.fingerprint_parts == model.fingerprint_parts
    assert loaded.certificate == model.certificate and str(loaded.certificate) == str(model.certificate)
    assert loaded.numerics == model.numerics and loaded.max_context == model.max_context
    assert (loaded.dtype, loaded.device, loaded.vocab_size) == (model.dtype, model.device, model.vocab_size)


def test_it_has_to_keep_what_it_writes(archives: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(archived, "require_cache_writes", lambda *given: seen.append(given))
    model = detcompile.load(archives["llama"])
    ((forward, groups, step),) = seen
    assert forward is model.executor.forwards.plain and groups == model.facts.kv_groups
    assert bool(forward(*step).isfinite().all())


def test_it_keeps_subnormals_whatever_the_caller_set(archives: dict[str, Path], tmp_path: Path) -> None:
    weights = Archive(archives["llama"]).weights(torch.device("cpu"))
    (norm,) = (name for name in weights if "norm" in name and "layers" not in name)
    weights[norm] *= 2.0**-130
    small = detcompile.load(rewritten(archives["llama"], tmp_path / "small.pt2", weights=weights))
    ids = torch.arange(9)[None]
    kept = small(ids).logits
    assert bool((kept.abs() < 2.0**-126).any()) and bool((kept != 0).any())
    try:
        torch.set_flush_denormal(True)
        flushing = small(ids).logits
    finally:
        torch.set_flush_denormal(False)
    assert_bitwise_equal(flushing, kept)


@pytest.mark.parametrize(("converts", "number"), [(True, 13), (False, 15)])
def test_operations_are_told_their_group_and_dtype(
    monkeypatch: pytest.MonkeyPatch, converts: bool, number: int
) -> None:
    """torch 2.11 took the number of a dtype in this list, bfloat16's is 13, for its own, which is 15."""
    assert _TORCH_TO_SERIALIZE_DTYPE[torch.bfloat16] == 13
    monkeypatch.setattr(archived, "converts_dtypes", lambda: converts)
    given = [
        {"name": "group", "arg": {"as_string": "7"}, "kind": 1},
        {"name": "equation", "arg": {"as_string": "7"}},
        {"name": "out_dtype", "arg": {"as_scalar_type": 13}},
        {"name": "out_dtype", "arg": {"as_none": True}},
    ]
    actual = json.loads(archived._for_this_process(json.dumps({"nodes": given}), "0"))["nodes"]
    assert actual[0] == given[0] | {"arg": {"as_string": "0"}}
    assert actual[1] == given[1] and actual[3] == given[3]
    assert actual[2] == given[2] | {"arg": {"as_scalar_type": number}}


def test_process_group_replaces_strings_only() -> None:
    schemas = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("detcompile::")]
    types = {schema.name: str(a.type) for schema in schemas for a in schema.arguments if a.name == "group"}
    assert set(types.values()) == {"str", "int"}
    for name, kind in types.items():
        stored = {"as_string": "of another process"} if kind == "str" else {"as_int": 32}
        operation = {"target": name, "inputs": [{"name": "group", "arg": stored, "kind": 1}]}
        [adapted] = json.loads(archived._for_this_process(json.dumps(operation), "of this one"))["inputs"]
        assert adapted["arg"] == ({"as_string": "of this one"} if kind == "str" else stored), name


def test_it_is_called_as_the_compiled_model_is(models: dict[str, CompiledModel], loaded: ExportedModel) -> None:
    torch.manual_seed(0)
    ids, mask = torch.randint(0, 160, (3, 9)), torch.ones(3, 9, dtype=torch.int64)
    mask[1, :4] = mask[2, 7:] = 0
    actual, expected = loaded(ids, mask, labels=ids), models["llama"](ids, mask, labels=ids)
    assert_bitwise_equal(actual.logits, expected.logits)
    assert_bitwise_equal(actual.loss, expected.loss)
    sampled = {"max_new_tokens": 12, "do_sample": True, "seed": [1, 2, 3]}
    assert torch.equal(loaded.generate(ids, mask, **sampled), models["llama"].generate(ids, mask, **sampled))
    seen = {"max_new_tokens": 6, "return_dict_in_generate": True, "output_scores": True, "repetition_penalty": 1.5}
    actual, expected = (m.generate(ids, mask, do_sample=True, seed=3, **seen) for m in (loaded, models["llama"]))
    assert torch.equal(actual.sequences, expected.sequences) and actual.seeds == expected.seeds
    assert_bitwise_equal(torch.stack(actual.scores), torch.stack(expected.scores))


def test_it_runs_beside_the_model_without_errors(loaded: ExportedModel, capfd: pytest.CaptureFixture[str]) -> None:
    """An engine tries to record the calls of steps that come again, once a model was compiled in this process."""
    assert direct_ops()
    params = detcompile.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    loaded.engine(detcompile.EngineConfig(num_blocks=16)).generate([[1, 2, 3]], params, progress=False)
    assert "rror" not in capfd.readouterr().err


def test_it_drafts_for_the_model_and_the_model_for_it(models: dict[str, CompiledModel], loaded: ExportedModel) -> None:
    params = detcompile.SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    config = detcompile.EngineConfig(num_blocks=64)
    plain = loaded.engine(config).generate([[1, 2, 3]], params, progress=False)[0].outputs[0].token_ids
    for target, small in ((loaded, models["llama"]), (models["llama"], loaded)):
        speculation = detcompile.SpeculationConfig(drafter=small.drafter(3, num_sequences=2), switch="always")
        answer = target.engine(config, speculation=speculation).generate([[1, 2, 3]], params, progress=False)[0]
        assert answer.outputs[0].token_ids == plain
    with pytest.raises(InvalidInput, match="one program of all layers"):
        loaded.drafter(layers=1)
    with pytest.raises(InvalidInput, match="hidden states"):
        loaded.medusa_drafter("tiny")
    with pytest.raises(InvalidInput, match="which weight is the output head"):
        loaded.head_weight()


def test_the_command_line_takes_an_archive(archives: dict[str, Path], loaded: ExportedModel) -> None:
    done = CliRunner().invoke(app, ["check", str(archives["llama"]), "--json"])
    assert done.exit_code == 0, done.output
    actual = json.loads(done.stdout[done.stdout.index("{") :])
    assert actual["fingerprint"] == loaded.fingerprint and actual["counts"] == loaded.certificate.counts
    refused = CliRunner().invoke(app, ["check", str(archives["llama"]), "--dtype", "float32"])
    assert isinstance(refused.exception, InvalidInput) and "is a compiled archive" in str(refused.exception)


@pytest.mark.parametrize(
    "member",
    [CERTIFICATE, KERNELS, library_folder(0), f"{EXTRA}/rank0", f"{EXTRA}/manifest.json", f"{EXTRA}/manifest.sha256"],
)
def test_a_flipped_bit_of_a_member_is_refused(archives: dict[str, Path], tmp_path: Path, member: str) -> None:
    archive = Archive(archives["llama"])
    content = bytearray(archives["llama"].read_bytes())
    name = next(name for name in archive.names(EXTRA) + archive.names(library_folder(0)) if name.startswith(member))
    at = content.index(archive.read(name)) + len(archive.read(name)) // 2
    content[at] ^= 1
    (tmp_path / "m.pt2").write_bytes(content)
    with pytest.raises(ArchiveError, match="damaged"):
        detcompile.load(tmp_path / "m.pt2")


@pytest.mark.parametrize("kept", [0.0, 0.1, 0.5, 0.99])
def test_a_truncated_file_is_refused(archives: dict[str, Path], tmp_path: Path, kept: float) -> None:
    content = archives["llama"].read_bytes()
    (tmp_path / "m.pt2").write_bytes(content[: int(kept * len(content))])
    with pytest.raises(ArchiveError, match=r"truncated|empty"):
        detcompile.load(tmp_path / "m.pt2")


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        ({"torch": "2.99.0"}, "made with torch 2.99.0"),
        ({"platform": "riscv64"}, "made for riscv64"),
        ({"isa": "avx1024"}, "made for a CPU with avx1024"),
        ({"vectors": "avx512 amx_tile_of_tomorrow"}, "made for avx512 amx_tile_of_tomorrow"),
        ({"device": "cuda", "gpu": "Another GPU", "capability": "12.0", "triton": "9.9"}, "made for .*Another GPU"),
    ],
)
def test_another_machine_or_torch_is_refused(
    archives: dict[str, Path], tmp_path: Path, machine: dict[str, str], message: str
) -> None:
    with pytest.raises(ArchiveError, match=message):
        detcompile.load(rewritten(archives["llama"], tmp_path / "m.pt2", machine))


def test_another_instruction_set_is_refused(
    archives: dict[str, Path], loaded: ExportedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DETCOMPILE_CPU_ISA", "portable" if "portable.so" not in str(archives) else "avx2")
    made = Archive(archives["llama"]).facts["machine"]["isa"]
    with pytest.raises(ArchiveError, match=f"made for {made}, and portable runs here: set DETCOMPILE_CPU_ISA={made}"):
        detcompile.load(archives["llama"])


def test_another_torch_is_refused(archives: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.12.1")
    with pytest.raises(ArchiveError, match=r"this is 2\.12\.1: install that one, or export again"):
        detcompile.load(archives["llama"])


@pytest.mark.parametrize("release", ["torch", "triton"])
def test_another_release_on_a_gpu_is_refused(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    here = this_machine(torch.device("cuda"))
    assert obstacle(here) == ""
    assert f"{release} 2.99.0" in obstacle(here | {release: "2.99.0"})


def test_another_format_or_detcompile_is_refused(archives: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match="has format 99"):
        detcompile.load(rewritten(archives["llama"], tmp_path / "m.pt2", format=99))
    parts = Archive(archives["llama"]).facts["fingerprint_parts"] | {"source": "0" * 64}
    with pytest.raises(ArchiveError, match="another version of detcompile"):
        detcompile.load(rewritten(archives["llama"], tmp_path / "m.pt2", fingerprint_parts=parts))


def test_what_cannot_be_exported_is_refused(
    models: dict[str, CompiledModel],
    archives: dict[str, Path],
    loaded: ExportedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patched, pytest.raises(UnsupportedModel, match="tested on cuda only"):
        patched.setattr(exporting, "DEVICES", ("cuda",))
        detcompile.export(models["llama"], tmp_path / "m.pt2")
    for path in (tmp_path / "m.zip", tmp_path / "missing" / "m.pt2"):
        with pytest.raises(InvalidInput, match=r"a file name that ends with \.pt2, in a folder that exists"):
            detcompile.export(models["llama"], path)
    with pytest.raises(InvalidInput, match="'inside' or 'beside'"):
        detcompile.export(models["llama"], tmp_path / "m.pt2", weights="outside")  # type: ignore[arg-type]
    shared = object.__new__(CompiledModel)
    vars(shared).update(vars(models["llama"]))
    shared.ranks = TensorParallel(size=2, rank=0, group="0")
    with pytest.raises(UnsupportedModel, match="compile it from a single process with tp=2"):
        detcompile.export(shared, tmp_path / "m.pt2")
    with pytest.raises(UnsupportedModel, match="was loaded from an archive"):
        detcompile.export(loaded, tmp_path / "m.pt2")
    with pytest.raises(InvalidInput, match="no such file"):
        detcompile.load(tmp_path / "m.pt2")
    with pytest.raises(InvalidInput, match=r"is an exported archive.*: pass it to detcompile\.load"):
        detcompile.compile(archives["llama"])


def test_a_file_that_is_not_an_archive_s_own_is_not_replaced_by_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as the checkpoint's model.safetensors, in whose folder model.pt2 shall lie."""
    monkeypatch.setattr(exporting, "compile", lambda _: pytest.fail("the work has begun"))
    path, checkpoint = tmp_path / "model.pt2", tmp_path / "model.safetensors"
    share = Share({}, (), StoredWeights.of({"weight": torch.ones(1)}))

    def assert_refused(num_ranks: int = 1) -> None:
        with pytest.raises(InvalidInput, match=r"safetensors, which is not part of an archive model\.pt2"):
            exporting.require_target(path, num_ranks)
        exporting.require_target(path)

    checkpoint.write_bytes(b"a checkpoint's")
    with pytest.raises(InvalidInput, match=r"model\.safetensors, which is not part of an archive"):
        detcompile.export(tmp_path, path, weights="beside")
    path.write_bytes(b"no archive")
    assert_refused()
    write_archive(path, {}, {}, [share])
    assert_refused()
    write_archive(path, {}, {}, [share], beside=True)
    exporting.require_target(path, 1)
    exporting.require_target(path, 2)
    (tmp_path / "model.rank1.safetensors").touch()
    assert_refused(2)


class Bytes:
    """A path of bytes, as os.fspath may give one."""

    def __fspath__(self) -> bytes:
        return b"no folder/m.pt2"


NO_PATHS = {
    "None": None,
    "a number": 3,
    "a list": ["m.pt2"],
    "long": "m" * 5000 + ".pt2",
    "with a NUL": "m\0.pt2",
    "half a letter": "\ud800.pt2",
    "bytes": b"m.pt2",
}


def test_folder_in_place_of_a_file_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "compile", lambda _: pytest.fail("the work has begun"))
    (tmp_path / "m.pt2").mkdir()
    for path in (tmp_path / "m.pt2", Bytes()):
        with pytest.raises(InvalidInput, match="in a folder that exists"):
            detcompile.export("tiny", path)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="no such file"):
        detcompile.load(Bytes())  # type: ignore[arg-type]


@pytest.mark.parametrize("path", NO_PATHS.values(), ids=NO_PATHS)
def test_a_path_is_a_path(path: Any) -> None:
    for call in (detcompile.load, lambda path: detcompile.export("tiny", path)):
        with pytest.raises(InvalidInput, match=r"give the path of a file|m…: File name too long; (give|pass)"):
            call(path)
