"""Exact integer arithmetic over ranks: the bits of one rank for any number of ranks, which may hold unequal shares.

Each number of ranks runs once, with everything in it. Architectures run module by module, without a graph; `tiny` runs
as a certified graph, and has the golden digests. Of SERVED the certified graph serves requests.
"""

import functools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import detcompile
from detcompile import Numerics
from detcompile.commands.axes import AXES, score
from detcompile.errors import DetcompileError
from detcompile.parallel import TensorParallel, tensor_parallel
from detcompile.passes.preparation import prepare
from detcompile.passes.sharding.shard import shard
from tests.bits import assert_bitwise_equal
from tests.exact import definition as exact
from tests.exact import golden
from tests.exhaustive import EXHAUSTIVE
from tests.invariance.axis import tokens
from tests.model_cases import certified
from tests.parallel.cases import Failure, answers, attempt
from tests.parallel.ranks import run_ranks
from tests.parallel.test_plans import architecture
from tools.model_configs import MAX_CONTEXT

# Joined and grouped projections, norms over all heads, latents, sinks, ALiBi; four heads, which six ranks repeat.
NAMES = ["bloom", "codegen", "gemma2", "gpt2", "granite_swa", "llama", "olmo2", "opt", "phi3", "stablelm", "youtu"]
NAMES += ["deepseek_v3", "gpt_oss", "mixtral"]  # experts: with shared ones; transposed with a bias
VARIANTS = {2: ["exact16"], 3: list(exact.VARIANTS), 6: ["exact8x16"]}
ARCHITECTURES = {2: [*NAMES, "roberta-prelayernorm"], 3: NAMES, 6: NAMES}
SERVED: dict[int, list[str]] = {2: [], 3: ["gpt_neox", "gpt_oss"], 6: []}  # the first has two sums beside each other
MARKS = {2: (), 3: EXHAUSTIVE, 6: EXHAUSTIVE}
LENGTH = 127  # of a text with golden logits


def prepared(name: str, ranks: TensorParallel | None, variant: str = "exact8x16") -> Any:
    """Return a model in exact arithmetic, or the share of one of several ranks."""
    model, numerics = architecture(name), Numerics(arithmetic=variant)
    seen, _ = prepare(model, numerics, MAX_CONTEXT, shared=ranks is not None)
    if ranks is not None:
        shard(model, seen.attention, numerics, ranks)
    return model


def logits_of(name: str, tp: int) -> Tensor:
    model = prepared(name, None if tp == 1 else tensor_parallel(tp))
    input_ids = (torch.arange(32) * 13 % 150).view(4, 8)
    with torch.no_grad():
        return model(input_ids=input_ids, position_ids=torch.arange(8).repeat(4, 1), use_cache=False).logits


def tiny(variant: str, tp: int) -> dict[str, str]:
    """Return the fingerprint of `tiny`, and digests of a text's logits: in one call, and in steps among other rows."""
    model = certified(detcompile.load_model("tiny", device="cpu"), tp=tp, numerics=Numerics(arithmetic=variant))
    text = tuple(exact.fixed_tokens(LENGTH))
    configuration = AXES["chunking"](text, [text, *(tokens(n, n) for n in (1, 33, 150))], random.Random(0))
    results = {"call": model(torch.tensor([text])).logits[0], "steps": score(model, configuration)}
    return {name: exact.digest(logits.numpy()) for name, logits in results.items()} | {"print": model.fingerprint}


def served(name: str, tp: int) -> dict[str, Tensor]:
    numerics = Numerics(arithmetic="exact8x16")
    return answers(certified(architecture(name), tp=tp, max_context=MAX_CONTEXT, numerics=numerics))


def on_a_rank(rank: int, tp: int) -> dict[str, Any]:
    names = {name: attempt(lambda name=name: logits_of(name, tp)) for name in ARCHITECTURES[tp]}
    names |= {f"{name} served": attempt(lambda name=name: served(name, tp)) for name in SERVED[tp]}
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


@pytest.mark.parametrize(("tp", "name"), cases(ARCHITECTURES))
def test_ranks_give_the_logits_of_one(tp: int, name: str) -> None:
    whole = logits_of(name, 1)
    assert bool(whole.isfinite().all()) and len(whole.unique()) > whole.numel() / 2
    for rank, logits in enumerate(results(tp, name)):
        assert_bitwise_equal(logits, whole, f"{name} on rank {rank} of {tp}")


@pytest.mark.parametrize(("tp", "name"), cases(SERVED))
def test_ranks_serve_the_answers_of_one(tp: int, name: str) -> None:
    whole = served(name, 1)
    for rank, actual in enumerate(results(tp, f"{name} served")):
        for what, expected in whole.items():
            assert_bitwise_equal(actual[what], expected, f"{what} of {name} on rank {rank} of {tp}")


REFUSED = {
    "bert": r"layer\.0\.attention\.self: 4 heads over tp=3 ranks; choose tp among \[1, 2, 4\]",
    "falcon": r"self_attention\.dense: a FalconLinear in exact arithmetic over ranks; compile with tp=1",
    "dbrx": "DbrxForCausalLM: experts that take no implementation from outside, over several ranks; compile with tp=1",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_ranks_cannot_share_is_rejected_by_name(name: str) -> None:
    with pytest.raises(DetcompileError, match=REFUSED[name]):
        prepared(name, TensorParallel(size=3, rank=0, group="never asked"))


@EXHAUSTIVE
@pytest.mark.parametrize(("pp", "tp"), [(2, 1), (3, 2)])
def test_stages_have_the_golden_logits_and_fingerprint(pp: int, tp: int) -> None:
    numerics = Numerics(arithmetic="exact8x16")
    with detcompile.compile("tiny", device="cpu", pp=pp, tp=tp, numerics=numerics) as model:
        logits = model(torch.tensor([exact.fixed_tokens(LENGTH)])).logits[0]
        assert exact.digest(logits.numpy()) == golden.kept()["logits"]["exact8x16"][str(LENGTH)]
        assert model.fingerprint == golden.kept()["fingerprints"]["exact8x16"], model.fingerprint_parts
