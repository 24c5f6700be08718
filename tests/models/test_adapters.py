"""Adapters by name: the bits of the same adapter compiled in, alone and among other adapters."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import detcompile
from detcompile import LLM, EngineConfig, InvalidInput, LoRARequest, SamplingParams
from detcompile.models.compiled import CompiledModel
from detcompile.passes.modules.low_rank import SlottedLinear
from tests.exhaustive import exhaustive_unless
from tests.model_cases import MAX_CONTEXT, compiled, random_model
from tests.training.cases import adapted, sequences

peft = pytest.importorskip("peft", reason="PEFT comes with the extra lora")
CONFIGS: dict[str, dict[str, Any]] = {
    "one": {},
    "two": {"r": 3, "lora_alpha": 5, "target_modules": ["v_proj", "gate_proj"]},
    "rs": {"r": 8, "lora_alpha": 3, "use_rslora": True, "target_modules": "all-linear"},
}
SAMPLING = SamplingParams(temperature=1.0, seed=3, max_tokens=12, logprobs=2, prompt_logprobs=0)
PLAIN = SamplingParams(temperature=0, max_tokens=1)
CONFIG = EngineConfig(num_blocks=64, block_size=16, max_num_batched_tokens=48)
PROMPTS = [ids.tolist() for ids in sequences([40, 7, 64, 15])]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters of each config, saved by PEFT."""
    saved = {}
    for name, config in CONFIGS.items():
        saved[name] = tmp_path_factory.mktemp(name)
        adapted(**config).save_pretrained(saved[name])
    return saved


@pytest.fixture(scope="module")
def model(device: str) -> CompiledModel:
    """A model with slots."""
    return detcompile.compile(random_model("qwen3", torch.bfloat16, device), max_context=MAX_CONTEXT, max_lora_rank=16)


def outputs(engine: Any, prompts: list[list[int]], adapter: Any = None) -> list[Any]:
    return [
        (output.outputs[0].token_ids, output.outputs[0].logprobs, output.prompt_logprobs)
        for output in engine.generate(prompts, SAMPLING, progress=False, adapter=adapter)
    ]


@pytest.mark.parametrize("name", exhaustive_unless("one".__eq__, CONFIGS))
def test_adapter_has_the_bits_of_a_compiled_one(model: CompiledModel, folders: dict[str, Path], name: str) -> None:
    engine = model.engine(CONFIG)
    if name not in engine.adapters:
        engine.load_adapter(name, folders[name])
    alone = detcompile.compile(adapted(**CONFIGS[name]).to(model.device), max_context=MAX_CONTEXT)
    assert outputs(engine, PROMPTS, name) == outputs(alone.engine(CONFIG), PROMPTS)


def test_requests_of_many_adapters_keep_their_bits(model: CompiledModel, folders: dict[str, Path]) -> None:
    engine, fingerprint = model.engine(CONFIG), model.fingerprint
    plain = compiled("qwen3", torch.bfloat16, model.device.type)
    for name, folder in folders.items():
        if name not in engine.adapters:
            assert len(engine.load_adapter(name, folder)) == 64
    expected = {name: outputs(engine, PROMPTS, name) for name in (None, *CONFIGS)}
    assert expected[None] == outputs(plain.engine(CONFIG), PROMPTS)
    assert len({repr(actual) for actual in expected.values()}) == 4
    chosen = [None, "one", "two", "rs", "rs"] * 4
    others = EngineConfig(num_blocks=24, block_size=16, max_num_batched_tokens=16, max_num_seqs=5, overlap=True)
    for engine_of_all in (engine, model.engine(others)):
        for place, actual in enumerate(outputs(engine_of_all, PROMPTS * 5, chosen)):
            assert actual == expected[chosen[place]][place % 4], (place, chosen[place])
        engine_of_all.check()
    ids = torch.tensor([PROMPTS[0]], device=model.device)
    assert torch.equal(model(ids).logits, plain(ids).logits)
    assert model.fingerprint == fingerprint
    assert model.fingerprint_parts["weights"] == plain.fingerprint_parts["weights"]


def test_prefixes_are_shared_within_an_adapter(model: CompiledModel, folders: dict[str, Path]) -> None:
    engine = model.engine(CONFIG)
    for name in ("one", "two"):
        if name not in engine.adapters:
            engine.load_adapter(name, folders[name])
    digest = engine._slots().find("one").digest

    def cached(adapter: str | None, salt: str = "") -> int:
        prompt = {"prompt_token_ids": PROMPTS[0], "cache_salt": salt}
        return engine.generate(prompt, PLAIN, progress=False, adapter=adapter)[0].num_cached_tokens

    order = [("one", ""), ("one", ""), (None, ""), (None, f"{digest}:"), ("two", ""), ("one", "x"), (None, "")]
    assert [cached(*each) > 0 for each in order] == [False, True, False, False, False, False, True]


def test_adapters_are_named_once_and_forgotten(model: CompiledModel, folders: dict[str, Path]) -> None:
    engine = model.engine(CONFIG)
    engine.load_adapter("other", folders["two"])
    with pytest.raises(InvalidInput, match="loaded already"):
        engine.load_adapter("other", folders["one"])
    request = engine.add_request(PROMPTS[0], SAMPLING, adapter="other")
    engine.unload_adapter("other")
    with pytest.raises(InvalidInput, match="unknown adapter 'other'"):
        engine.add_request([5], SAMPLING, adapter="other")
    done = {}
    while engine.has_unfinished_requests:
        done |= {output.request_id: output for output in engine.step()}
    assert done[request].finished and done[request].error is None
    llm = LLM(model, enable_lora=True, max_lora_rank=16, num_gpu_blocks_override=64)
    requests = [LoRARequest("by vLLM's name", 1, str(folders["two"])), None]
    actual = llm.generate([PROMPTS[0], PROMPTS[0]], SAMPLING, use_tqdm=False, lora_request=requests)
    assert actual[0].outputs[0].token_ids == done[request].outputs[0].token_ids != actual[1].outputs[0].token_ids
    for name in (5, ["other"], {"other"}):
        with pytest.raises(InvalidInput, match=r"unknown adapter|adapters: give one"):
            engine.generate([PROMPTS[0]], SAMPLING, progress=False, adapter=name, strict=True)
    with pytest.raises(InvalidInput, match="lora_request"):
        llm.generate("x", lora_request={"a": 1}, use_tqdm=False)


def broken(folder: Path, target: Path, change: str) -> None:
    """Write an adapter with one fault."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    key = next(key for key in tensors if "lora_A" in key)
    if change == "rank":
        config["r"] = 17
    elif change == "dora":
        config["use_dora"] = True
    elif change == "pissa":  # for which PEFT changes the weights of the linears
        config["init_lora_weights"] = "pissa_niter_4"
    elif change == "pattern":
        config["rank_pattern"] = {"q_proj": 2}
    elif change == "shape":
        tensors[key] = tensors[key][:, :-1].contiguous()
    elif change == "half":
        del tensors[key]
    elif change == "name":
        tensors["base_model.model.lm_head.lora_A.weight"] = tensors.pop(key)
    elif change == "nan":
        tensors[key][0, 0] = torch.nan
    elif change == "alpha":
        config["lora_alpha"] = "x"
    elif change == "huge alpha":
        config["lora_alpha"] = 10**400
    elif change == "overflow":  # where it is rounded to the model's bfloat16
        tensors[key] = tensors[key].float()
        tensors[key][0, 0] = torch.finfo(torch.float32).max
    text = {"json": "[]", "depth": "[" * 100_000}.get(change, json.dumps(config))
    (target / "adapter_config.json").write_text(text)
    save_file(tensors, target / "adapter_model.safetensors")
    if change == "cut":
        data = (target / "adapter_model.safetensors").read_bytes()
        (target / "adapter_model.safetensors").write_bytes(data[:-5])


FAULTS = ["rank", "dora", "pissa", "pattern", "shape", "half", "name", "nan", "alpha", "json", "cut"]


@pytest.mark.parametrize("change", [*FAULTS, "huge alpha", "overflow", "depth"])
def test_bad_adapters_are_named(model: CompiledModel, folders: dict[str, Path], tmp_path: Path, change: str) -> None:
    engine = model.engine(EngineConfig(num_blocks=8))
    broken(folders["one"], tmp_path, change)
    with pytest.raises(InvalidInput, match="adapter"):
        engine.load_adapter("bad", tmp_path)
    with pytest.raises(InvalidInput, match="cannot be read"):
        engine.load_adapter("bad", tmp_path / "missing")
    with pytest.raises(InvalidInput, match="give the path of a file"):
        engine.load_adapter("bad", None)
    assert "bad" not in engine.adapters


def test_room_for_adapters_draws_nothing_from_torch() -> None:
    before = torch.get_rng_state()
    A, B, _ = SlottedLinear(torch.nn.Linear(3, 4, device="meta").to_empty(device="cpu"), 2).slot
    assert torch.equal(torch.get_rng_state(), before)
    assert (A.shape, B.shape) == ((2, 3), (4, 2)) and not A.any() and not B.any()


def test_adapters_need_a_model_with_room() -> None:
    with pytest.raises(InvalidInput, match="max_lora_rank"):
        detcompile.compile(random_model("qwen3", torch.bfloat16), max_lora_rank=0)
    with pytest.raises(InvalidInput, match="tp=1"):
        detcompile.compile("tiny", max_lora_rank=4, tp=2)
