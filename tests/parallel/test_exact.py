"""Exact integer arithmetic over ranks: the bits of one rank for any number of ranks, which may hold unequal shares.

Each number of ranks runs once, with everything in it. Architectures run module by module, without a graph; `tiny` runs
as a certified graph, and has the golden digests. Of SERVED the certified graph serves requests.
"""

import functools
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import detcompile
from detcompile import EngineConfig, InvalidInput, Numerics, SamplingParams
from detcompile.commands.axes import AXES, score
from detcompile.errors import DetcompileError
from detcompile.parallel import TensorParallel, tensor_parallel
from detcompile.passes.modules.low_rank import AdaptedLinear
from detcompile.passes.modules.quantized_linear import replace_module
from detcompile.passes.preparation import prepare
from detcompile.passes.sharding.shard import shard
from detcompile.templates.exact import ranks as ranks_of_exact
from tests.bits import assert_bitwise_equal
from tests.exact import definition as exact
from tests.exact import golden
from tests.exhaustive import EXHAUSTIVE
from tests.invariance.axis import tokens
from tests.model_cases import certified
from tests.parallel.cases import Failure, answers, attempt, needs_gpus
from tests.parallel.ranks import run_ranks
from tests.parallel.test_plans import architecture
from tools.model_configs import MAX_CONTEXT

# Joined and grouped projections, norms over all heads, latents, sinks, ALiBi; four heads, which six ranks repeat.
NAMES = ["bloom", "codegen", "falcon", "gemma2", "gpt2", "granite_swa", "llama", "olmo2", "opt", "phi3", "stablelm"]
NAMES += ["youtu", "deepseek_v3", "gpt_oss", "mixtral"]  # experts: with shared ones; transposed with a bias
REPLICATED = ", replicated"  # every rank has all heads
ADAPTED = ", adapted"  # LoRA of all linears but the head
VARIANTS = {2: ["exact16"], 3: list(exact.VARIANTS), 6: ["exact8x16"]}
ARCHITECTURES = {
    2: [*NAMES, f"llama{ADAPTED}", "roberta-prelayernorm"],
    3: [*NAMES, "bert", f"bert{REPLICATED}"],
    6: [*NAMES, "electra"],
}
SERVED: dict[int, list[str]] = {2: [], 3: ["gpt_neox", "gpt_oss"], 6: []}  # gpt_neox has two independent sums
MARKS = {2: (), 3: EXHAUSTIVE, 6: EXHAUSTIVE}
LENGTH = 127  # of a text with golden logits


def adapt(model: Any) -> None:
    torch.manual_seed(1)
    for name, linear in list(model.model.named_modules(prefix="model")):
        if isinstance(linear, nn.Linear):
            A, B = nn.Linear(linear.in_features, 3, bias=False), nn.Linear(3, linear.out_features, bias=False)
            A_by_name, B_by_name = nn.ModuleDict({"default": A}), nn.ModuleDict({"default": B})
            replace_module(model, name, AdaptedLinear(linear, A_by_name, B_by_name, scaling=1.75, dropout=0.0))


def prepared(name: str, ranks: TensorParallel | None, variant: str = "exact8x16") -> Any:
    """Return a model in exact arithmetic, or the share of one of several ranks."""
    model = architecture(name.removesuffix(REPLICATED).removesuffix(ADAPTED))
    if name.endswith(ADAPTED):
        adapt(model)
    numerics = Numerics(arithmetic=variant)
    seen, _ = prepare(model, numerics, MAX_CONTEXT, shared=ranks is not None)
    if ranks is not None:
        shard(model, seen.attention, numerics, ranks, replicate_attention=name.endswith(REPLICATED))
    return model


def logits_of(name: str, tp: int) -> Tensor:
    model = prepared(name, None if tp == 1 else tensor_parallel(tp))
    input_ids = (torch.arange(32) * 13 % 150).view(4, 8)
    with torch.no_grad():
        return model(input_ids=input_ids, position_ids=torch.arange(8).repeat(4, 1), use_cache=False).logits


def tiny(variant: str, tp: int, device: str = "cpu") -> dict[str, str]:
    """Return the fingerprint of `tiny`, and digests of a text's logits: in one call, and in steps among other rows."""
    compile_model = certified if device == "cpu" else detcompile.compile
    model = compile_model(detcompile.load_model("tiny", device=device), tp=tp, numerics=Numerics(arithmetic=variant))
    text = tuple(exact.fixed_tokens(LENGTH))
    configuration = AXES["chunking"](text, [text, *(tokens(n, n) for n in (1, 33, 150))], random.Random(0))
    results = {"call": model(torch.tensor([text], device=device)).logits[0], "steps": score(model, configuration)}
    return {name: exact.digest(logits.cpu().numpy()) for name, logits in results.items()} | {"print": model.fingerprint}


def served(name: str, tp: int, device: str = "cpu") -> dict[str, Tensor]:
    compile_model, numerics = certified if device == "cpu" else detcompile.compile, Numerics(arithmetic="exact8x16")
    return answers(compile_model(architecture(name).to(device), tp=tp, max_context=MAX_CONTEXT, numerics=numerics))


def on_a_gpu(rank: int, tp: int) -> tuple[Any, Any]:
    return attempt(lambda: tiny("exact8x16", tp, "cuda")), attempt(lambda: served("gpt_oss", tp, "cuda"))


def gathered_and_reduced(tp: int) -> bool:
    """Return whether gathering and the library give this rank the same sums and maxima of integers."""
    group, generator = tensor_parallel(tp).group, torch.Generator().manual_seed(torch.distributed.get_rank())
    for dtype, operation in ((torch.int64, "sum"), (torch.int32, "max")):
        x = torch.randint(-(1 << 30), 1 << 30, (5, 7), generator=generator, dtype=dtype) << 3
        if not torch.equal(
            ranks_of_exact.gathered(x, operation, group), ranks_of_exact._over_ranks(x, operation, group)
        ):
            return False
    return True


def on_a_rank(rank: int, tp: int) -> dict[str, Any]:
    names = {name: attempt(lambda name=name: logits_of(name, tp)) for name in ARCHITECTURES[tp]}
    names |= {f"{name} served": attempt(lambda name=name: served(name, tp)) for name in SERVED[tp]}
    names |= {"collectives": attempt(lambda: gathered_and_reduced(tp))}
    return names | {variant: attempt(lambda variant=variant: tiny(variant, tp)) for variant in VARIANTS[tp]}


@functools.cache
def ranks(tp: int) -> list[dict[str, Any]]:
    return run_ranks(tp, on_a_rank, tp)


def results(tp: int, case: str) -> list[Any]:
    actual = [rank[case] for rank in ranks(tp)]
    for rank, result in enumerate(actual):
        assert not isinstance(result, Failure), f"rank {rank} of {tp}:\n{result}"
    return actual


def cases(of_size: dict[int, list[str]]) -> list[Any]:
    return [pytest.param(tp, case, marks=MARKS[tp]) for tp, some in of_size.items() for case in some]


@pytest.mark.parametrize(("tp", "variant"), cases(VARIANTS))
def test_ranks_have_the_golden_logits_and_fingerprint(tp: int, variant: str) -> None:
    logits = golden.kept()["logits"][variant][str(LENGTH)]
    expected = {"call": logits, "steps": logits, "print": golden.kept()["fingerprints"][variant]}
    assert results(tp, variant) == [expected] * tp


@pytest.mark.parametrize("tp", [pytest.param(tp, marks=MARKS[tp]) for tp in MARKS])
def test_gathered_integers_equal_library_sums(tp: int) -> None:
    assert results(tp, "collectives") == [True] * tp


@pytest.mark.parametrize(("tp", "name"), cases(ARCHITECTURES))
def test_ranks_give_one_ranks_logits(tp: int, name: str) -> None:
    whole = logits_of(name, 1)
    assert bool(whole.isfinite().all()) and len(whole.unique()) > whole.numel() / 2
    for rank, logits in enumerate(results(tp, name)):
        assert_bitwise_equal(logits, whole, f"{name} on rank {rank} of {tp}")


@pytest.mark.parametrize(("tp", "name"), cases(SERVED))
def test_ranks_serve_one_ranks_answers(tp: int, name: str) -> None:
    whole = served(name, 1)
    for rank, actual in enumerate(results(tp, f"{name} served")):
        for what, expected in whole.items():
            assert_bitwise_equal(actual[what], expected, f"{what} of {name} on rank {rank} of {tp}")


@pytest.mark.parametrize("tp", [pytest.param(tp, marks=needs_gpus(tp)) for tp in (2, 3)])
def test_gpus_have_the_golden_logits_and_serve_the_answers_of_a_cpu(tp: int) -> None:
    logits = golden.kept()["logits"]["exact8x16"][str(LENGTH)]
    digests = {"call": logits, "steps": logits, "print": golden.kept()["fingerprints"]["exact8x16"]}
    whole = served("gpt_oss", 1)
    for rank, (first, second) in enumerate(run_ranks(tp, on_a_gpu, tp, device_type="cuda")):
        assert first == digests, f"rank {rank} of {tp}:\n{first}"
        assert not isinstance(second, Failure), f"rank {rank} of {tp}:\n{second}"
        for what, expected in whole.items():
            assert_bitwise_equal(second[what], expected, f"{what} on rank {rank} of {tp}")


REFUSED = {
    "dbrx": "DbrxForCausalLM: experts that take no implementation from outside, over several ranks; compile with tp=1",
}


@pytest.mark.parametrize("name", REFUSED)
def test_model_that_ranks_cannot_share_is_rejected_by_name(name: str) -> None:
    with pytest.raises(DetcompileError, match=REFUSED[name]):
        prepared(name, TensorParallel(size=3, rank=0, group="never asked"))


@EXHAUSTIVE
@pytest.mark.parametrize(("pp", "tp"), [(2, 1), (3, 2), (1, 3)])
def test_workers_have_the_golden_logits_and_fingerprint(pp: int, tp: int) -> None:
    numerics = Numerics(arithmetic="exact8x16")
    with detcompile.compile("tiny", device="cpu", pp=pp, tp=tp, numerics=numerics) as model:
        logits = model(torch.tensor([exact.fixed_tokens(LENGTH)])).logits[0]
        assert exact.digest(logits.numpy()) == golden.kept()["logits"]["exact8x16"][str(LENGTH)]
        assert model.fingerprint == golden.kept()["fingerprints"]["exact8x16"], model.fingerprint_parts
        if tp == 3:  # 1, 3 and 3 key heads
            engine = model.engine(EngineConfig(num_blocks=20, block_size=16))
            engine.generate([list(range(40))], SamplingParams(max_tokens=4), progress=False)
            with pytest.raises(InvalidInput, match="unequal numbers of heads cannot be exported"):
                engine.prefixes.export(list(range(40)))
