"""LLM runs vLLM's scripts: its arguments, its outputs, and the answers of an engine."""

import gc
import math
import weakref
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

import detcompile
from detcompile import LLM, CompiledModel, EngineError, InvalidInput, Numerics, SamplingParams
from detcompile.offline.llm_options import NEUTRAL, read_options
from detcompile.offline.llm_outputs import LLMCompletion, LLMOutput
from detcompile.runtime.dense.padded_batch import seed_of_row
from detcompile.runtime.sampling.logprobs import token_logprobs
from tests.model_cases import compiled, without_inductor
from tests.models.hub_cases import COMMIT, put_snapshot, with_cache
from tests.offline.vllm_arguments import DEFAULTS
from tests.serving.reasoning_cases import with_think_tokens

# vLLM's examples/offline_inference/basic/basic.py with the import and the model changed.
SCRIPT = """
from detcompile import LLM, SamplingParams

# Sample prompts.
prompts = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]
# Create a sampling params object.
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)


def main():
    # Create an LLM.
    llm = LLM(model="tiny")
    # Generate texts from the prompts.
    # The output is a list of RequestOutput objects
    # that contain the prompt, generated text, and other information.
    outputs = llm.generate(prompts, sampling_params)
    # Print the outputs.
    print("\\nGenerated Outputs:\\n" + "-" * 60)
    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs[0].text
        print(f"Prompt:    {prompt!r}")
        print(f"Output:    {generated_text!r}")
        print("-" * 60)


if __name__ == "__main__":
    main()
"""
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% if not loop.last or add_generation_prompt %}</>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}{{ style }}"
)
CHAT = [{"role": "system", "content": "Write Python."}, {"role": "user", "content": "def mean("}]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


@pytest.fixture(scope="module")
def model() -> CompiledModel:
    return compiled("tiny", torch.float32)


@pytest.fixture
def llm(model: CompiledModel) -> LLM:
    return LLM(model, num_gpu_blocks_override=200)


def test_vllm_script_runs_with_only_import_changed(
    model: CompiledModel, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, texts = [], []
    monkeypatch.setattr(
        "detcompile.offline.llm.compile", lambda *given, **_: requests.append(given) or model
    )  # the time
    for _ in range(2):
        exec(compile(SCRIPT, "basic.py", "exec"), {"__name__": "__main__"})
        texts.append(capsys.readouterr().out)
    assert requests == [("tiny",)] * 2
    assert texts[0] == texts[1]  # as the seed of an LLM is 0, and not drawn
    lines = texts[0].splitlines()
    assert sum(line.startswith("Prompt: ") for line in lines) == 4
    assert "Prompt:    'The capital of France is'" in lines
    assert sum(line.startswith("Output: ") and len(line) > len("Output:    ''") for line in lines) == 4


def test_answers_equal_engine_answers(model: CompiledModel, llm: LLM) -> None:
    prompts = ["def mean(values):", [5, 6, 7], {"prompt": "import"}, {"prompt_token_ids": [9, 8]}]
    params = SamplingParams(temperature=0.8, max_tokens=9, n=2, logprobs=3, prompt_logprobs=1)
    actual = llm.generate(prompts, params, use_tqdm=False)
    seeded = [replace(params, seed=seed_of_row(0, number)) for number in range(4)]
    expected = model.engine(detcompile.EngineConfig(num_blocks=200)).generate(prompts, seeded, progress=False)
    assert [output.seed for output in actual] == [single.seed for single in seeded]
    for ours, theirs in zip(actual, expected, strict=True):
        assert (ours.prompt, ours.prompt_token_ids) == (theirs.prompt, theirs.prompt_token_ids)
        assert ours.finished and ours.error is None and ours.num_cached_tokens == theirs.metrics.num_cached_tokens
        for sample, other in zip(ours.outputs, theirs.outputs, strict=True):
            assert (sample.index, sample.text, sample.token_ids) == (other.index, other.text, other.token_ids)
            assert (sample.finish_reason, sample.stop_reason) == (other.finish_reason, other.stop_reason)
            assert sample.cumulative_logprob == other.cumulative_logprob and sample.finished()
    again = llm.generate(prompts[1:2], replace(params, seed=actual[1].seed), use_tqdm=False)
    assert again[0].outputs == actual[1].outputs
    assert llm.generate(prompts[1], params, use_tqdm=False)[0].seed == seed_of_row(0, 5)
    unseeded = LLM(model, seed=None, num_gpu_blocks_override=200)
    assert unseeded.generate([5], use_tqdm=False)[0].seed != unseeded.generate([5], use_tqdm=False)[0].seed


def test_logprobs_are_dicts_by_token_with_ranks_and_text(model: CompiledModel, llm: LLM) -> None:
    params = SamplingParams(temperature=1.5, max_tokens=8, seed=3, logprobs=4, prompt_logprobs=0)
    [output] = llm.generate([[5, 6, 7, 8]], params, use_tqdm=False)
    tokens = output.outputs[0].token_ids
    logits = model(torch.tensor([[5, 6, 7, 8, *tokens]])).logits[0]
    known = token_logprobs(logits[3:-1], torch.tensor(tokens), model.facts.num_logits)
    for place, (token, entry) in enumerate(zip(tokens, output.outputs[0].logprobs, strict=True)):
        order = known.top_ids[place].tolist()
        assert {*entry} == {token, *order[:4]} and next(iter(entry)) == token
        for single, actual in entry.items():
            assert actual.rank == order.index(single) + 1
            assert actual.logprob == known.top[place][actual.rank - 1].item()
            assert actual.decoded_token == model.tokenizer.decode([single])
    assert any(entry[token].rank > 4 for token, entry in zip(tokens, output.outputs[0].logprobs))
    assert output.prompt_logprobs[0] is None and [*output.prompt_logprobs[1]] == [6]


def test_sampling_logprobs_hold_only_kept_tokens(llm: LLM) -> None:
    params = SamplingParams(temperature=1.5, top_k=3, max_tokens=8, seed=3, logprobs=0, sampling_logprobs=-1)
    [sample] = llm.generate([[5, 6, 7, 8]], params, use_tqdm=False)[0].outputs
    for token, entry in zip(sample.token_ids, sample.sampling_logprobs, strict=True):
        assert len(entry) == 3 and next(iter(entry)) == token
        assert math.isclose(sum(math.exp(one.logprob) for one in entry.values()), 1, abs_tol=1e-6)
        assert sorted(one.rank for one in entry.values()) == [1, 2, 3]
    with pytest.raises(InvalidInput, match="needs logprobs"):
        SamplingParams(sampling_logprobs=1)


def test_a_conversation_is_rendered_by_the_template(llm: LLM) -> None:
    options = {"chat_template": TEMPLATE, "use_tqdm": False}
    [output] = llm.chat(CHAT, GREEDY, **options)
    text = "<system>Write Python.</><user>def mean(</><assistant>"
    assert output.prompt == text
    [plain] = llm.generate(text, GREEDY, use_tqdm=False)
    assert (output.prompt_token_ids, output.outputs) == (plain.prompt_token_ids, plain.outputs)
    both = llm.chat([CHAT, CHAT[1:]], [GREEDY, replace(GREEDY, max_tokens=2)], **options)
    assert both[0].outputs[0].token_ids == output.outputs[0].token_ids
    assert both[1].prompt == "<user>def mean(</><assistant>" and len(both[1].outputs[0].token_ids) == 2
    options |= {"add_generation_prompt": False, "chat_template_kwargs": {"style": "!"}}
    assert llm.chat(CHAT, GREEDY, **options)[0].prompt == "<system>Write Python.</><user>def mean(!"
    options |= {"continue_final_message": True, "chat_template_kwargs": {}}
    assert llm.chat(CHAT, GREEDY, **options)[0].prompt == "<system>Write Python.</><user>def mean("
    with pytest.raises(InvalidInput, match="chat template cannot render"):
        llm.chat(CHAT, GREEDY, use_tqdm=False, chat_template="{{ raise_exception('no') }}")
    assert llm.chat(CHAT, GREEDY, use_tqdm=False)[0].prompt == "# Write Python.\n# def mean(\n"
    for messages in ("hello", {}, [], 3, [3], [None], [CHAT, "hello"], [CHAT, CHAT[0]]):
        with pytest.raises(InvalidInput, match="messages"):
            llm.chat(messages, GREEDY, chat_template=TEMPLATE)
    with pytest.raises(InvalidInput, match="character 6 is half of a surrogate pair"):
        llm.chat([{"role": "user", "content": "\ud800"}], GREEDY, chat_template=TEMPLATE)
    with pytest.raises(InvalidInput, match="chat_template_kwargs 5 is an int"):
        llm.chat(CHAT, GREEDY, chat_template=TEMPLATE, chat_template_kwargs=5)


def test_chat_separates_reasoning(model: CompiledModel) -> None:
    backend = Tokenizer.from_str(with_think_tokens(model.tokenizer.backend_tokenizer.to_str()))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
    closes = backend.token_to_id("</think>")
    options = {"chat_template": TEMPLATE + "<think>\n{% if off %}</think>{% endif %}", "use_tqdm": False}
    params = SamplingParams(temperature=0.0, max_tokens=12)
    with LLM(model, tokenizer=tokenizer, num_gpu_blocks_override=40) as llm:
        [output] = llm.chat(CHAT, params, thinking_token_budget=3, **options)
        part = output.outputs[0]
        assert part.token_ids[3] == closes and part.text == f"{part.reasoning}</think>{part.content}"
        assert part.reasoning == tokenizer.decode(part.token_ids[:3]) and len(part.token_ids) == 12
        [plain] = llm.chat(CHAT, params, **options)
        for budget in (99, 1 << 40):
            [again] = llm.chat(CHAT, params, thinking_token_budget=budget, **options)
            assert again.outputs == plain.outputs
        assert plain.outputs[0].token_ids[:3] == part.token_ids[:3]
        assert plain.outputs[0].reasoning == plain.outputs[0].text and plain.outputs[0].content == ""
        stop = next(letter for letter in part.content if letter not in part.reasoning)
        for chosen in (stop, part.reasoning[:2]):
            [stopped] = llm.chat(CHAT, replace(params, stop=[chosen]), thinking_token_budget=3, **options)
            assert stopped.outputs[0].reasoning == part.reasoning
            assert stopped.outputs[0].content == part.content.partition(chosen)[0]
        yes = replace(params, grammar=detcompile.Grammar.choice(["yes"]))
        [chosen] = llm.chat(CHAT, yes, thinking_token_budget=0, **options)
        assert (chosen.outputs[0].reasoning, chosen.outputs[0].content.strip()) == (None, "yes")
        [off] = llm.chat(CHAT, yes, thinking_token_budget=0, chat_template_kwargs={"off": True}, **options)
        assert (off.outputs[0].reasoning, off.outputs[0].content) == (None, "yes")
        with pytest.raises(InvalidInput, match="thinking_token_budget -1 must be at least 0"):
            llm.chat(CHAT, params, thinking_token_budget=-1, **options)
        with pytest.raises(InvalidInput, match="needs a reasoning format"):
            llm.chat(CHAT, params, thinking_token_budget=1, chat_template=TEMPLATE)
    with pytest.raises(InvalidInput, match="reasoning_parser='qwen' must be one of deepseek_r1, "):
        LLM(model, reasoning_parser="qwen")
    with LLM(model, tokenizer=tokenizer, reasoning_parser="none", num_gpu_blocks_override=40) as llm:
        [output] = llm.chat(CHAT, params, **options)
        assert (output.outputs[0].reasoning, output.outputs[0].content) == (None, output.outputs[0].text)


def test_token_id_unknown_to_tokenizer_has_no_text(model: CompiledModel) -> None:
    """Tokenizers lack text for the ids that pad a vocabulary, but any id may be among the top logprobs."""

    class Narrow:
        all_special_ids: tuple[int, ...] = ()

        def decode(self, ids: list[int], **_: object) -> str:
            if max(ids) >= 300:
                raise IndexError("piece id is out of range")
            return "a" * len(ids)

    params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=-1, allowed_token_ids=[5, 6])
    llm = LLM(model, tokenizer=Narrow(), num_gpu_blocks_override=20)
    [output] = llm.generate([[5, 6, 7]], params, use_tqdm=False)
    texts = [{token: single.decoded_token for token, single in entry.items()} for entry in output.outputs[0].logprobs]
    assert texts == [dict.fromkeys(entry) | dict.fromkeys(range(300), "a") for entry in texts]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt 1: the prompt is empty"),
        ([10**6], "prompt 1: the prompt holds token 1000000"),
        ([5] * 4000, "prompt 1: the prompt has 4000 tokens"),
        (5.0, "prompt 1: the prompt 5.0 is neither"),
    ],
    ids=["empty", "an unknown token", "too long", "no prompt"],
)
def test_invalid_prompt_raises_before_any_is_served(llm: LLM, prompt: Any, message: str) -> None:
    steps = llm.engine.stats.num_steps
    with pytest.raises(InvalidInput, match=message):
        llm.generate(["def", prompt], GREEDY, use_tqdm=False)
    assert llm.engine.stats.num_steps == steps
    assert llm.generate("def", GREEDY, use_tqdm=False)[0].error is None


def test_refused_prompt_has_empty_output(model: CompiledModel) -> None:
    [output] = model.engine(detcompile.EngineConfig(num_blocks=20)).generate([[10**6]], GREEDY, progress=False)
    assert len(output.outputs) == 1 and output.outputs[0].finish_reason == "error"
    assert output.outputs[0].text == "" and output.outputs[0].token_ids == [] and output.num_cached_tokens == 0


def test_defaults_come_from_generation_config(model: CompiledModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert LLM(model, num_gpu_blocks_override=40).get_default_sampling_params() == SamplingParams()
    for name, value in (("temperature", 0.5), ("top_k", 7), ("max_new_tokens", 3)):
        monkeypatch.setattr(model.model.generation_config, name, value)
    llm = LLM(model, num_gpu_blocks_override=40)
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.5, top_k=7, max_tokens=3)
    assert len(llm.generate("def", use_tqdm=False)[0].outputs[0].token_ids) == 3
    plain = LLM(model, generation_config="vllm", num_gpu_blocks_override=40)
    assert plain.get_default_sampling_params() == SamplingParams()


def test_each_prompt_has_its_priority(llm: LLM) -> None:
    for priority in ([3, -1], 2):
        assert len(llm.generate(["a", "b"], GREEDY, use_tqdm=False, priority=priority)) == 2
    assert llm.chat(CHAT, GREEDY, use_tqdm=False, chat_template="x", priority=1)[0].error is None
    for wrong, expected_text in (([1], "2 prompts and 1 priorities"), (["a", "b"], "priority")):
        with pytest.raises(InvalidInput, match=expected_text):
            llm.generate(["a", "b"], GREEDY, use_tqdm=False, priority=wrong)


def test_closed_llm_raises_and_frees_its_engine(model: CompiledModel) -> None:
    with LLM(model, num_gpu_blocks_override=40) as llm:
        assert llm.generate("def", GREEDY, use_tqdm=False)[0].outputs[0].text
    for call in (lambda: llm.generate("def"), lambda: llm.chat(CHAT)):
        with pytest.raises(EngineError, match="closed"):
            call()
    llm.close()
    other = LLM(model, num_gpu_blocks_override=40)
    engine = weakref.ref(other.engine)
    other.close()
    gc.collect()
    assert engine() is None  # and its KV cache with it
    assert llm.engine is None and model(torch.tensor([[1]])).logits.shape[0] == 1  # the caller's model is left alone


def test_options_are_mapped() -> None:
    given = {"max_num_seqs": 7, "max_num_batched_tokens": 99, "block_size": 32, "gpu_memory_utilization": 0.5}
    given |= {"enable_prefix_caching": False, "enforce_eager": True, "enable_chunked_prefill": False}
    given |= {"tensor_parallel_size": 2, "pipeline_parallel_size": 3}
    given |= {"dtype": "half", "max_model_len": 100, "num_gpu_blocks_override": 44}
    options = read_options(given)
    assert (options.tp, options.pp, options.dtype, options.max_context) == (2, 3, torch.float16, 100)
    engine = options.engine
    assert (engine.max_num_seqs, engine.max_num_batched_tokens, engine.block_size) == (7, 99, 32)
    assert (engine.memory_fraction, engine.prefix_caching, engine.num_blocks) == (0.5, False, 44)
    assert engine.cuda_graphs is False and engine.scheduler == "prefill_first"
    assert read_options({}).engine == detcompile.EngineConfig()
    assert read_options(dict.fromkeys([*NEUTRAL, "an_option_of_tomorrow"])) == read_options({})
    kernels = {"attention_config": {"backend": "FLASH_ATTN"}, "cudagraph_capture_sizes": [1], "download_dir": "/x"}
    assert read_options(kernels | {"logprobs_mode": "raw_logprobs", "reasoning_parser": ""}) == read_options({})


def test_every_vllm_default_is_accepted() -> None:
    plain = read_options({})
    for name, value in DEFAULTS.items():
        options = read_options({name: value})
        assert options == plain or name == "gpu_memory_utilization", name
    assert read_options(DEFAULTS | {"gpu_memory_utilization": 0.9}) == plain


ENGINE_OPTIONS = ("gpu_memory_utilization", "num_gpu_blocks_override")  # refused by EngineConfig's names


def test_every_vllm_argument_is_known() -> None:
    for name in DEFAULTS:
        try:
            read_options({name: "a value of no option"})
        except InvalidInput as error:
            assert name in str(error) or name in ENGINE_OPTIONS, str(error)
            assert "LLM has no option" not in str(error)


@pytest.mark.parametrize("name", ["tokenization_kwargs", "mm_processor_kwargs"])
def test_unsupported_request_arguments_are_refused_by_name(llm: LLM, name: str) -> None:
    with pytest.raises(InvalidInput, match=f"{name} is not supported"):
        llm.generate("def", GREEDY, use_tqdm=False, **{name: {"a": 1}})
    with pytest.raises(InvalidInput, match=f"{name} is not supported"):
        llm.chat(CHAT, GREEDY, use_tqdm=False, chat_template="x", **{name: {"a": 1}})
    assert llm.generate("def", GREEDY, use_tqdm=False, **{name: None})[0].error is None


@pytest.mark.parametrize(
    ("options", "expected_text"),
    [
        ({"quantization": "awq"}, r"LLM\(quantization='awq'\) is not supported"),
        ({"data_parallel_size": 2}, "data_parallel_size=2.*one engine"),
        ({"speculative_config": {"method": "ngram"}}, "speculative_config.*SpeculationConfig"),
        ({"max_model_len": 64}, r"max_model_len=64\) cannot change .* compiled: pass max_context to compile"),
        ({"revision": "main"}, r"revision=main\) cannot change a model that is already compiled"),
        ({"tokenizer_revision": "main"}, "tokenizer_revision='main'.* is not supported"),
        ({"max_modellen": 3}, "no option 'max_modellen'"),
        ({"dtype": "int8"}, "dtype='int8' must be"),
        ({"dtype": ["auto"]}, r"dtype=\['auto'\] must be"),
        ({"max_model_len": "4k"}, "max_model_len '4k' is a str"),
        ({"generation_config": "x"}, "generation_config='x' must be"),
        ({"block_size": 17}, "block_size"),
        ({"enforce_eager": 1}, "enforce_eager 1 is an int"),
        ({"seed": -1}, "seed -1 must be"),
        ({"dtype": "bfloat16"}, r"dtype=torch.bfloat16\) cannot change a model that is already compiled"),
        ({"numerics": Numerics()}, r"numerics=Numerics\(.*\)\) cannot change a model that is already compiled"),
        ({"tensor_parallel_size": 2}, r"tensor_parallel_size=2\) cannot change a model that is already compiled"),
        ({"tensor_parallel_size": 0}, r"tensor_parallel_size=0\) cannot change a model that is already compiled"),
        ({"pipeline_parallel_size": 2}, r"pipeline_parallel_size=2\) cannot change .*: pass pp to"),
        ({"tokenizer": "/nowhere"}, "tokenizer='/nowhere'"),
    ],
    ids=str,
)
def test_unsupported_options_are_refused_by_name(model: CompiledModel, options: dict, expected_text: str) -> None:
    with pytest.raises(InvalidInput, match=expected_text):
        LLM(model, **options)


def test_folder_is_loaded_with_given_dtype_and_length() -> None:
    folder = Path(detcompile.__file__).parent / "tiny" / "draft"
    single = str(folder.parent)
    options = {"dtype": "bfloat16", "max_model_len": 64, "tokenizer": single, "num_gpu_blocks_override": 9}
    with without_inductor(), LLM(str(folder), **options) as llm:
        assert llm.model.dtype == torch.bfloat16 and llm.model.max_context == 64
        assert (
            llm.get_tokenizer().name_or_path == single and llm.generate("def", GREEDY, use_tqdm=False)[0].error is None
        )
        with pytest.raises(InvalidInput, match="compiled for 64"):
            llm.generate([[5] * 64], GREEDY, use_tqdm=False)
        assert repr(llm) == f"LLM({llm.model!r})"
        there = options | {"dtype": "auto", "max_model_len": None}
        assert repr(LLM(llm.model, trust_remote_code=True, **there)) == repr(llm)
    exact = Numerics(arithmetic="exact8")
    with without_inductor(), LLM(str(folder), numerics=exact, **options) as llm:
        assert llm.model.numerics == exact and llm.generate("def", GREEDY, use_tqdm=False)[0].error is None
    with pytest.raises(InvalidInput, match="numerics 'exact8' is a str: give Numerics"):
        LLM(str(folder), numerics="exact8")


def test_hub_name_is_loaded_at_its_revision(tmp_path: Path) -> None:
    folder = Path(detcompile.__file__).parent / "tiny"
    files = {file.name: file.read_bytes() for file in (folder / "draft").iterdir() if file.is_file()}
    files |= {file.name: file.read_bytes() for file in folder.glob("tokenizer*")}
    put_snapshot(tmp_path, "org/name", files, ref="v1")
    with with_cache(tmp_path, offline=True), without_inductor():
        with LLM("org/name", revision="v1", dtype="float32", num_gpu_blocks_override=9) as llm:
            assert llm.model.config._commit_hash == COMMIT and llm.model.name_or_path == "org/name"
            assert llm.generate("def", GREEDY, use_tqdm=False)[0].error is None
        with pytest.raises(InvalidInput, match="v2"):
            LLM("org/name", revision="v2")


def test_outputs_have_vllm_fields() -> None:
    """Those of vllm.outputs.RequestOutput and CompletionOutput that text has."""
    assert {single.name for single in fields(LLMOutput)} >= {
        *("request_id", "prompt", "prompt_token_ids", "prompt_logprobs", "outputs", "finished", "metrics"),
        "num_cached_tokens",
    }
    assert {single.name for single in fields(LLMCompletion)} >= {
        *("index", "text", "token_ids", "cumulative_logprob", "logprobs", "finish_reason", "stop_reason")
    }
